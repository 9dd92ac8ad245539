"""The queue of unit updates, as updates.py keeps it: by next use, jumped by whoever waits, a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tierzero.paging.schedule import Trace
from tierzero.paging.waiting import Waiting
from tierzero.sim.clock import Signal, Wait
from tierzero.sim.model import Setup, SimUnit
from tierzero.sim.stepper import Job, Stepper


class Update:
    """One unit's. ready: its parameters in host memory are new; finished: all of it."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.ready = Signal()
        self.finished = Signal()


class Updates:
    """`pending`: unit -> its update that a step has decided on; `guesses`: those begun before the step."""

    def __init__(self, units: Sequence[SimUnit], setup: Setup, trace: Trace, stepper: Stepper, chunk: int) -> None:
        self.units = units
        self.setup = setup
        self.trace = trace
        self.stepper = stepper
        self.chunk = chunk
        self.pending: dict[int, Update] = {}
        self.guesses: dict[int, Update] = {}
        self._waiting: Waiting[Update] = Waiting(trace, unit_of=lambda update: update.uid)
        self._running = 0

    def guess(self, uid: int) -> None:
        """Begin the unit's update before the step is taken."""
        self.guesses[uid] = update = Update(uid)
        self._put(update)

    def decide(self, uid: int) -> None:
        """The step is taken: the guess was right, or the update begins now."""
        update = self.guesses.pop(uid, None)
        if update is not None and update.finished.done:
            return
        self.pending[uid] = known = update or Update(uid)
        known.finished.then(lambda: self._settled(known))
        if update is None:
            self._put(known)

    def _settled(self, update: Update) -> None:
        if self.pending.get(update.uid) is update:
            del self.pending[update.uid]

    def hurry(self, uid: int) -> None:
        """Somebody waits for the unit's update."""
        if uid in self.pending:
            self._urge(self.pending[uid])

    def readable(self, uid: int, *, urgent: bool) -> Signal | None:
        """What a fetch of the unit waits for; None: nothing."""
        update = self.pending.get(uid)
        if update is None:
            return None
        if urgent:
            self._urge(update)
        return update.ready if self.units[uid].cached else update.finished

    def settled(self, uid: int) -> Signal | None:
        """What new gradients of the unit wait for; None: nothing."""
        self.hurry(uid)
        update = self.pending.get(uid)
        return None if update is None else update.finished

    def _put(self, update: Update) -> None:
        self._waiting.add(update)
        self._pump()

    def _urge(self, update: Update) -> None:
        self._waiting.hurry(update)
        self._pump()

    def _pump(self) -> None:
        while self._waiting:
            update, urgent = self._waiting.first()
            wanted_now = urgent or self.trace.next_use(update.uid) == 0
            if self._running >= self.setup.width + wanted_now:
                return
            self._waiting.discard(update)
            self._running += 1
            due = 0 if urgent else self.trace.due(update.uid)
            job = Job(self._chunks(self.units[update.uid]), due)
            job.updated.then(update.ready.fire)
            job.ended.then(lambda update=update: self._done(update))  # type: ignore[misc]
            self.stepper.submit(job)

    def _done(self, update: Update) -> None:
        self._running -= 1
        update.ready.fire()
        update.finished.fire()
        self._pump()

    def _chunks(self, unit: SimUnit) -> list[tuple[float, float, float]]:
        """(elements, bytes read, bytes written) of each."""
        read = unit.state if unit.on_drive else 0
        whole, rest = divmod(unit.elements, self.chunk)
        counts = [self.chunk] * whole + [rest] * (rest > 0)
        shares = [count / unit.elements for count in counts]
        written = read + unit.copy
        return [(count, read * share, written * share) for count, share in zip(counts, shares, strict=True)]


def wait_for(signal: Signal | None) -> Wait:
    """As a process: until that happened; None: no time at all."""
    if signal is not None:
        yield signal
