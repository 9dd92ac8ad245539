"""What the control groups of this process allow it: memory and processor time, versions 1 and 2, nested groups too.

`root` stands for "/" where /proc and /sys are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tierzero.hardware.drives import mounts

_BOUNDLESS = 1 << 62  # version 1 writes "no limit" as the largest multiple of a page


def memory_limit(root: str | os.PathLike[str] = "/") -> int | None:
    """Bytes of memory that this process' groups allow, the lowest of all levels; None where nothing limits it.

    Version 2's `memory.high` counts too: beyond it the kernel slows every allocation down to reclaim.
    """
    found = []
    for directory in groups("memory", root):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limit = _number(directory / name)
            if limit is not None and limit < _BOUNDLESS:
                found.append(limit)
    return min(found, default=None)


def cpu_quota(root: str | os.PathLike[str] = "/") -> float | None:
    """Processors' worth of time per second that the groups allow; None where nothing limits it."""
    found = []
    for directory in groups("cpu", root):
        words = _words(directory / "cpu.max")
        quota, period = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            quota, period = int(words[0]), int(words[1])
        if quota is not None and period:
            found.append(quota / period)
    return min(found, default=None)


def usable_cores(root: str | os.PathLike[str] = "/") -> int:
    """Cores that this thread may use at once: its affinity (or cpuset), and whole ones of the groups' quota."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def groups(controller: str, root: str | os.PathLike[str] = "/") -> Iterator[Path]:
    """Directories of the groups that hold this process under `controller`, innermost first, up to the top that is
    visible here. Where both versions are mounted, a controller is in one of them.
    """
    base = Path(root)
    try:
        lines = (base / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    table = mounts(root)
    for line in lines:
        ident, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for mount in table:
            unified = mount.fs_type == "cgroup2" and ident == "0" and not names
            legacy = mount.fs_type == "cgroup" and controller in names.split(",") and controller in mount.options
            if unified or legacy:
                top = base / mount.point.lstrip("/")
                yield from _upwards(top, _below(path, mount.fs_root))
                break


def _below(path: str, fs_root: str) -> str:
    """`path` of /proc/self/cgroup as seen from a mount of `fs_root`; "" where the mount does not show it.

    In a container the mount often shows only the container's own group while the path is the host's.
    """
    if fs_root != "/":
        inside = path == fs_root or path.startswith(fs_root.rstrip("/") + "/")
        path = path[len(fs_root) :] if inside else ""
    parts = [part for part in path.split("/") if part]
    return "" if ".." in parts else "/".join(parts)


def _upwards(top: Path, below: str) -> Iterator[Path]:
    directory = top / below
    while directory != top:
        if directory.is_dir():
            yield directory
        directory = directory.parent
    yield top


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else None
