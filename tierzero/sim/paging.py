"""What has bytes on the device, decided as residency.py decides: by the same trace and the same look-ahead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tierzero.paging.lookahead import Lookahead
from tierzero.paging.schedule import Trace
from tierzero.sim.clock import Clock, Signal, Wait
from tierzero.sim.links import Link, Pipe
from tierzero.sim.model import Rates, Setup, SimUnit
from tierzero.sim.updates import Updates, wait_for


class Paging:
    """`peak`: the most bytes on the device so far. `blamed`: what the last wait for a unit was for."""

    def __init__(
        self,
        clock: Clock,
        units: Sequence[SimUnit],
        rates: Rates,
        setup: Setup,
        trace: Trace,
        updates: Updates,
        drive: Link | None,
        h2d: Pipe,
    ) -> None:
        self.clock = clock
        self.units = units
        self.rates = rates
        self.setup = setup
        self.trace = trace
        self.updates = updates
        self.drive = drive
        self.h2d = h2d
        self.link = Pipe(clock, rates.link_limit) if rates.link_limit else None
        self.pins = [0] * len(units)
        self.in_backward: dict[int, int] = {}  # unit -> when its backward began
        self.peak = 0
        self.loaded = 0  # bytes
        self.hits = self.fetches = self.forced = self.wasted = 0
        self.demanded = False
        self.ahead = Lookahead(trace, setup.budget)  # what is resident, on its way or there
        self._arrival: dict[int, Signal] = {}  # of those on their way
        self._prefetched: set[int] = set()
        self._version = [0] * len(units)
        self._ticks = 0

    def there(self, uid: int) -> bool:
        """Whether the unit's bytes have arrived."""
        return uid in self.ahead.resident and uid not in self._arrival

    def acquire(self, uid: int) -> Wait:
        """Return with the unit there and pinned."""
        self.pins[uid] += 1
        hit = self.there(uid)
        self.demanded = not hit
        self.trace.use(uid)
        self.hits += hit
        if not hit:
            yield from self._demand(uid)
        self._prefetched.discard(uid)
        self.look_ahead()

    def release(self, uid: int) -> None:
        """Take a pin away."""
        self.pins[uid] -= 1
        self.look_ahead()

    def begin_backward(self, uid: int) -> None:
        """Its backward holds the unit from now on, in place of the pin."""
        self._ticks += 1
        self.in_backward[uid] = self._ticks
        self.pins[uid] -= 1

    def end_backward(self, uid: int) -> None:
        self.in_backward.pop(uid, None)
        self.look_ahead()

    def passing(self, nbytes: int) -> None:
        """Bytes that are on the device for a moment."""
        self.peak = max(self.peak, self.ahead.used + nbytes)

    def stepped(self, stale: Sequence[int]) -> None:
        """A step was taken over these units: their bytes are old, and what was fetched too early goes."""
        for uid in stale:
            self._version[uid] += 1
            if self.there(uid):
                self._prefetched.discard(uid)
                self._evict(uid)
        for uid in list(self.ahead.resident):
            if uid in self._prefetched and self.there(uid) and self.trace.next_use(uid) >= len(self.units):
                self._evict(uid)

    def look_ahead(self) -> None:
        """Fetch what is used next, as far as the budget reaches."""
        if self.demanded or self.ahead.settled:
            return
        while fetch := self.ahead.fetch(self._size, self._guessed, self._kept, self.setup.depth):
            for victim in fetch.victims:
                self._evict(victim)
            self._prefetched.add(fetch.uid)
            self._start(fetch.uid)

    def _size(self, uid: int) -> int:
        return self.units[uid].flat

    def _guessed(self, uid: int) -> bool:
        """Whether a guess is about to change what would be fetched."""
        return uid in self.updates.guesses

    def _kept(self, uid: int) -> bool:
        """Whether the unit must stay."""
        return bool(self.pins[uid] or uid in self.in_backward or uid in self._arrival)

    def _demand(self, uid: int) -> Wait:
        self.demanded = False
        while not self.there(uid):
            if uid in self._arrival:
                self.updates.hurry(uid)
                yield self._arrival[uid]
                continue
            victims = self.ahead.victims(self.units[uid].flat - (self.setup.budget - self.ahead.used), self._kept)
            if victims is not None:
                for victim in victims:
                    self._evict(victim)
                self._start(uid)
                continue
            coming = next((other for other in self._arrival if not self.pins[other]), None)
            if coming is not None:
                yield self._arrival[coming]
                continue
            oldest = min(
                (other for other in self.in_backward if self.there(other) and not self.pins[other]),
                key=lambda other: (other in self.units[uid].around, self.in_backward[other]),
                default=None,
            )
            if oldest is None:
                raise ValueError(f"unit {uid} does not fit the device budget of {self.setup.budget} bytes")
            self.forced += 1
            self._evict(oldest)

    def _evict(self, uid: int) -> None:
        self.ahead.remove(uid)
        self.in_backward.pop(uid, None)
        self.wasted += uid in self._prefetched
        self._prefetched.discard(uid)

    def _start(self, uid: int) -> None:
        self.ahead.add(uid, self.units[uid].flat)
        self._arrival[uid] = Signal()
        self.passing(0)
        self.clock.start(self._fetch(uid))

    def _fetch(self, uid: int) -> Wait:
        while True:
            yield from wait_for(self.updates.readable(uid, urgent=self.pins[uid] > 0))
            version = self._version[uid]
            self.fetches += 1
            self.loaded += self.units[uid].flat
            yield from self._load(self.units[uid])
            if version == self._version[uid]:
                break
        self._arrival.pop(uid).fire()
        if not self.pins[uid]:
            self.look_ahead()

    def _load(self, unit: SimUnit) -> Wait:
        crossed = None
        if self.link is not None:  # bytes cross it while more of them are read
            crossed = Signal()
            self.link.send(unit.flat, crossed.fire)
        yield from self._read(unit)
        yield from wait_for(crossed)

    def _read(self, unit: SimUnit) -> Wait:
        if unit.cached or self.drive is None:
            there = Signal()
            self.h2d.send(unit.flat, there.fire)
            yield there
            return
        yield self.rates.latency
        if self.rates.inline:  # the drive reads into the unit's own bytes
            there = Signal()
            self.drive.read(unit.flat, max(1, round(unit.flat / self.setup.block)), there.fire)
            yield there
            return
        parts = max(1, min(8, unit.flat // self.rates.staging))
        left = [Signal() for _ in range(parts)]
        for arrived in left:
            self.drive.read(unit.flat / parts, 1, partial(self.h2d.send, unit.flat / parts, arrived.fire))
        yield from left
