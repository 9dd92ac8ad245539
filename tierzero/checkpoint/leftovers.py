"""What a killed export has left in a directory, and how the next one there knows that nobody writes it any more.

Note [exports hold their directory]
While an export goes on it holds a shared lock (flock) on the directory, which the system takes away with the process.
Whoever begins one tries for the lock alone: if it gets it nobody exports there, so every part file is left over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("tierzero")

_PART = re.compile(r"\.(.+)\.\d+-[0-9a-f]{8}\.part")


def part_of(name: str, token: str) -> str:
    """What the file `name` is called until it is whole; `token`: PID-DIGITS of the export."""
    return f".{name}.{token}.part"


@contextmanager
def exporting(folder: Path, names: Callable[[str], bool]) -> Iterator[None]:
    """While an export into `folder` goes on. First, parts of files for whose names `names` is true that a killed export
    has left are removed.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            _sweep(folder, fd, names)
            fcntl.flock(fd, fcntl.LOCK_SH)
        except OSError as error:  # a file system without locks: exports work all the same
            log.warning("what killed exports may have left in %s is not looked for: %s", folder, error)
        yield
    finally:
        os.close(fd)


def _sweep(folder: Path, fd: int, names: Callable[[str], bool]) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another export goes on here
    for path in folder.iterdir():
        match = _PART.fullmatch(path.name)
        if match is not None and names(match[1]) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)
