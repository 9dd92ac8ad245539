"""Processes that are allowed less: for `preexec_fn` of subprocesses."""

from __future__ import annotations

import ctypes
import platform
import resource
import struct

_SET_SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS = 22, 24, 38
_FILTER, _IPC_LOCK = 2, 14
_IO_URING_SETUP, _EPERM, _EOPNOTSUPP = 425, 1, 95
_OPENAT = {"x86_64": 257, "aarch64": 56}
_TMPFILE = 0o20000000  # of O_TMPFILE, without O_DIRECTORY
_LOAD, _EQUAL, _HAS, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions; jumps are over so many others
_FAIL, _ALLOW = 0x00050000, 0x7FFF0000
_NUMBER, _FLAGS = 0, 32  # where a filter finds the number of the system call, and the flags of openat


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def without_io_uring() -> None:
    """io_uring_setup fails with EPERM, as under a container's seccomp profile."""
    _filter(
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 1, _IO_URING_SETUP),
        (_RETURN, 0, 0, _FAIL | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )


def without_nameless_files() -> None:
    """Opening with O_TMPFILE fails with EOPNOTSUPP, as on file systems that have no such files."""
    _filter(
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 3, _OPENAT[platform.machine()]),
        (_LOAD, 0, 0, _FLAGS),
        (_HAS, 0, 1, _TMPFILE),
        (_RETURN, 0, 0, _FAIL | _EOPNOTSUPP),
        (_RETURN, 0, 0, _ALLOW),
    )


def _filter(*code: tuple[int, int, int, int]) -> None:
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(code), ctypes.addressof(text)))),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "cannot deny a child its system calls")


def with_little_locked_memory() -> None:
    """64 KiB, for root too: the capability that exempts from the limit does not survive the exec."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    ctypes.CDLL(None).prctl(_CAPBSET_DROP, _IPC_LOCK, 0, 0, 0)
