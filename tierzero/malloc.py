"""Freed units go back to the system: a CPU's device tier is malloc'd memory, and glibc keeps what lies below a growing
threshold.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

M_MMAP_THRESHOLD = -3  # malloc.h
SMALLEST = 1 << 20  # bytes: below this, mapping and faulting in pages anew costs more than it gives


def map_from(nbytes: int) -> bool:
    """Have malloc map blocks of `nbytes` (at least 1 MiB) and more, so that freeing one returns it; whether that took
    effect.

    glibc raises the threshold by itself to the largest block freed so far, up to 32 MiB; this fixes it for the process.
    MALLOC_MMAP_THRESHOLD_ in the environment wins.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # not glibc
    return bool(mallopt(M_MMAP_THRESHOLD, ctypes.c_int(min(max(nbytes, SMALLEST), 32 << 20))))


def trim() -> None:
    """Give free memory in the middle of malloc's heaps back to the system, where malloc can do that (glibc)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
