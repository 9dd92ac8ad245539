"""Extents and the free list they are taken from; the store's data file and the host arena both use it.

Pure arithmetic, no I/O.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from tierzero.units.layout import PAGE, round_up


@dataclass(frozen=True)
class Extent:
    """A run of `nbytes` bytes at `offset`, a multiple of 4096.

    The space it occupies is `capacity`, rounded up to 4096.
    """

    offset: int
    nbytes: int

    @property
    def capacity(self) -> int:
        return round_up(self.nbytes, PAGE)

    @property
    def end(self) -> int:
        """The first byte behind the occupied space."""
        return self.offset + self.capacity


class FreeList:
    """Free runs of [0, size), in whole pages, coalesced. Not thread-safe: its owner locks."""

    def __init__(self, size: int = 0) -> None:
        self.size = 0
        self.free_bytes = 0
        self._starts: list[int] = []
        self._length: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        if size:
            self.grow(size)

    def grow(self, size: int) -> None:
        """Extend the space to [0, size); sizes are whole pages."""
        if size % PAGE or size < self.size:
            raise ValueError(
                f"cannot grow a free list from {self.size} to {size} bytes: sizes grow, in multiples of {PAGE}"
            )
        start, self.size = self.size, size
        self.give(start, size - start)

    def shrink(self) -> int:
        """Cut the free tail off; the new size."""
        if self._starts and self._starts[-1] + self._length[self._starts[-1]] == self.size:
            start = self._starts[-1]
            self._remove(start)
            self.size = start
        return self.size

    @property
    def largest(self) -> int:
        """Bytes of the largest free run."""
        return self._by_length[-1][0] if self._by_length else 0

    @property
    def tail(self) -> int:
        """Free bytes at the very end."""
        if self._starts and self._starts[-1] + self._length[self._starts[-1]] == self.size:
            return self._length[self._starts[-1]]
        return 0

    def take(self, nbytes: int, *, first: bool = False) -> int | None:
        """The offset of `nbytes` (whole pages) from the smallest run that holds them, or the first one.

        None if there is none.
        """
        if nbytes == 0:
            return 0
        if first:
            start = next((s for s in self._starts if self._length[s] >= nbytes), None)
            if start is None:
                return None
        else:
            index = bisect_left(self._by_length, (nbytes, 0))
            if index == len(self._by_length):
                return None
            start = self._by_length[index][1]
        self._cut(start, start, nbytes)
        return start

    def take_at(self, offset: int, nbytes: int) -> bool:
        """Take exactly [offset, offset + nbytes); False, changing nothing, unless all of it is free."""
        if nbytes == 0:
            return True
        index = bisect_left(self._starts, offset + 1) - 1
        if index < 0:
            return False
        start = self._starts[index]
        if start + self._length[start] < offset + nbytes:
            return False
        self._cut(start, offset, nbytes)
        return True

    def give(self, offset: int, nbytes: int) -> None:
        """Put [offset, offset + nbytes) back and join it to its neighbours.

        ValueError if part of it is free already or outside.
        """
        if nbytes == 0:
            return
        index = bisect_left(self._starts, offset)
        before = self._starts[index - 1] if index else None
        after = self._starts[index] if index < len(self._starts) else None
        if (
            offset < 0
            or offset + nbytes > self.size
            or (after is not None and offset + nbytes > after)
            or (before is not None and before + self._length[before] > offset)
        ):
            raise ValueError(f"freed twice or never allocated: {nbytes} bytes at {offset} of {self.size}")
        if after is not None and after == offset + nbytes:
            nbytes += self._remove(after)
        if before is not None and before + self._length[before] == offset:
            nbytes += self._remove(before)
            offset = before
        self._insert(offset, nbytes)

    def runs(self) -> list[tuple[int, int]]:
        """All free runs as (offset, bytes), in order."""
        return [(start, self._length[start]) for start in self._starts]

    def _cut(self, start: int, offset: int, nbytes: int) -> None:
        length = self._remove(start)
        if offset > start:
            self._insert(start, offset - start)
        if start + length > offset + nbytes:
            self._insert(offset + nbytes, start + length - offset - nbytes)

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._length[start] = length
        insort(self._by_length, (length, start))
        self.free_bytes += length

    def _remove(self, start: int) -> int:
        length = self._length.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self.free_bytes -= length
        return length
