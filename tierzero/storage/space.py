"""The space of a store's data file.

What is free, how often each extent is referred to, and growing and trimming the file.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping, Sequence

from tierzero.errors import NO_ROOM
from tierzero.sizes import format_size
from tierzero.storage import stripes
from tierzero.storage.extents import Extent, FreeList
from tierzero.tiers.base import BlockFile
from tierzero.units.layout import PAGE, round_up

_STEP_MIN, _STEP_MAX = 16 << 20, 1 << 30  # bytes the file grows by, if the drive has them


class Space:
    """Extents of `file`, with a count of the references to each; an extent with none is free. Thread-safe.

    weights: of the file's members, where there are several; see stripes' Note [stripes].
    """

    def __init__(self, file: BlockFile, weights: Sequence[int] = (1,)) -> None:
        self.path = file.path
        self.file = file
        self.weights = weights
        self._lock = threading.RLock()
        self._free = FreeList(round_up(file.size(), PAGE))
        self._live: dict[int, tuple[Extent, int]] = {}  # offset -> extent, references

    @property
    def capacity(self) -> int:
        """Bytes of the file."""
        return self._free.size

    @property
    def free_bytes(self) -> int:
        """Bytes of it that nothing refers to."""
        return self._free.free_bytes

    def live(self) -> list[Extent]:
        """All extents that something refers to, in order."""
        with self._lock:
            return [self._live[offset][0] for offset in sorted(self._live)]

    def take(self, nbytes: int, name: str) -> Extent:
        """A free extent with one reference. OSError(ENOSPC) naming `name`, the bytes asked and free, and the path."""
        if nbytes < 0:
            raise ValueError(f"the record {name!r} cannot have {nbytes} bytes")
        capacity = round_up(nbytes, PAGE)
        with self._lock:
            offset = self._free.take(capacity)
            if offset is None:
                missing = capacity - self._free.tail
                step = round_up(min(max(self.capacity // 8, _STEP_MIN), _STEP_MAX), PAGE)
                self._grow(
                    self.capacity + missing,
                    self.capacity + max(step, missing),
                    f"the record {name!r} of {format_size(nbytes)}",
                )
                offset = self._free.take(capacity)
                assert offset is not None
            extent = Extent(offset, nbytes)
            if capacity:
                self._live[offset] = (extent, 1)
            return extent

    def reserve(self, nbytes: int) -> None:
        """Grow the file to at least `nbytes`. OSError(ENOSPC) as for `take`."""
        with self._lock:
            nbytes = round_up(nbytes, PAGE)
            if nbytes > self.capacity:
                self._grow(nbytes, nbytes, f"the store's {format_size(nbytes)}")

    def adopt(self, extent: Extent) -> bool:
        """Refer to an extent that a manifest names; False if it overlaps another one."""
        if not extent.capacity:
            return True
        with self._lock:
            known = self._live.get(extent.offset)
            if known is not None and known[0] == extent:
                self.hold(extent)
                return True
            if not self._free.take_at(extent.offset, extent.capacity):
                return False
            self._live[extent.offset] = (extent, 1)
            return True

    def hold(self, extent: Extent) -> None:
        """One more reference to a live extent."""
        if extent.capacity:
            with self._lock:
                self._live[extent.offset] = (extent, self._count(extent) + 1)

    def drop(self, extent: Extent) -> None:
        """One reference fewer; the last one makes it free."""
        if extent.capacity:
            with self._lock:
                count = self._count(extent)
                if count > 1:
                    self._live[extent.offset] = (extent, count - 1)
                else:
                    del self._live[extent.offset]
                    self._free.give(extent.offset, extent.capacity)

    def holds(self, extent: Extent) -> int:
        """How many references there are."""
        with self._lock:
            known = self._live.get(extent.offset)
            return known[1] if known is not None and known[0] == extent else 0

    def _count(self, extent: Extent) -> int:
        count = self.holds(extent)
        if not count:
            raise ValueError(f"{extent} of {self.path} is not in use: it was given up already")
        return count

    def trim(self) -> None:
        """Cut the free tail off the file."""
        with self._lock:
            if self._free.tail:
                self.file.truncate(self._free.shrink())

    def _grow(self, least: int, wanted: int, what: str) -> None:
        """Grow the file to `wanted` bytes, or where the drive cannot to `least`."""
        before = self.capacity
        failure: OSError | None = None
        for size in dict.fromkeys((wanted, least)):
            if room_for(self.file.paths, self.weights)[0] < size - before:
                continue  # do not fill the drive only to see that it is too small
            try:
                self.file.preallocate(size)
            except OSError as error:
                failure = error
                self.file.truncate(before)
                if error.errno not in NO_ROOM:
                    raise
            else:
                self._free.grow(size)
                return
        free, path = room_for(self.file.paths, self.weights)
        several = f", as much as {path} lets {len(self.weights)} striped drives hold" if len(self.weights) > 1 else ""
        raise OSError(
            failure.errno if failure is not None else errno.ENOSPC,
            f"no room for {what}: {format_size(least - before)} more is needed and the drive has {format_size(free)} "
            f"free{several}"
            f"{'' if failure is None else f' ({failure.strerror})'}. "
            "Free some space or use a directory on a larger drive",
            failure.filename if failure is not None and failure.filename else path,
        ) from failure


def room_for(
    paths: Sequence[str], weights: Sequence[int], promised: Mapping[int, int] | None = None
) -> tuple[int, str]:
    """(bytes that this user may still add to a file striped over `paths` by `weights`, the path that decides).

    Paths that do not exist yet count as their nearest parent that does. promised: by device number (st_dev), bytes that
    are free now and others will take; below zero for what they will give back.
    """
    promised = promised or {}
    there = [_existing(path) for path in paths]
    drives = [os.stat(path).st_dev for path in there]
    stats = {drive: os.statvfs(path) for drive, path in zip(drives, there, strict=True)}
    free = {drive: stat.f_bavail * stat.f_frsize - promised.get(drive, 0) for drive, stat in stats.items()}
    nbytes, index = stripes.room(drives, free, weights)
    return nbytes, paths[index]


def _existing(path: str) -> str:
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
