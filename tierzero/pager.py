"""What moves: drives units through their states within the device budget, on demand and ahead of it.

Note [threads]
`acquire` and `release` are called by whoever runs forward or backward (on CUDA, autograd's own thread); fetches run as
coroutines on the loop thread. The lock guards every unit's pager fields. The loop thread evicts only units that nothing
uses; a unit whose backward may still be going on is evicted only by an `acquire` (a hook boundary, where no kernel
holds its bytes), never by a prefetch.

Note [demand]
A prefetch never takes room that a demand could not get back: what it fetched is evictable as soon as it has arrived. So
a demand first evicts idle units (furthest next use first), then waits for prefetches on their way, then evicts units in
backward, oldest first (saved weights come back through the unpack hook), and only then gives up with a BudgetError.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from tierzero.errors import TierzeroError
from tierzero.loop import LoopThread
from tierzero.metrics import Metrics
from tierzero.partition import enclosing
from tierzero.placement import device_too_small
from tierzero.schedule import Trace, choose_victims, prefetch_order
from tierzero.transfer import Transfer
from tierzero.unit import State, Unit
from tierzero.updates import Update, UpdateQueue

T = TypeVar("T")


class Pager:
    """Owns residency: which units have bytes on the device, and which will next. Budgets are bytes."""

    def __init__(
        self,
        units: list[Unit],
        loop: LoopThread,
        transfer: Transfer,
        updates: UpdateQueue,
        metrics: Metrics,
        budget: int,
        depth: int | None,
    ) -> None:
        self.units = units
        self.loop = loop
        self.transfer = transfer
        self.updates = updates
        self.metrics = metrics
        self.budget = budget
        self.depth = depth
        self.lock = threading.RLock()
        order = [unit.uid for unit in units]
        self.trace = Trace(order + order[::-1])
        self.trace.begin_step()
        self._resident: dict[int, Unit] = {}  # has bytes: FETCHING or READY
        self._backward: dict[int, Unit] = {}  # in backward, the most recently used last
        self._around = enclosing([unit.module for unit in units])
        self._kicked = False
        self._closed = False

    # -- use -----------------------------------------------------------------------------------------------------------

    def acquire(self, unit: Unit, *, train: bool = True, record: bool = True) -> None:
        """Return with `unit` resident and pinned; `release` unpins. Raises what its fetch or its update raised, or
        BudgetError.
        """
        with self.lock:
            self._check_open(unit)
            if record:
                self.trace.use(unit.uid, grad=train)
            hit = unit.residency is State.READY
            self.metrics.add("hits" if hit else "misses")
            unit.prefetched = False
            unit.pins += 1
        try:
            if not hit:
                self._demand(unit)
            self.transfer.before_use(unit)
        except BaseException:
            with self.lock:
                unit.pins -= 1
            raise
        self._kick()

    def _check_open(self, unit: Unit) -> None:
        if self._closed:
            raise TierzeroError(
                f"the engine that holds the parameters of unit {unit.name} was closed by tierzero.close(); build the "
                "model anew and offload() that"
            )

    def release(self, unit: Unit, *, register_rest: bool = False) -> None:
        """Unpin; the unit stays resident until its bytes are wanted. With `register_rest`, its rest parameters come
        back with the last pin.
        """
        with self.lock:
            unit.pins -= 1
            if register_rest and not unit.pins and not unit.in_backward:
                unit.register_rest()
            self.transfer.after_use(unit)
        self._kick()

    def begin_backward(self, unit: Unit, *, record: bool) -> None:
        """Make `unit` resident for backward. It is not pinned: see Note [demand]."""
        self.acquire(unit, record=record)
        with self.lock:
            unit.register_live()
            unit.pins -= 1
            self._backward.pop(unit.uid, None)
            self._backward[unit.uid] = unit
            unit.in_backward = True

    def end_backward(self, unit: Unit) -> None:
        """The unit's backward is over (as far as anybody can tell)."""
        with self.lock:
            if unit.in_backward:
                self._leave_backward(unit)
                self.transfer.after_use(unit)
        self._kick()

    def _leave_backward(self, unit: Unit) -> None:
        unit.in_backward = False
        self._backward.pop(unit.uid, None)
        if not unit.pins:
            unit.register_rest()

    def end_all_backward(self) -> None:
        """No backward is going on any more."""
        with self.lock:
            for unit in list(self._backward.values()):
                self.end_backward(unit)

    def repin(self, running: list[Unit]) -> None:
        """Only `running` forwards and `unsharded` blocks pin: an exception from a signal may have come in mid-air."""
        with self.lock:
            self._kicked = False
            for unit in list(self._resident.values()):
                pins = unit.holds + running.count(unit)
                if unit.pins != pins:
                    unit.pins = pins
                    if not pins and not unit.in_backward:
                        unit.register_rest()

    # -- steps and changes at rest -------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The optimizer stepped: the trace of this step is complete, unused prefetches are dropped as waste."""
        with self.lock:
            self.trace.end_step()
            for unit in list(self._resident.values()):
                if (
                    unit.prefetched
                    and unit.residency is State.READY
                    and self.trace.next_use(unit.uid) >= len(self.units)
                ):
                    self.metrics.add("prefetch_wasted")
                    self._evict(unit)

    def check_idle(self, units: Iterable[Unit], advice: str) -> None:
        """TierzeroError if one of `units` is in use by a forward or an `unsharded` block."""
        with self.lock:
            for unit in units:
                if unit.pins:
                    raise TierzeroError(f"unit {unit.name} is running forward or unsharded; {advice}")

    def queue(self, jobs: list[Update]) -> None:
        """Queue updates in order of next use; the device copies of their units are stale from here on."""
        with self.lock:
            for job in jobs:
                job.unit.pending = job
                self._stale(job.unit)
            jobs.sort(key=lambda job: self.trace.next_use(job.unit.uid))
        self.loop.call(lambda: self.updates.put(jobs))
        self._kick()

    def at_rest(self, unit: Unit, work: Coroutine[Any, Any, T], changes: bool = False) -> T:
        """Run `work` on the bytes at rest of `unit`, after its queued update; `changes` makes the device copy stale."""

        async def run() -> T:
            try:
                await self.updates.settled(unit)
            except BaseException:
                work.close()
                raise
            return await work

        try:
            self._check_open(unit)
            if changes:
                self.check_idle([unit], "change its parameters there (write=True), or after it")
        except BaseException:
            work.close()
            raise
        try:
            return self.loop.run(run())
        finally:
            if changes:
                self.mark_stale(unit)

    def mark_stale(self, unit: Unit) -> None:
        """The device copy no longer equals the bytes at rest."""
        with self.lock:
            self._stale(unit)

    def settle(self, unit: Unit) -> None:
        """Wait for the unit's queued update."""
        unit.finish_grads()
        if unit.pending is not None:
            with self.metrics.timed("stall_grad_s"):
                self.loop.run(self.updates.settled(unit))

    def synchronize(self) -> None:
        """Wait for all queued updates; raises what the first failed one raised, after trying it again."""
        for unit in self.units:
            if unit.pending is not None:
                self.loop.run(self.updates.settled(unit))

    def close(self) -> None:
        """Drop every device copy; later uses are refused."""
        with self.lock:
            self._closed = True
        for unit in list(self._resident.values()):
            if unit.residency is State.FETCHING and unit.arrival is not None:
                concurrent.futures.wait([unit.arrival])
        with self.lock:
            for unit in list(self._resident.values()):
                if unit.residency is State.READY:
                    self._evict(unit)

    # -- moving --------------------------------------------------------------------------------------------------------

    def _demand(self, unit: Unit) -> None:
        """Fetch a pinned unit and wait for it."""
        while True:
            with self.lock:
                if unit.residency is State.READY:
                    return
                for other in [
                    u for u in self._resident.values() if u.residency is State.FETCHING and u.arrival is None
                ]:
                    self._evict(other)  # an exception from a signal came in between: nothing is on its way
                waiting: Unit | None = None
                if unit.residency is State.REST:
                    if self._make_room(unit):
                        self._start(unit)
                    else:
                        waiting = next(
                            (u for u in self._resident.values() if u.residency is State.FETCHING and not u.pins), None
                        )
                        if waiting is None and not self._force(unit):
                            held = {u.name: u.layout.flat_bytes for u in self._resident.values() if u.pins}
                            reserve = self.metrics.device_budget - self.budget
                            raise device_too_small(unit.name, unit.layout.flat_bytes, self.budget, held, reserve)
                arrival = (waiting or unit).arrival if waiting is not None or unit.residency is State.FETCHING else None
            if arrival is not None:
                cause = "stall_update_s" if unit.pending is not None else "stall_fetch_s"
                with self.metrics.timed(cause):
                    concurrent.futures.wait([arrival])
                if waiting is None:
                    arrival.result()

    def _residents(self) -> tuple[dict[int, int], set[int]]:
        """(the bytes of each resident unit, those that must stay)."""
        units = self._resident.values()
        keep = {unit.uid for unit in units if unit.pins or unit.in_backward or unit.residency is not State.READY}
        return {unit.uid: unit.layout.flat_bytes for unit in units}, keep

    def _make_room(self, unit: Unit) -> bool:
        sizes, keep = self._residents()
        need = unit.layout.flat_bytes - (self.budget - sum(sizes.values()))
        victims = choose_victims(sizes, need, self.trace.next_use, keep)
        for uid in victims or ():
            self._evict(self._resident[uid])
        return victims is not None

    def _force(self, unit: Unit) -> bool:
        """Evict the unit whose backward began first; whether there was one. Units around `unit` go last: what is
        recomputed there may use them.
        """
        around = self._around[unit.uid]
        for other in sorted(self._backward.values(), key=lambda other: other.uid in around):
            if other is not unit and other.residency is State.READY and not other.pins:
                self.metrics.add("forced_evictions")
                self.transfer.after_use(other)
                self._evict(other)
                return True
        return False

    def _start(self, unit: Unit) -> None:
        unit.arrival = None
        unit.become(State.FETCHING)
        self._resident[unit.uid] = unit
        self.metrics.device(unit.layout.flat_bytes)
        unit.fetch = token = object()
        unit.arrival = self.loop.submit(self._fetch(unit, token))

    async def _fetch(self, unit: Unit, token: object) -> None:
        try:
            self.transfer.allocate(unit)
            while True:
                await self.updates.settled(unit)
                version = unit.version
                await self.transfer.load(unit)
                with self.lock:
                    if unit.fetch is not token:
                        return  # given up meanwhile
                    if unit.version == version:
                        unit.become(State.READY)
                        break
        except BaseException:
            with self.lock:
                if unit.fetch is token:
                    unit.become(State.REST)
                    self._forget(unit)
            raise
        self._kick()

    def _evict(self, unit: Unit) -> None:
        if unit.prefetched:
            self.metrics.add("prefetch_wasted")
            unit.prefetched = False
        unit.become(State.REST)
        self._forget(unit)

    def _forget(self, unit: Unit) -> None:
        self._resident.pop(unit.uid, None)
        unit.fetch = None
        if unit.in_backward:
            self._leave_backward(unit)
        self.transfer.free(unit)
        self.metrics.device(-unit.layout.flat_bytes)

    def _stale(self, unit: Unit) -> None:
        unit.version += 1
        if unit.residency is State.READY and not unit.pins:
            unit.prefetched = False
            self._evict(unit)

    def _kick(self) -> None:
        """Look ahead soon, once for any number of calls."""
        if not self._kicked and not self._closed:
            self._kicked = True
            try:
                self.loop.call(self._look_ahead)
            except BaseException:
                self._kicked = False
                raise

    def _look_ahead(self) -> None:
        with self.lock:
            self._kicked = False
            if self._closed:
                return
            sizes, keep = self._residents()
            size_of = lambda uid: self.units[uid].layout.flat_bytes
            upcoming, next_use = self.trace.upcoming(), self.trace.next_use
            for fetch in prefetch_order(upcoming, sizes, size_of, self.budget, next_use, keep=keep, depth=self.depth):
                for uid in fetch.victims:
                    self._evict(self._resident[uid])
                unit = self.units[fetch.uid]
                unit.prefetched = True
                self.metrics.add("prefetched")
                self._start(unit)
                assert unit.arrival is not None
                unit.arrival.add_done_callback(_seen)


def _seen(future: concurrent.futures.Future[None]) -> None:
    """A prefetch that failed is not reported here: the demand fetch tries again and raises."""
    if not future.cancelled():
        future.exception()
