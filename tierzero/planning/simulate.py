"""simulate: how long a training step takes, from a discrete-event simulation of what the engine does. Pure: no torch.

The order of everything is decided by the engine's own lookahead.py and waiting.py over the same recorded trace; links,
drive and CPU are rates. What it leaves out: on CUDA the host runs ahead of the device, so that fetches begin a
little earlier than here; and compute, copies and the optimizer's arithmetic do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierzero.paging.schedule import Trace
from tierzero.sim.clock import Clock, Signal, Wait
from tierzero.sim.links import Pipe, open_drive
from tierzero.sim.model import Rates, Setup, SimStep, SimUnit, uses_of
from tierzero.sim.paging import Paging
from tierzero.sim.stepper import Stepper
from tierzero.sim.updates import Updates

STALLS = ("compute", "fetch", "update", "gradients", "norm", "overhead")
LINKS = ("h2d", "d2h", "drive", "adam")
CHUNKS = 1500  # a step is cut into at most so many: enough for a per cent, few enough for a blink
LEAST_SLOTS = 8  # buffers, where chunks are coarser than the engine's
_ENOUGH = 1e-3  # of a step's time: it has settled when two in a row differ by less
_TRIES = 8  # steps until then


def simulate(units: Sequence[SimUnit], rates: Rates, setup: Setup, *, chunks: int = CHUNKS) -> SimStep:
    """One step in the midst of training. ValueError if a unit finds no room in the budget, or if something lies on a
    drive and `rates` has none.
    """
    if rates.drive is None and any((unit.elements and unit.on_drive) or unit.copy or not unit.cached for unit in units):
        raise ValueError("something lies on a drive, and the rates have none")
    return Run(units, rates, setup, chunks).settle()


class Run:
    """Steps in a row."""

    def __init__(self, units: Sequence[SimUnit], rates: Rates, setup: Setup, chunks: int = CHUNKS) -> None:
        self.units, self.rates, self.setup = units, rates, setup
        self.clock = Clock()
        self.forward, self.backward = uses_of(units)
        order = [uid for what, uid in self.forward if what == "enter"]
        back = [uid for what, uid in self.backward if what == "enter"]
        self.trace = Trace((order + back) * setup.micro)
        self.trace.begin_step()
        self.drive = open_drive(self.clock, rates.drive) if rates.drive is not None else None
        self.h2d, self.d2h = Pipe(self.clock, rates.h2d), Pipe(self.clock, rates.d2h)
        self.norms = Pipe(self.clock, rates.norm)
        chunk = max(setup.chunk, -(-sum(unit.elements for unit in units) // chunks))
        slots = max(min(setup.slots, LEAST_SLOTS), setup.slots * setup.chunk // chunk)
        self.stepper = Stepper(self.clock, self.drive, rates, slots)
        self.updates = Updates(units, setup, self.trace, self.stepper, chunk)
        self.paging = Paging(self.clock, units, rates, setup, self.trace, self.updates, self.drive, self.h2d)
        self.stalls = dict.fromkeys(STALLS, 0.0)
        self.timeline: list[tuple[str, int, float, float]] = []
        self._grads: dict[int, Signal] = {}  # unit -> its gradients are in host memory
        self._normed = Signal()
        self._normed.fire()

    def settle(self) -> SimStep:
        """Steps until they take the same time; the mean of the last two."""
        before: list[SimStep] = []
        for _ in range(_TRIES):
            before.append(self.step())
            if len(before) > 2 and abs(before[-1].seconds - before[-2].seconds) <= _ENOUGH * before[-1].seconds:
                break
        return _mean(before[-2], before[-1])

    def step(self) -> SimStep:
        """The next step."""
        start, counts = self.clock.now, self._counts()
        self.stalls = dict.fromkeys(STALLS, 0.0)
        self.timeline = []
        self.clock.run(self.clock.start(self._train()))
        after = self._counts()
        change = {name: after[name] - counts[name] for name in after}
        return SimStep(
            seconds=self.clock.now - start,
            stalls=dict(self.stalls),
            busy={link: change[f"{link} busy"] for link in LINKS},
            moved={name: change[name] for name in ("h2d", "d2h", "nvme_read", "nvme_written", "elements")},
            peak=self.paging.peak,
            fetches=round(change["fetches"]),
            hits=round(change["hits"]),
            forced=round(change["forced"]),
            wasted=round(change["wasted"]),
            timeline=[(what, uid, begin - start, end - start) for what, uid, begin, end in self.timeline],
        )

    def _counts(self) -> dict[str, float]:
        drive = self.drive
        if drive is not None:
            drive.catch_up()
        return {
            "h2d": self.paging.loaded,
            "d2h": self.d2h.moved,
            "nvme_read": drive.read_bytes if drive is not None else 0.0,
            "nvme_written": drive.written_bytes if drive is not None else 0.0,
            "elements": self.stepper.elements,
            "h2d busy": max(self.h2d.busy, self.paging.link.busy if self.paging.link is not None else 0.0),
            "d2h busy": self.d2h.busy,
            "drive busy": drive.busy if drive is not None else 0.0,
            "adam busy": self.stepper.busy,
            "fetches": self.paging.fetches,
            "hits": self.paging.hits,
            "forced": self.paging.forced,
            "wasted": self.paging.wasted,
        }

    # -- what the training thread does ---------------------------------------------------------------------------------

    def _train(self) -> Wait:
        for micro in range(self.setup.micro):
            for what, uid in self.forward:
                if what == "enter":
                    yield from self._use(uid)
                elif what == "compute":
                    yield from self._spend("compute", uid, self.units[uid].forward)
                else:
                    self.paging.release(uid)
            last = micro + 1 == self.setup.micro
            for what, uid in self.backward:
                if what == "enter":
                    yield from self._use(uid)
                    self.paging.begin_backward(uid)
                elif what == "compute":
                    yield from self._compute_backward(uid, last)
                else:
                    self.paging.end_backward(uid)
        yield from self._step()

    def _use(self, uid: int) -> Wait:
        yield from self._spend("overhead", uid, self.rates.overhead)
        cause = "update" if uid in self.updates.pending else "fetch"
        start = self.clock.now
        yield from self.paging.acquire(uid)
        self._note(cause, uid, start)

    def _spend(self, what: str, uid: int, seconds: float) -> Wait:
        start = self.clock.now
        if seconds > 0:
            yield seconds
        self._note(what, uid, start)

    def _note(self, what: str, uid: int, start: float) -> None:
        passed = self.clock.now - start
        self.stalls[what] += passed
        if passed > 0:
            self.timeline.append((what, uid, start, self.clock.now))

    def _compute_backward(self, uid: int, last: bool) -> Wait:
        unit = self.units[uid]
        yield from self._spend("compute", uid, unit.backward)
        if not unit.grads:
            return
        old = self.updates.settled(uid)  # its gradients have the same place
        if old is not None:
            start = self.clock.now
            yield old
            self._note("gradients", uid, start)
        self.paging.passing(unit.grad)
        left = Signal()
        self.d2h.send(unit.grads, left.fire)
        if self.rates.inline:
            start = self.clock.now
            yield left
            self._note("compute", uid, start)
        self._grads[uid] = left
        if last:
            left.then(lambda: self._final(uid))

    def _final(self, uid: int) -> None:
        """The unit's gradients are in host memory and final."""
        unit = self.units[uid]
        self._normed = normed = Signal()
        self.norms.send(unit.grads, normed.fire)
        if self.setup.overlap == "eager" and unit.elements and unit.on_drive:
            self.updates.guess(uid)

    def _step(self) -> Wait:
        start = self.clock.now
        yield from self._grads.values()
        self._note("gradients", -1, start)
        start = self.clock.now
        if self.setup.clip:
            yield self._normed
        self._note("norm", -1, start)
        self._grads.clear()
        self.trace.end_step()
        trained = [uid for uid, unit in enumerate(self.units) if unit.elements]
        for uid in trained:
            self.updates.decide(uid)
        self.paging.stepped(trained)
        self.paging.look_ahead()


def _mean(first: SimStep, last: SimStep) -> SimStep:
    """Of two steps in a row: where they take turns, neither alone is what a run sees."""
    mean = lambda a, b: {name: (a[name] + b[name]) / 2 for name in a}
    return SimStep(
        seconds=(first.seconds + last.seconds) / 2,
        stalls=mean(first.stalls, last.stalls),
        busy=mean(first.busy, last.busy),
        moved=mean(first.moved, last.moved),
        peak=max(first.peak, last.peak),
        fetches=last.fetches,
        hits=last.hits,
        forced=last.forced,
        wasted=last.wasted,
        timeline=last.timeline,
    )
