"""How the C library's malloc serves a CPU's device tier.

Note [malloc]
Where the CPU is the device, units lie in malloc'd memory: torch has no other storage that can lose its bytes. glibc
maps blocks from a threshold on by themselves, which go back to the system when they are freed, and keeps what it frees
below. It raises the threshold to what it saw freed, up to 32 MiB, and then a freed unit stays as a hole in its heap. So
the threshold is low while a unit gets its bytes: they are mapped, in huge pages where those are to be had (each fetch
faults them in anew, and a 4 KiB page costs as much as copying into it). For everything else it is what glibc's own
adjustment ends at: activations and gradients that come and go with every layer would fault in their pages anew.

MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ in the environment win.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MADV_HUGEPAGE = 14  # sys/mman.h
LOW, HIGH = 1 << 20, 32 << 20  # bytes; HIGH is the most that glibc takes
HUGE = 2 << 20  # bytes of a huge page on x86-64 and with 4 KiB pages on arm64
_LOCK = threading.Lock()


def _library() -> ctypes.PyDLL | None:
    """The C library, if it is one with mallopt and madvise that nobody has tuned."""
    if {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys():
        return None
    try:
        library = ctypes.PyDLL(None)  # keeps the interpreter's lock: these calls take microseconds
        library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return library if library.mallopt else None
    except (AttributeError, OSError):
        return None


_LIBC = _library()


def keep_freed() -> None:
    """Have malloc keep what is freed for what is allocated next, as it would after a while by itself; for good."""
    if _LIBC is not None:
        _LIBC.mallopt(M_MMAP_THRESHOLD, HIGH)
        _LIBC.mallopt(M_TRIM_THRESHOLD, 2 * HIGH)


@contextmanager
def mapped() -> Iterator[None]:
    """Blocks of 1 MiB and more that are allocated inside go back to the system when they are freed."""
    if _LIBC is None:
        yield
        return
    with _LOCK:
        _LIBC.mallopt(M_MMAP_THRESHOLD, LOW)
        try:
            yield
        finally:
            _LIBC.mallopt(M_MMAP_THRESHOLD, HIGH)


def advise_huge(address: int, nbytes: int) -> None:
    """Ask for huge pages wherever a whole one fits in [address, address + nbytes), none of which was touched yet."""
    first, last = -(-address // HUGE) * HUGE, (address + nbytes) // HUGE * HUGE
    if _LIBC is not None and last > first:
        _LIBC.madvise(first, last - first, MADV_HUGEPAGE)


def trim() -> None:
    """Give free memory in the middle of malloc's heaps back to the system, where malloc can do that (glibc)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
