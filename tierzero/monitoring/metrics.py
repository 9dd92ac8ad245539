"""Counters of one engine: bytes per link, stalls by cause, hits, and the analytic bytes they are held against; the
steps they make up, and who watches them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from tierzero.monitoring.clock import ACTIVATION, ENGINE, FETCH, GRADIENT, PARTS, SAVE, UPDATE, Busy, Clock
from tierzero.monitoring.step_stats import Mark, StepStats, between
from tierzero.monitoring.timeline import Recorder
from tierzero.monitoring.watch import Sink, Watch

P = ParamSpec("P")
R = TypeVar("R")
_WAITS = {
    "stall_fetch_s": FETCH,
    "stall_update_s": UPDATE,
    "stall_grad_s": GRADIENT,
    "stall_activation_s": ACTIVATION,
    "stall_save_s": SAVE,
}


@dataclass(frozen=True)
class DriveTotals:
    """Bytes moved, and nanoseconds in which the drives were reading and writing, since `offload`."""

    read: int = 0
    written: int = 0
    read_ns: int = 0
    write_ns: int = 0


@dataclass
class Metrics:
    """Times are seconds, sizes bytes, both since `offload`. Written from the training thread and the loop thread."""

    device_budget: int = 0
    device_used: int = 0
    device_peak: int = 0
    device_needed: int = 0
    host_budget: int = 0
    nvme_read_expected: int = 0
    nvme_written_expected: int = 0
    h2d: int = 0
    d2h: int = 0
    stall_fetch_s: float = 0.0
    stall_update_s: float = 0.0
    stall_grad_s: float = 0.0
    stall_activation_s: float = 0.0
    stall_save_s: float = 0.0
    update_s: float = 0.0
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    prefetch_wasted: int = 0
    forced_evictions: int = 0
    faults: int = 0
    activations_offloaded: int = 0
    activations_restored: int = 0
    activations_written: int = 0
    activations_read: int = 0
    activations_kept: int = 0
    activation_hits: int = 0
    activation_misses: int = 0
    steps: int = 0
    skipped_steps: int = 0
    guesses: int = 0
    guesses_right: int = 0
    guesses_redone: int = 0
    guesses_dropped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._names = tuple(vars(self).keys() - {"_lock"})
        self.clock = Clock()
        self.h2d_busy, self.d2h_busy = Busy(), Busy()
        self.background = Busy()  # fetches and updates, whichever links they use
        self.drives: Callable[[], DriveTotals] = DriveTotals
        self.last_step: StepStats | None = None
        self.recorder: Recorder | None = None
        self.watch: Watch | None = None
        self.ranges: Sink | None = None
        self._step_peak = 0
        self._used = False  # a forward has begun
        self._from = self._open = self._mark()  # where the last step began, where the present one did

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to one counter, atomically."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def device(self, delta: int) -> None:
        """Bytes taken (or given back, negative) in the device tier; keeps the high-water mark."""
        with self._lock:
            self.device_used += delta
            self._peak(self.device_used)

    def device_passing(self, nbytes: int) -> None:
        """Bytes in the device tier that are gone again when this is called; they count for the high-water mark."""
        with self._lock:
            self._peak(self.device_used + nbytes)

    def gradient(self, nbytes: int) -> None:
        """A gradient has left the device for host memory."""
        with self._lock:
            self.d2h += nbytes
            self._peak(self.device_used + nbytes)

    def needed(self, nbytes: int) -> None:
        """A device budget below `nbytes` would not have done."""
        with self._lock:
            self.device_needed = max(self.device_needed, nbytes)

    def _peak(self, nbytes: int) -> None:
        self.device_peak = max(self.device_peak, nbytes)
        self._step_peak = max(self._step_peak, nbytes)

    def snapshot(self) -> dict[str, float]:
        """All counters at this moment."""
        with self._lock:
            return {name: getattr(self, name) for name in self._names}

    # -- time ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self, name: str, unit: str = "") -> Iterator[None]:
        """The training thread waits inside: the seconds go to the counter `name` (stall_fetch_s, ...)."""
        part = _WAITS[name]
        before = self.clock.spent[part]
        try:
            with self.inside(part, "wait", f"wait for {PARTS[part]} {unit}".rstrip()):
                yield
        finally:
            self.add(name, (self.clock.spent[part] - before) / 1e9)

    @contextmanager
    def inside(self, part: int, kind: str = "", name: str = "") -> Iterator[None]:
        """What the training thread does inside belongs to `part` of clock.PARTS; `kind` and `name` show it to whoever
        watches.
        """
        before = self.clock.enter(part)
        watch, key = self.watch, object()
        try:
            if watch is not None and name:
                watch.begin(key, kind, name)
            yield
        finally:
            if watch is not None and name:
                watch.end(key)
            self.clock.enter(before)

    def engine(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, its time counted as the engine's."""
        clock = self.clock

        @functools.wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            before = clock.enter(ENGINE)
            try:
                return function(*args, **kwargs)
            finally:
                clock.enter(before)

        return counted

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin_first(self) -> None:
        """A forward begins: the first step begins with the first one."""
        if not self._used:
            self._used = True
            self._from = self._open = self._mark()

    def end_step(self, skipped: bool) -> None:
        """A step is over. One without a use since the last end belongs to that one: a model with two optimizers."""
        self.add("skipped_steps" if skipped else "steps")
        mark = self._mark()
        if any(mark.counts[name] != self._open.counts[name] for name in ("hits", "misses")):
            self._from = self._open
        with self._lock:
            peak, self._step_peak = self._step_peak, self.device_used
        number = self.steps + self.skipped_steps
        self.last_step = between(self._from, mark, number=number, skipped=skipped, device_peak=peak)
        if self.recorder is not None:
            self.recorder.step(number, self._from.now, mark.now, self.last_step.parts_s)
        self._open = mark

    def _mark(self) -> Mark:
        now, parts = self.clock.read()
        drives, counts = self.drives(), self.snapshot()
        busy = {
            "nvme_read": drives.read_ns,
            "nvme_written": drives.write_ns,
            "h2d": self.h2d_busy.total,
            "d2h": self.d2h_busy.total,
            "background": self.background.total,
        }
        moved = {"nvme_read": drives.read, "nvme_written": drives.written, "h2d": self.h2d, "d2h": self.d2h}
        return Mark(now, parts, busy, moved, counts)

    # -- who watches ---------------------------------------------------------------------------------------------------

    def record(self, recorder: Recorder | None) -> None:
        """Tell `recorder`, or nobody, what happens from now on."""
        self.recorder = recorder
        self._tell()

    def show(self, ranges: Sink | None) -> None:
        """Show a profiler, or none, what the training thread does from now on."""
        self.ranges = ranges
        self._tell()

    def _tell(self) -> None:
        sinks: list[Sink] = [self.recorder.track] if self.recorder is not None else []
        sinks += [self.ranges] if self.ranges is not None else []
        self.watch = Watch(sinks) if sinks else None


__all__ = ["DriveTotals", "Metrics"]
