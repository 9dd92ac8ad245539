"""What bytes go over: a link that serves one after the other, and a drive that serves all at once.

Note [the drive]
A drive is given all requests up to its queue depth and serves them side by side, so whoever has more pieces in flight
gets more of it. It has one rate while there are only reads, another while there are only writes, and a third, of both
together, while there are both: the three that `tierzero bench nvme` measures.

Note [limits]
A limit (Tiers(nvme_limit=...)) lets piece after piece go, in the order in which the queue of the drive hands them out:
reads first, and a write after every few reads that overtook it. A drive that is faster than its limit is never busy.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from tierzero.sim.clock import Clock

_NOTHING = 1e-12  # of the bytes served: what rounding leaves of a request that is through


class Pipe:
    """A link at `rate` bytes/s, first come, first served. `busy` seconds and `moved` bytes are those of what was asked
    for so far.
    """

    def __init__(self, clock: Clock, rate: float) -> None:
        self.clock = clock
        self.rate = rate
        self.free_at = 0.0
        self.moved = 0.0
        self.spent = 0.0

    def send(self, nbytes: float, call: Callable[[], None]) -> None:
        """Call it when they are through."""
        seconds = nbytes / self.rate
        self.free_at = max(self.free_at, self.clock.now) + seconds
        self.moved += nbytes
        self.spent += seconds
        self.clock.after(self.free_at - self.clock.now, call)

    @property
    def busy(self) -> float:
        """Seconds it has been moving something, up to now."""
        return self.spent - max(0.0, self.free_at - self.clock.now)


@dataclass(frozen=True)
class DriveRates:
    """bytes/s: of reads alone, of writes alone, and of both together while both go on. limit: what all of it is held
    below, 0 for nothing.
    """

    read: float
    write: float
    mixed: float
    limit: float = 0.0

    @property
    def limited(self) -> bool:
        """Whether the limit decides, whatever goes on."""
        return 0 < self.limit <= min(self.read, self.write, self.mixed)

    def under(self, limit: float) -> DriveRates:
        """The same drive with that limit; 0 is none."""
        if not limit:
            return self
        return DriveRates(min(self.read, limit), min(self.write, limit), min(self.mixed, limit), limit)


class _Side:
    """The reads or the writes of a drive. `served` counts the bytes that one piece in flight would have got so far."""

    def __init__(self) -> None:
        self.served = 0.0
        self.pieces = 0
        self.flows: list[tuple[float, int, int, Callable[[], None]]] = []  # (served at the end, number, pieces, call)
        self.moved = 0.0
        self.rate = 0.0

    @property
    def left(self) -> float:
        """Seconds until the first of the flows is through, if nothing changes."""
        return max(0.0, (self.flows[0][0] - self.served) * self.pieces / self.rate)


class Link(Protocol):
    """A drive of either kind. `busy` seconds; `read_bytes` and `written_bytes` up to the last `catch_up`."""

    busy: float

    def read(self, nbytes: float, pieces: int, call: Callable[[], None]) -> None: ...

    def write(self, nbytes: float, pieces: int, call: Callable[[], None]) -> None: ...

    def catch_up(self) -> None: ...

    @property
    def read_bytes(self) -> float: ...

    @property
    def written_bytes(self) -> float: ...


def open_drive(clock: Clock, rates: DriveRates) -> Link:
    """Of the kind that these rates make it."""
    return LimitedDrive(clock, rates.limit) if rates.limited else Drive(clock, rates)


class LimitedDrive:
    """See Note [limits]."""

    OVERTAKES = 8  # reads, before a write that waits: as csrc/lane.hpp

    def __init__(self, clock: Clock, limit: float) -> None:
        self.clock = clock
        self.pipe = Pipe(clock, limit)
        self.read_bytes = self.written_bytes = self.busy = 0.0
        self._queues: tuple[deque[tuple[float, Callable[[], None]]], ...] = (deque(), deque())  # reads, writes
        self._going = False
        self._overtaken = 0

    def read(self, nbytes: float, pieces: int, call: Callable[[], None]) -> None:
        """Call it when they are read; they go in that many pieces."""
        self._add(0, nbytes, pieces, call)

    def write(self, nbytes: float, pieces: int, call: Callable[[], None]) -> None:
        """Call it when they are written."""
        self._add(1, nbytes, pieces, call)

    def catch_up(self) -> None:
        """Account for the time up to now."""
        self.busy = self.pipe.busy

    def _add(self, kind: int, nbytes: float, pieces: int, call: Callable[[], None]) -> None:
        for _ in range(pieces - 1):
            self._queues[kind].append((nbytes / pieces, _nothing))
        self._queues[kind].append((nbytes / pieces, call))
        self._next()

    def _next(self) -> None:
        reads, writes = self._queues
        if self._going or not (reads or writes):
            return
        overtakes = bool(reads and writes) and self._overtaken < self.OVERTAKES
        kind = 0 if reads and (not writes or overtakes) else 1
        self._overtaken = self._overtaken + 1 if overtakes else 0
        nbytes, call = self._queues[kind].popleft()
        self._going = True

        def over() -> None:
            self._going = False
            if kind:
                self.written_bytes += nbytes
            else:
                self.read_bytes += nbytes
            call()
            self._next()

        self.pipe.send(nbytes, over)


def _nothing() -> None:
    pass


class Drive:
    """See Note [the drive]."""

    def __init__(self, clock: Clock, rates: DriveRates) -> None:
        self.clock = clock
        self.rates = rates
        self.reads, self.writes = _Side(), _Side()
        self.busy = 0.0
        self._since = 0.0
        self._alarm = 0  # only the last alarm that was set counts
        self._number = count()

    @property
    def read_bytes(self) -> float:
        return self.reads.moved

    @property
    def written_bytes(self) -> float:
        return self.writes.moved

    def read(self, nbytes: float, pieces: int, call: Callable[[], None]) -> None:
        """Call it when they are read; `pieces` of them are in flight at once."""
        self._add(self.reads, nbytes, pieces, call)

    def write(self, nbytes: float, pieces: int, call: Callable[[], None]) -> None:
        """Call it when they are written."""
        self._add(self.writes, nbytes, pieces, call)

    def _add(self, side: _Side, nbytes: float, pieces: int, call: Callable[[], None]) -> None:
        if nbytes <= 0:
            self.clock.after(0.0, call)
            return
        self.catch_up()
        if not side.pieces:
            side.served = 0.0  # no sum grows without end
        heapq.heappush(side.flows, (side.served + nbytes / pieces, next(self._number), pieces, call))
        side.pieces += pieces
        self._set_rates()

    def catch_up(self) -> None:
        """Account for the time up to now."""
        passed = self.clock.now - self._since
        self._since = self.clock.now
        if not (self.reads.pieces or self.writes.pieces):
            return
        self.busy += passed
        for side in (self.reads, self.writes):
            if side.pieces:
                side.moved += side.rate * passed
                side.served += side.rate * passed / side.pieces

    def _set_rates(self) -> None:
        reads, writes = self.reads, self.writes
        both = reads.pieces + writes.pieces
        if reads.pieces and writes.pieces:
            reads.rate = min(self.rates.read, self.rates.mixed * reads.pieces / both)
            writes.rate = min(self.rates.write, self.rates.mixed * writes.pieces / both)
        else:
            reads.rate, writes.rate = self.rates.read, self.rates.write
        self._alarm += 1
        ends = [(side.left, side) for side in (reads, writes) if side.flows]
        if ends:
            alarm = self._alarm
            seconds, first = min(ends, key=lambda end: end[0])
            self.clock.after(seconds, lambda: self._ring(alarm, first))

    def _ring(self, alarm: int, first: _Side) -> None:
        if alarm != self._alarm:
            return
        self.catch_up()
        first.served = max(first.served, first.flows[0][0])  # a time too short for the clock is over all the same
        over = []
        for side in (self.reads, self.writes):
            while side.flows and side.flows[0][0] <= side.served * (1 + _NOTHING):
                _, _, pieces, call = heapq.heappop(side.flows)
                side.pieces -= pieces
                over.append(call)
        self._set_rates()
        for call in over:
            call()
