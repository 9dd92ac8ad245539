"""The queue of unit updates: run in order of next use, jumped by whoever waits for one, kept until they succeed.

Note [guesses]
An update computes new versions beside the old ones and then publishes them. A *guess* is an update that starts while
backward goes on, before anybody knows whether there will be a step and what it will be. What it computed is published
only once `commit` says that the guess was right; `withdraw` gives it up, and everything is as if it had never run. The
old versions of records in the store are untouched by it, but parameters cached in host memory are overwritten in
place: withdrawing writes them again from the old master, whose rounded value they are.

A guess that is not decided yet is `unit.guess`; a decided one is `unit.pending`, like any other update. Setting
`unit.guess` is the first thing that happens to a guess, in the thread that runs backward: from then on whoever wants to
change the gradients finds it. All else is done on the loop thread.

Note [early parameters]
Parameters cached in host memory are new as soon as they are computed, and the next forward need not wait until the
state is written too. Should writing fail then, the update is still the unit's pending one: whoever needs the state or
the gradient buffer next (at the latest the next gradient) runs it again, from the old state and the same gradients, to
the same bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from tierzero.monitoring.metrics import Metrics
from tierzero.paging.gate import Gate
from tierzero.paging.schedule import Trace
from tierzero.paging.waiting import Waiting
from tierzero.units.unit import Unit


class Work(Protocol):
    """How a unit's update is made; each may be run again after it failed."""

    async def compute(self, due: int, ready: Callable[[], None]) -> Any:
        """Make the new versions, from the old ones and the gradients; what is due sooner goes first. `ready` is called
        as soon as the parameters in host memory are the new ones, if it is before the end.
        """
        ...

    def publish(self, fresh: Any) -> None:
        """Make them the current ones."""
        ...

    def discard(self, fresh: Any) -> None:
        """Give them up."""
        ...

    async def restore(self) -> None:
        """Undo what `compute` overwrote."""
        ...


class Update:
    """One unit's queued optimizer step. `key`: what it is computed with, besides the gradients; `begin` is called as
    the step is taken. `before`: a wrong guess for the same unit, to be withdrawn first; this update overwrites whatever
    that one did.
    """

    def __init__(
        self, unit: Unit, work: Work | None, key: Any = None, begin: Callable[[], None] = lambda: None
    ) -> None:
        self.unit = unit
        self.work = work
        self.key = key
        self.begin = begin
        self.before: Guess | None = None
        self.queued = False
        self.running = False
        self.urgent = False
        self.due = 0  # as of its start
        self.ready = asyncio.Event()  # the parameters in host memory are the new ones; see Note [early parameters]
        self.finished = asyncio.Event()
        self.error: BaseException | None = None

    def again(self) -> None:
        """Forget that it failed."""
        self.error, self.queued = None, False
        self.ready.clear()
        self.finished.clear()

    def end(self) -> None:
        """Nobody need wait for it any more."""
        self.running = False
        self.ready.set()
        self.finished.set()

    async def run(self) -> None:
        """Do it, published at the end."""
        if self.before is not None:
            await self.before.undo(restore=False)
            self.before = None
        assert self.work is not None
        self.work.publish(await self.work.compute(self.due, self.ready.set))

    @property
    def decided(self) -> bool:
        """Whether it will be published."""
        return True


class Guess(Update):
    """See Note [guesses]. It is right for an update with an equal key."""

    def __init__(self, unit: Unit, work: Work, key: Any) -> None:
        super().__init__(unit, work, key)
        self.made: Work = work
        self.committed = False
        self.withdrawn = False
        self.computed = asyncio.Event()  # or failed, or never started
        self.fresh: Any = None
        self._started = False
        self._undone: asyncio.Task[None] | None = None

    @property
    def decided(self) -> bool:
        return self.committed

    async def run(self) -> None:
        if self.withdrawn:
            return
        if self.fresh is None:
            self._started = True
            self.computed.clear()
            try:
                self.fresh = await self.made.compute(self.due, self.ready.set)
            finally:
                self.computed.set()
        if self.committed:
            self.publish()

    def publish(self) -> None:
        """Publish what was computed; it was right."""
        fresh, self.fresh = self.fresh, None
        self.made.publish(fresh)

    async def undo(self, restore: bool = True) -> None:
        """Give it up and wait until nothing of it is left; any number of times. `restore`: parameters in host memory
        get their old values back.
        """
        self.withdrawn = True
        if self._undone is None:
            self._undone = asyncio.ensure_future(self._undo(restore))
        try:
            await asyncio.shield(self._undone)
        except BaseException:
            if self._undone is not None and self._undone.done():
                self._undone = None  # the next one tries again
            raise

    async def _undo(self, restore: bool) -> None:
        if self._started:
            await self.computed.wait()
        if self.fresh is not None:
            fresh, self.fresh = self.fresh, None
            self.made.discard(fresh)
        if restore and self._started:
            await self.made.restore()


