"""What is resident, in the order of its next use: decides what `choose_victims` and `prefetch_order` decide, again and
again, in time that does not grow with the number of units.

Note [places]
The place of a unit's next use (`Trace.place`) stays what it is until the unit is used, so an order by places needs no
work from use to use. `_heap` has the resident units, the furthest place first. An entry may name a place that is too
far (that of a unit no trace knows, used again), which shows when it is taken out, and it is put back with the right
one; it must never name one that is too near, so whatever position has passed since the last decision is entered again.
A new era begins a new heap, once it is needed. `_cursor` is the first place whose unit may not be resident: what lies
before it, from the present position on, is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from tierzero.paging.schedule import Fetch, Trace, Unit

Kept = Callable[[Unit], bool]


class Lookahead:
    """The bytes of resident units against a budget. One thread uses it; another may move `trace` on meanwhile, which
    makes a decision one of the moment before.
    """

    def __init__(self, trace: Trace, budget: int) -> None:
        self.trace = trace
        self.budget = budget
        self.used = 0
        self.resident: dict[Unit, int] = {}  # bytes of what is resident or on its way
        self._since: dict[Unit, int] = {}  # unit -> a number for each time it became resident: orders equal places
        self._count = 0
        self._era = -1
        self._passed = 0  # the position at the last decision
        self._cursor = 0
        self._heap: list[tuple[int, int, Unit]] | None = None  # (-place, number, unit), built when it is needed
        self._settled = -1

    def add(self, uid: Unit, nbytes: int) -> None:
        """`uid` is resident from now on, or on its way."""
        self.resident[uid] = nbytes
        self.used += nbytes
        self._count += 1
        self._since[uid] = self._count
        if self._heap is not None:
            heappush(self._heap, self._entry(uid))

    def remove(self, uid: Unit) -> None:
        """`uid` is resident no more."""
        self.used -= self.resident.pop(uid)
        del self._since[uid]
        self._cursor = min(self._cursor, self.trace.place(uid))
        self._settled = -1

    def rewind(self) -> None:
        """What was skipped may be fetched after all."""
        self._cursor, self._settled = 0, -1

    @property
    def settled(self) -> bool:
        """Whether all that the trace expects in this era is resident, so that nothing need be decided. From any
        thread.
        """
        return self._settled == self.trace.era

    def victims(self, need: int, kept: Kept) -> list[Unit] | None:
        """What `choose_victims` says of the resident units, `kept` ones stay."""
        if need <= 0:
            return []
        self._follow()
        chosen = []
        freed = 0
        for uid, _ in self._furthest(kept):
            chosen.append(uid)
            freed += self.resident[uid]
            if freed >= need:
                break
        if freed < need:
            return None
        for uid in reversed(chosen[:-1]):  # spared as in `choose_victims`
            if freed - self.resident[uid] >= need:
                freed -= self.resident[uid]
                chosen.remove(uid)
        return chosen

    def fetch(
        self, size: Callable[[Unit], int], skip: Callable[[Unit], bool], kept: Kept, depth: int | None
    ) -> Fetch | None:
        """The first fetch that `prefetch_order` plans without what is to be skipped; None if there is none."""
        self._follow()
        uid = self._next(skip) if depth is None else self._near(skip, depth)
        if uid is None:
            return None
        need = size(uid) - (self.budget - self.used)
        victims: list[Unit] = []
        if need > 0:
            reach = self.trace.place(uid)
            freed = 0
            for victim, place in self._furthest(kept):
                if place <= reach:
                    break
                victims.append(victim)
                freed += self.resident[victim]
                if freed >= need:
                    break
            if freed < need:
                return None
        return Fetch(uid, tuple(victims))

    def _next(self, skip: Callable[[Unit], bool]) -> Unit | None:
        trace, resident, at = self.trace, self.resident, self._cursor
        uid = trace.at(at)
        while uid is not None and (uid in resident or skip(uid)):
            at += 1
            uid = trace.at(at)
        self._cursor = at
        self._settled = self._era if uid is None else -1
        return uid

    def _near(self, skip: Callable[[Unit], bool], depth: int) -> Unit | None:
        if self._next(skip) is None:
            return None
        ahead = (uid for uid in self.trace.upcoming() if not skip(uid))
        for _, uid in zip(range(depth), ahead, strict=False):
            if uid not in self.resident:
                return uid
        return None

    # -- see Note [places] ---------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Take note of what was used, and of what was passed over."""
        trace = self.trace
        era, position = trace.era, trace.position
        if era != self._era:
            self._era, self._heap, self._cursor = era, None, position
        elif self._heap is not None:
            for place in range(self._passed, position):
                uid = trace.at(place)
                if uid in self.resident:
                    heappush(self._heap, self._entry(uid))
        self._cursor = max(self._cursor, position)
        self._passed = position

    def _furthest(self, kept: Kept) -> Iterator[tuple[Unit, int]]:
        """(unit, place of its next use) of the resident units that have bytes and need not stay, the furthest first."""
        if self._heap is None:
            self._heap = [self._entry(uid) for uid in self.resident]
            heapify(self._heap)
        heap, taken = self._heap, {}
        try:
            while heap:
                entry = heappop(heap)
                uid = entry[2]
                if self._since.get(uid) != entry[1] or uid in taken:
                    continue
                right = self._entry(uid)
                if right != entry:
                    heappush(heap, right)
                    continue
                taken[uid] = entry
                if self.resident[uid] > 0 and not kept(uid):
                    yield uid, -entry[0]
        finally:
            for entry in taken.values():
                heappush(heap, entry)

    def _entry(self, uid: Unit) -> tuple[int, int, Unit]:
        return -self.trace.place(uid), self._since[uid], uid
