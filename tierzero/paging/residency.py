"""What has bytes on the device: fetches and evicts units within the budget. All but `kick` runs on the loop thread.

Note [pins]
The loop thread alone decides what is resident, so its decisions need no lock. A user of a unit adds its pin first and
looks at `residency` afterwards; an eviction leaves READY first and looks at the pins afterwards. So one of the two sees
the other: the eviction is taken back, or the user finds the unit not READY and comes here with a demand. A unit whose
backward may still be going on is evicted only for a demand, while whoever runs that backward waits (a hook boundary,
where no kernel holds its bytes), never by a prefetch; a demand whose pin is gone evicts nothing any more.

Note [demand]
A prefetch never takes room that a demand could not get back: what it fetched is evictable as soon as it has arrived. So
a demand first evicts idle units (furthest next use first), then waits for prefetches on their way, then evicts units in
backward, oldest first (saved weights come back through the unpack hook), and only then gives up with a BudgetError.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tierzero.monitoring.metrics import Metrics
from tierzero.paging.lookahead import Lookahead
from tierzero.paging.loop import LoopThread
from tierzero.paging.pins import Pin
from tierzero.paging.schedule import Trace
from tierzero.paging.states import State
from tierzero.paging.transfer import Transfer
from tierzero.paging.updates import UpdateQueue
from tierzero.planning.placement import device_too_small
from tierzero.units.partition import enclosing
from tierzero.units.unit import Unit


class Residency:
    """The units of one engine that have bytes. `budget` and the units' sizes are bytes; `depth` limits prefetching."""

    def __init__(
        self,
        units: list[Unit],
        loop: LoopThread,
        transfer: Transfer,
        updates: UpdateQueue,
        metrics: Metrics,
        trace: Trace,
        budget: int,
        depth: int | None,
    ) -> None:
        self.units = units
        self.loop = loop
        self.transfer = transfer
        self.updates = updates
        self.metrics = metrics
        self.trace = trace
        self.ahead = Lookahead(trace, budget)
        self.depth = depth
        self.closed = False
        self.kicked = False
        self.demanded: Unit | None = None  # a demand for it is on its way here: a prefetch must not take its room
        self._resident: dict[int, Unit] = {}  # has bytes: FETCHING or READY
        self._around = enclosing([unit.module for unit in units])

    async def demand(self, unit: Unit, pin: Pin, now: Any) -> None:
        """Return when `unit` is resident or `pin` does not pin it any more. `now` is the caller's transfer.mark()."""
        self.demanded = None
        while unit.residency is not State.READY and pin in unit.pins:
            if unit.residency is State.REST:
                if self._make_room(unit):
                    self._start(unit)
                    continue
                coming = next(
                    (u for u in self._resident.values() if u.residency is State.FETCHING and not u.pins), None
                )
                if coming is not None:
                    assert coming.arrival is not None
                    await asyncio.wait([coming.arrival])
                elif not self._force(unit, now):
                    held = {u.name: u.layout.flat_bytes for u in self._resident.values() if u.pins}
                    budget = self.ahead.budget
                    reserve = self.metrics.device_budget - budget
                    lent = {u.name for u in (unit, *self._resident.values()) if u.pins.lent(u.uid)}
                    raise device_too_small(unit.name, unit.layout.flat_bytes, budget, held, reserve, lent)
            else:
                arrival = unit.arrival
                assert arrival is not None
                self.updates.hurry(unit)
                await asyncio.wait([arrival])
                arrival.result()

    def held(self) -> int:
        """Bytes of the device budget without which what is pinned now would not fit. From any thread."""
        pinned = sum(unit.layout.flat_bytes for unit in list(self._resident.values()) if unit.pins)
        return pinned + self.metrics.device_budget - self.ahead.budget

    def stale(self, unit: Unit) -> None:
        """The device copy no longer equals the bytes at rest."""
        unit.version += 1
        if unit.residency is State.READY:
            unit.prefetched = False
            self._evict(unit)

    def drop_unused(self) -> None:
        """At the end of a step: what was prefetched and is not used soon after all goes, and counts as waste."""
        for unit in list(self._resident.values()):
            far = self.trace.next_use(unit.uid) >= len(self.units)
            if unit.prefetched and unit.residency is State.READY and far:
                self._evict(unit)

    def kick(self) -> None:
        """Look ahead soon, once for any number of calls. From any thread."""
        if not self.kicked and not self.closed and not self.ahead.settled:
            self.kicked = True
            try:
                self.loop.call(self._look_ahead)
            except BaseException:
                self.kicked = False
                raise

    def _look_ahead(self) -> None:
        """Fetch what is used next, as far as the budget reaches."""
        self.kicked = False
        if self.closed or self.demanded is not None:
            return  # who demands it kicks afterwards
        while fetch := self.ahead.fetch(self._size, self._guessed, self._kept, self.depth):
            if not all(self._evict(self._resident[uid]) for uid in fetch.victims):
                return
            unit = self.units[fetch.uid]
            unit.prefetched = True
            self.metrics.add("prefetched")
            self._start(unit)

    def _size(self, uid: int) -> int:
        return self.units[uid].layout.flat_bytes

    def _guessed(self, uid: int) -> bool:
        """Whether a guess is about to change what would be fetched, or would be given up for it."""
        return self.units[uid].guess is not None

    def _kept(self, uid: int) -> bool:
        """Whether the unit must stay."""
        unit = self.units[uid]
        return bool(unit.residency is not State.READY or unit.in_backward or unit.pins)

    async def close(self) -> None:
        """Drop every device copy; nothing is fetched any more."""
        self.closed = True
        for unit in list(self._resident.values()):
            if unit.arrival is not None:
                await asyncio.wait([unit.arrival])
            if unit.residency is State.READY:
                self._evict(unit, pinned_too=True)

    # -- moving --------------------------------------------------------------------------------------------------------

    def _make_room(self, unit: Unit) -> bool:
        while True:
            need = unit.layout.flat_bytes - (self.ahead.budget - self.ahead.used)
            victims = self.ahead.victims(need, self._kept)
            if victims is None:
                return False
            if all(self._evict(self._resident[uid]) for uid in victims):
                return True

    def _force(self, unit: Unit, now: Any) -> bool:
        """Evict the unit whose backward began first; whether there was one. Units around `unit` go last: what is
        recomputed there may use them.
        """
        around = self._around[unit.uid]
        backward = [other for other in self._resident.values() if other.in_backward]
        for other in sorted(backward, key=lambda other: (other.uid in around, other.in_backward)):
            if other is not unit and other.residency is State.READY and not other.pins:
                other.used_event = now if now is not None else other.used_event
                if self._evict(other):
                    self.metrics.add("forced_evictions")
                    return True
        return False

    def _start(self, unit: Unit) -> None:
        unit.become(State.FETCHING)
        self._resident[unit.uid] = unit
        self.ahead.add(unit.uid, unit.layout.flat_bytes)
        self.metrics.device(unit.layout.flat_bytes)
        unit.arrival = asyncio.ensure_future(self._fetch(unit))
        unit.arrival.add_done_callback(_seen)

    async def _fetch(self, unit: Unit) -> None:
        try:
            self.transfer.allocate(unit)
            while True:
                await self.updates.readable(unit, urgent=bool(unit.pins))
                if unit.host_flat is not None:
                    await self.updates.withdraw(unit)  # it overwrites the bytes that are fetched
                version = unit.version
                await self.transfer.load(unit)
                overwritten = unit.host_flat is not None and unit.guess is not None  # by a guess that began meanwhile
                if unit.version == version and not overwritten:
                    break
        except BaseException:
            unit.become(State.REST)
            self._forget(unit)
            raise
        unit.become(State.READY)
        if not unit.pins and not self.kicked:  # else whoever waits for it kicks, after it has gone on
            self.kicked = True
            asyncio.get_running_loop().call_soon(self._look_ahead)

    def _evict(self, unit: Unit, *, pinned_too: bool = False) -> bool:
        """Take the bytes of a READY unit; False if somebody pins it. See Note [pins]."""
        unit.become(State.LEAVING)
        if unit.pins and not pinned_too:
            unit.become(State.READY)
            return False
        if unit.prefetched:
            self.metrics.add("prefetch_wasted")
            unit.prefetched = False
        unit.leave_backward()
        unit.become(State.REST)
        self._forget(unit)
        return True

    def _forget(self, unit: Unit) -> None:
        del self._resident[unit.uid]
        self.ahead.remove(unit.uid)
        unit.arrival = None
        self.transfer.free(unit)
        self.metrics.device(-unit.layout.flat_bytes)


def _seen(arrival: asyncio.Task[None]) -> None:
    """A prefetch that failed is not reported here: the demand fetch tries again and raises."""
    if not arrival.cancelled():
        arrival.exception()
