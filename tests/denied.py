"""Processes that are allowed less: for `preexec_fn` of subprocesses."""

from __future__ import annotations

import ctypes
import resource
import struct

_SET_SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS = 22, 24, 38
_FILTER, _IPC_LOCK = 2, 14
_IO_URING_SETUP, _EPERM = 425, 1


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def without_io_uring() -> None:
    """io_uring_setup fails with EPERM, as under a container's seccomp profile."""
    code = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, _IO_URING_SETUP),
        (0x06, 0, 0, 0x00050000 | _EPERM),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(code), ctypes.addressof(text)))),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "cannot deny io_uring to a child")


def with_little_locked_memory() -> None:
    """64 KiB, for root too: the capability that exempts from the limit does not survive the exec."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    ctypes.CDLL(None).prctl(_CAPBSET_DROP, _IPC_LOCK, 0, 0, 0)
