"""Which names come up in a directory, however short they are there."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CREATE, _MOVED_TO = 0x100, 0x80
_EVENT = struct.Struct("iIII")  # struct inotify_event, without its name


@contextmanager
def names_made(folder: Path) -> Iterator[list[str]]:
    """A list that has, behind the block, every name that was made in `folder` meanwhile: the kernel notes them all."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if handle < 0 or libc.inotify_add_watch(handle, os.fsencode(folder), _CREATE | _MOVED_TO) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    made: list[str] = []
    try:
        yield made
        try:
            while data := os.read(handle, 1 << 16):
                while data:
                    length = _EVENT.unpack_from(data)[3]
                    name, data = data[_EVENT.size : _EVENT.size + length], data[_EVENT.size + length :]
                    made.append(os.fsdecode(name.rstrip(b"\0")))
        except BlockingIOError:
            pass
    finally:
        os.close(handle)


def needs_nameless_files(folder: Path) -> None:
    """Skip the test where the file system has none."""
    try:
        os.close(os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600))
    except OSError as error:
        pytest.skip(f"no files without names here: {error.strerror}")
