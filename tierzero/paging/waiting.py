"""Jobs that wait for their turn, each for a unit: urgent ones first, then in the order of the units' next use."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from tierzero.paging.schedule import FAR, Trace, Unit

J = TypeVar("J")
UNKNOWN = FAR // 2  # the place of all units that no trace knows
WIDTH = 3  # updates on their way at once, so that the drive never waits for the next one


class Waiting(Generic[J]):
    """A set of jobs whose first one is found without looking at all of them. `unit_of` tells a job's unit.

    An entry of the heap may name a place that is too near, which shows when it comes to the front. Places come nearer
    in a new era only: then the heap is built anew. Units that no trace knows come last, in the order of their jobs.
    """

    def __init__(self, trace: Trace, unit_of: Callable[[J], Unit]) -> None:
        self.trace = trace
        self.unit_of = unit_of
        self._jobs: dict[J, int] = {}  # job -> the number of its entry
        self._urgent: dict[J, None] = {}
        self._heap: list[tuple[int, int, J]] = []  # (place, number, job)
        self._count = 0
        self._era = -1

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: J) -> bool:
        return job in self._jobs

    def add(self, job: J, *, urgent: bool = False) -> None:
        """Let `job` wait."""
        if job not in self._jobs:
            self._count += 1
            self._jobs[job] = self._count
            heappush(self._heap, self._entry(job))
        if urgent:
            self._urgent[job] = None

    def discard(self, job: J) -> None:
        """`job` waits no more."""
        self._jobs.pop(job, None)
        self._urgent.pop(job, None)
        if not self._jobs:
            self._heap.clear()

    def hurry(self, job: J) -> None:
        """`job`, if it waits, goes before all that are not urgent."""
        if job in self._jobs:
            self._urgent[job] = None

    def first(self) -> tuple[J, bool]:
        """(the job whose turn it is, whether it is urgent); there is one."""
        if self._urgent:
            return next(iter(self._urgent)), True
        era = self.trace.era
        if era != self._era:
            self._heap = [self._entry(job) for job in self._jobs]
            heapify(self._heap)
        self._era = era
        while True:
            entry = self._heap[0]
            if self._jobs.get(entry[2]) != entry[1]:
                heappop(self._heap)
                continue
            right = self._entry(entry[2])
            if right == entry:
                return entry[2], False
            heapreplace(self._heap, right)

    def _entry(self, job: J) -> tuple[int, int, J]:
        return min(self.trace.place(self.unit_of(job)), UNKNOWN), self._jobs[job], job
