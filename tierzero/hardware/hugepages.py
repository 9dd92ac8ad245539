"""Whether memory came in huge pages, from the kernel's own account of the process. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def resident(first: int, nbytes: int, smaps: Iterable[str] | None = None) -> tuple[int, int]:
    """(bytes in memory, bytes of them in huge pages) of the mappings over [first, first + nbytes).

    smaps: lines of a /proc/PID/smaps; None reads this process's. (0, 0) where there is no such file.
    """
    if smaps is None:
        try:
            with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
                return resident(first, nbytes, file)
        except OSError:
            return 0, 0
    touched = huge = 0
    inside = False
    for line in smaps:
        if line.startswith(("Rss:", "AnonHugePages:")):
            if inside:
                amount = int(line.split()[1]) << 10
                if line[0] == "R":
                    touched += amount
                else:
                    huge += amount
        elif (found := _RANGE.match(line)) is not None:
            inside = int(found[1], 16) < first + nbytes and first < int(found[2], 16)
    return min(touched, nbytes), min(huge, nbytes)


def advice() -> str:
    """What to do about memory that came in small pages."""
    try:
        text = ENABLED.read_text()
    except OSError:
        return "this kernel was built without transparent huge pages"
    if "[never]" in text:
        return f"{ENABLED} says never: write madvise there"
    return "free memory is in pieces, a cgroup limit is near, or huge pages are off for this process (prctl)"