class UpdateQueue:
    """Lives on the loop thread; all but the constructor runs there. At most `width` updates are on their way at a
    time, and one more if the very next use waits for it.
    """

    def __init__(self, metrics: Metrics, width: int, trace: Trace) -> None:
        self.metrics = metrics
        self.width = width
        self.trace = trace
        self.landed: Callable[[Unit], Awaitable[None]] | None = None  # waits for the gradients' copies to host memory
        self.may_exceed: Callable[[], bool] = lambda: True  # whether there is room for one more than `width`
        self._waiting: Waiting[Update] = Waiting(trace, lambda job: job.unit.uid)
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: set[asyncio.Task[None]] = set()  # wait for a save; see gate.py

    def put(self, jobs: list[Update]) -> None:
        """Queue `jobs`; the one whose unit is used next goes first."""
        for job in jobs:
            if not job.queued:
                job.queued = True
                self._waiting.add(job, urgent=job.urgent)
            elif job.urgent:
                self._waiting.hurry(job)
        self._pump()

    def commit(self, guess: Guess) -> None:
        """The guess was right: publish it, now or as soon as it is computed."""
        guess.unit.guess = None
        guess.committed = True
        if guess.fresh is not None:
            guess.publish()
            guess.finished.set()
            return
        guess.unit.pending = guess
        if guess.error is not None:
            guess.again()
        self.put([guess])

    def replace(self, update: Update) -> None:
        """Queue `update` of a unit whose guess, if it has one, was wrong."""
        unit = update.unit
        update.before, unit.guess = unit.guess, None
        unit.pending = update
        self.put([update])

    async def withdraw(self, unit: Unit) -> None:
        """Give up the unit's guess, if there is one that is not decided."""
        guess = unit.guess
        if guess is None:
            return
        self._waiting.discard(guess)
        self.metrics.add("guesses_dropped", not guess.withdrawn)
        await guess.undo()
        if unit.guess is guess:
            unit.guess = None

    async def drop(self, unit: Unit) -> None:
        """Forget the unit's guess and its update, failed ones too; one under way ends first, and so does one whose
        results are being saved. What they have written to host memory stays there.
        """
        guess, job = unit.guess, unit.pending
        if guess is not None:
            self._waiting.discard(guess)
            self.metrics.add("guesses_dropped", not guess.withdrawn)
            await guess.undo(restore=False)
            unit.guess = None
        if job is not None:
            if unit.gate is not None and unit.gate.before is job:
                with suppress(Exception):  # the save says it
                    await self.settled(unit)
            self._waiting.discard(job)
            if job.running:
                await job.finished.wait()
            if job.before is not None:
                await job.before.undo(restore=False)
            unit.pending = None
            job.end()

    def hurry(self, unit: Unit) -> None:
        """Somebody waits for the unit's update: it goes before all others that have not begun."""
        if unit.pending is not None:
            unit.pending.urgent = True
            self._waiting.hurry(unit.pending)
            self._pump()

    async def settled(self, unit: Unit, *, urgent: bool = True) -> None:
        """Return when `unit` has no queued update; raises what its update raised. One that had failed before is tried
        again first. `urgent`: somebody waits for it.
        """
        await self._until(unit, lambda job: job.finished, urgent)

    async def readable(self, unit: Unit, *, urgent: bool) -> None:
        """`settled`, or less: return when the unit's parameters can be read where fetches read them."""
        await self._until(unit, lambda job: job.finished if unit.host_flat is None else job.ready, urgent)

    async def _until(self, unit: Unit, event: Callable[[Update], asyncio.Event], urgent: bool) -> None:
        while unit.pending is not None:
            job: Update = unit.pending
            if job.error is not None:
                job.again()
            job.urgent |= urgent
            self.put([job])
            await event(job).wait()
            if unit.pending is not job:  # done; or dropped, and what replaces it (a rollback) is waited for too
                continue
            if job.error is not None:
                raise job.error
            if event(job).is_set():  # else somebody has begun a failed one again
                return

    def _pump(self) -> None:
        while self._waiting:
            job, urgent = self._waiting.first()
            gate = job.unit.gate
            if gate is not None and gate.holds(job):
                self._waiting.discard(job)
                held = asyncio.ensure_future(self._hold(job, gate))
                self._held.add(held)
                held.add_done_callback(self._held.discard)
                continue
            wanted_now = urgent or self.trace.next_use(job.unit.uid) == 0
            if len(self._tasks) >= self.width + (wanted_now and self.may_exceed()):
                return
            self._waiting.discard(job)
            job.due = 0 if urgent else self.trace.due(job.unit.uid)
            job.running = True
            task = asyncio.ensure_future(self._run(job))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def _hold(self, job: Update, gate: Gate) -> None:
        """Keep `job` waiting until a save has read what it changes."""
        await gate.records()
        if job in (job.unit.pending, job.unit.guess):  # else it was dropped
            self._waiting.add(job, urgent=job.urgent)
            self._pump()
        else:
            job.end()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pump()

    async def _run(self, job: Update) -> None:
        start = time.perf_counter_ns()
        try:
            if self.landed is not None:
                await self.landed(job.unit)
            with self.metrics.background:
                await job.run()
        except BaseException as error:
            job.error = error
        else:
            if job.decided:
                job.unit.pending = None
        finally:
            end = time.perf_counter_ns()
            self.metrics.add("update_s", (end - start) / 1e9)
            if self.metrics.recorder is not None:
                kind = "update" if job.decided else "guess"
                self.metrics.recorder.add("update", kind, f"{kind} {job.unit.name}", start, end)
            job.end()


class Withdrawal(Update):
    """Only gives the unit's guess up, with all that it overwrote."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit, work=None)

    async def run(self) -> None:
        if self.before is not None:
            await self.before.undo()
            self.before = None
