"""The streamed step as the native pipeline runs it: chunks of records read, updated and written through a few buffers.

What is due sooner goes in front of jobs that still have chunks to hand out; reads in flight are limited, as the CPU's
turn and a free buffer are: see csrc/stepper.cpp.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

from tierzero.sim.clock import Clock, Signal
from tierzero.sim.links import Link
from tierzero.sim.model import Rates

MIN_READS = 4  # in flight, or a third of the buffers if that is more


class Job:
    """One record: `chunks` are (elements, bytes read, bytes written) each; `due` as the trace says."""

    def __init__(self, chunks: list[tuple[float, float, float]], due: int) -> None:
        self.chunks = chunks
        self.due = due
        self.next = 0
        self.left = len(chunks)  # chunks that are not through
        self.uncomputed = len(chunks)
        self.updated = Signal()  # everything is computed
        self.ended = Signal()  # and written


class Stepper:
    """`elements` are counted as they are computed, `busy` seconds of the CPU."""

    def __init__(self, clock: Clock, drive: Link | None, rates: Rates, slots: int) -> None:
        self.clock = clock
        self.drive = drive
        self.rates = rates
        self.free = slots
        self.most_reads = max(MIN_READS, slots // 3)
        self.elements = 0.0
        self.spent = 0.0
        self._until = 0.0
        self._open: list[Job] = []  # not ended, in order
        self._reading = 0
        self._order = 0
        self._ready: list[tuple[int, Job, int]] = []  # (order of filling, job, chunk), filled
        self._computing = False

    @property
    def busy(self) -> float:
        """Seconds it has been computing, up to now."""
        return self.spent - max(0.0, self._until - self.clock.now)

    def submit(self, job: Job) -> None:
        """Queue a record."""
        if not job.chunks:
            job.updated.fire()
            job.ended.fire()
            return
        place = len(self._open)
        while (
            place
            and self._open[place - 1].due > job.due
            and self._open[place - 1].next < len(self._open[place - 1].chunks)
        ):
            place -= 1
        self._open.insert(place, job)
        self._pump()

    def _pump(self) -> None:
        while self.free:
            job = next((job for job in self._open if job.next < len(job.chunks)), None)
            if job is None:
                break
            _, read, _ = job.chunks[job.next]
            if read and self._reading >= self.most_reads:
                break
            self.free -= 1
            self._order += 1
            chunk, order = job.next, self._order
            job.next += 1
            filled = partial(self._filled, job, chunk, order, bool(read))
            if read:
                assert self.drive is not None
                self._reading += 1
                self._later(self.drive.read, read, filled)
            else:
                filled()

    def _later(
        self, move: Callable[[float, int, Callable[[], None]], None], nbytes: float, call: Callable[[], None]
    ) -> None:
        self.clock.after(self.rates.latency, lambda: move(nbytes, 1, call))

    def _filled(self, job: Job, chunk: int, order: int, read: bool) -> None:
        self._reading -= read
        heapq.heappush(self._ready, (order, job, chunk))
        if read:
            self._pump()
        self._compute()

    def _compute(self) -> None:
        if self._computing or not self._ready:
            return
        _, job, chunk = heapq.heappop(self._ready)
        elements = job.chunks[chunk][0]
        seconds = elements / self.rates.adam
        self._computing = True
        self.elements += elements
        self.spent += seconds
        self._until = self.clock.now + seconds
        self.clock.after(seconds, partial(self._computed, job, chunk))

    def _computed(self, job: Job, chunk: int) -> None:
        self._computing = False
        job.uncomputed -= 1
        write = job.chunks[chunk][2]
        if write:
            assert self.drive is not None
            self._later(self.drive.write, write, lambda: self._written(job))
        else:
            self._written(job)
        if not job.uncomputed:
            job.updated.fire()
        self._compute()

    def _written(self, job: Job) -> None:
        self.free += 1
        job.left -= 1
        while self._open and not self._open[0].left:
            self._open.pop(0).ended.fire()
        self._pump()
