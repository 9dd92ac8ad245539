"""What the kernel says about this process: resident memory and bytes moved to and from disks."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def _status(key: str) -> int | None:
    """Bytes of a `kB` line of /proc/self/status."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", errors="replace") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return None


def resident() -> int:
    """Bytes resident now."""
    now = _status("VmRSS")
    if now is not None:
        return now
    import psutil

    return int(psutil.Process().memory_info().rss)


def reset_peak() -> None:
    """Start a new high-water mark of resident memory, where the kernel allows it."""
    with suppress(OSError):  # where that is not allowed the mark covers the whole process, which is only higher
        Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    """The most bytes resident since `reset_peak`."""
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def disk_bytes() -> tuple[int, int] | None:
    """Bytes that this process made the block devices read and write so far; None where the kernel does not tell."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            fields = dict(line.split(": ") for line in file)
        return int(fields["read_bytes"]), int(fields["write_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def return_free_memory() -> None:
    """Give the allocator's free pages back to the kernel, so that they do not count as resident."""
    if sys.platform.startswith("linux"):
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
