"""What moves: gives forward, backward and the optimizer the units they use, and hands them back.

Note [threads]
`acquire` and `release` are called by whoever runs forward or backward (on CUDA, autograd's own thread). They pin, unpin
and register; whatever else changes does so on the loop thread. See Note [signals] in loop.py and Note [pins] in
residency.py. A live parameter is registered only while its unit is pinned or in backward: pins come before
`register_live`, and go after `register_rest`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Coroutine, Iterable
from typing import Any, TypeVar

from tierzero.errors import TierzeroError
from tierzero.monitoring.clock import GRADIENT, SAVE
from tierzero.monitoring.metrics import Metrics
from tierzero.paging.gate import held
from tierzero.paging.loop import LoopThread
from tierzero.paging.pins import Pin
from tierzero.paging.residency import Residency
from tierzero.paging.states import State
from tierzero.paging.transfer import Transfer
from tierzero.paging.updates import Guess, Update, UpdateQueue, Withdrawal
from tierzero.units.unit import Unit

T = TypeVar("T")


class Pager:
    """One engine's units in use. Budgets are bytes."""

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
        self.trace = updates.trace
        updates.landed = transfer.landed
        self.residency = Residency(units, loop, transfer, updates, metrics, self.trace, budget, depth)
        self.loans = 0  # how often a unit is lent now; see lending.py
        self._ticks = itertools.count(1)  # numbers the beginnings of backward

    # -- use -----------------------------------------------------------------------------------------------------------

    def acquire(self, unit: Unit, pin: Pin, *, train: bool = True, record: bool = True) -> None:
        """Return with `unit` resident and pinned by `pin`; `release` unpins. Raises what its fetch or its update
        raised, or BudgetError.
        """
        self._check_open(unit)
        unit.pins.add(pin)
        try:
            hit = unit.residency is State.READY
            if not hit:
                self.residency.demanded = unit
            if record:
                self.trace.use(unit.uid, grad=train)
            self.metrics.add("hits" if hit else "misses")
            if not hit:
                cause = "stall_update_s" if unit.pending is not None else "stall_fetch_s"
                with self.metrics.timed("stall_save_s" if held(unit) else cause, unit.name):
                    self.loop.run(self.residency.demand(unit, pin, self.transfer.mark()))
            unit.prefetched = False
            self.transfer.before_use(unit)
        except BaseException:
            unit.pins.discard(pin)
            raise
        if self.loans:
            self.metrics.needed(self.residency.held())
        self.residency.kick()

    def _check_open(self, unit: Unit) -> None:
        if self.residency.closed:
            raise TierzeroError(
                f"the engine that holds the parameters of unit {unit.name} was closed by tierzero.close(); build the "
                "model anew and offload() that"
            )

    def release(self, unit: Unit, pin: Pin, *, register_rest: bool = False) -> None:
        """Take `pin` away, if it is there; the unit stays resident until its bytes are wanted. With `register_rest`,
        its rest parameters come back with the last pin.
        """
        self.transfer.after_use(unit)
        if register_rest and not unit.in_backward and not unit.pins.others(pin):
            unit.register_rest()
        unit.pins.discard(pin)
        self.residency.kick()

    def begin_backward(self, unit: Unit, *, record: bool) -> None:
        """Make `unit` resident for backward. It is not pinned: see Note [demand]."""
        pin = Pin()
        self.acquire(unit, pin, record=record)
        unit.in_backward = next(self._ticks)
        unit.register_live()
        unit.pins.discard(pin)

    def end_backward(self, unit: Unit) -> None:
        """The unit's backward is over (as far as anybody can tell)."""
        if unit.in_backward:
            self.transfer.after_use(unit)
            unit.leave_backward()
        self.residency.kick()

    def end_all_backward(self) -> None:
        """No backward is going on any more."""
        for unit in self.units:
            if unit.in_backward:
                self.end_backward(unit)

    def repin(self, running: Collection[Pin]) -> None:
        """Only `running` forwards and `unsharded` blocks pin, and nothing is half finished: an exception from a signal
        may have come in mid-air.
        """
        if self.loop.unfinished:
            self.loop.do(_nothing)
        self.residency.kicked, self.residency.demanded = False, None
        for unit in self.units:
            unit.pins.keep(running)
            if unit.live_registered and not unit.pins and not unit.in_backward:
                unit.register_rest()

    # -- steps and changes at rest -------------------------------------------------------------------------------------

    def check_idle(self, units: Iterable[Unit], advice: str) -> None:
        """TierzeroError if one of `units` is in use by a forward or an `unsharded` block."""
        for unit in units:
            if unit.pins:
                raise TierzeroError(f"unit {unit.name} is running forward or unsharded; {advice}")

    def guess(self, guess: Guess) -> None:
        """Begin an update that may turn out to be wrong; see Note [guesses] in updates.py."""
        guess.unit.guess = guess
        self.metrics.add("guesses")
        self.loop.call(lambda: self.updates.put([guess]))

    def step(self, jobs: list[Update], units: list[Unit]) -> None:
        """End a step over `units`: queue its updates, all or none, publishing guesses that were right and withdrawing
        the others. The device copies of their units are stale from here on; prefetches that turned out unused are
        dropped.
        """

        def queue() -> None:
            self.trace.end_step()
            for job in jobs:
                unit = job.unit
                job.begin()
                guess = unit.guess
                if guess is not None and guess.key == job.key and not guess.withdrawn:
                    self.metrics.add("guesses_right")
                    self.updates.commit(guess)
                else:
                    if guess is not None:
                        self.metrics.add("guesses_redone")
                    self.updates.replace(job)
                self.residency.stale(unit)
            for unit in units:
                unit.has_grads = False
                if unit.guess is not None:
                    self.metrics.add("guesses_dropped")
                    self.updates.replace(Withdrawal(unit))
            self.residency.drop_unused()
            self.residency.kick()

        self.loop.do(queue)

    def at_rest(self, unit: Unit, work: Coroutine[Any, Any, T], changes: bool = False, *, writes: bool = False) -> T:
        """Run `work` on the bytes at rest of `unit`, after its queued update. `writes`: it changes them; `changes`:
        those of the parameters, which makes the device copy stale.
        """

        async def run() -> T:
            try:
                await self.updates.settled(unit)
                await self.updates.withdraw(unit)
                if unit.gate is not None and (writes or changes):
                    await unit.gate.records()
            except BaseException:
                work.close()
                raise
            try:
                return await work
            finally:
                if changes:
                    self.residency.stale(unit)

        try:
            self._check_open(unit)
            if changes:
                self.check_idle([unit], "change its parameters there (write=True), or after it")
        except BaseException:
            work.close()
            raise
        gated = unit.gate is not None and (writes or changes)
        with self.metrics.timed("stall_save_s", unit.name) if gated else self.metrics.inside(SAVE):
            return self.loop.run(run())

    def mark_stale(self, unit: Unit) -> None:
        """The device copy no longer equals the bytes at rest."""
        self.loop.do(lambda: self.residency.stale(unit))

    def settle(self, unit: Unit, *, keep_guess: bool = False, changes: bool = False) -> None:
        """Wait for the unit's gradients and its queued update, and give up its guess: the gradients may change.
        `changes`: they will, so that a save must have read them.
        """
        with self.metrics.inside(GRADIENT):
            unit.finish_grads()
        if unit.pending is not None or (unit.guess is not None and not keep_guess):
            with self.metrics.timed("stall_save_s" if held(unit) else "stall_grad_s", unit.name):
                self.loop.run(self._settled(unit, keep_guess))
        if changes and unit.gate is not None and unit.gate.holds_gradients:
            with self.metrics.timed("stall_save_s", unit.name):
                self.loop.run(unit.gate.gradients())

    def free_records(self, unit: Unit) -> None:
        """Wait until no save has to read the unit's records any more: they are about to change."""
        gate = unit.gate
        if gate is not None and gate.holds(None):
            with self.metrics.timed("stall_save_s", unit.name):
                self.loop.run(gate.records())

    async def _settled(self, unit: Unit, keep_guess: bool = False) -> None:
        await self.updates.settled(unit)
        if not keep_guess:
            await self.updates.withdraw(unit)
            self.residency.ahead.rewind()

    def synchronize(self) -> None:
        """Wait for all queued updates; raises what the first failed one raised, after trying it again. Guesses are
        given up.
        """
        for unit in self.units:
            if unit.pending is not None or unit.guess is not None:
                with self.metrics.timed("stall_save_s" if held(unit) else "stall_update_s", unit.name):
                    self.loop.run(self._settled(unit))

    def look_ahead(self, depth: int | None) -> None:
        """Fetch `depth` units ahead from now on, None for as far as the budget reaches."""

        def change() -> None:
            self.residency.depth = depth

        self.loop.do(change)

    def close(self) -> None:
        """Drop every device copy; later uses are refused."""
        self.loop.run(self.residency.close())


def _nothing() -> None:
    pass
