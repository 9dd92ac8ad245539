"""What happened when: a recorder of spans, and the Chrome trace (which Perfetto opens too) that it becomes.

Note [rows]
Spans of the training thread nest, as its code does, and get one row. Fetches and updates run side by side, so they are
given the first row of their kind that is free: in every row spans follow one another or nest, which the format needs.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierzero.errors import naming
from tierzero.monitoring.watch import Nest

TRAINING = "training thread"
ROWS = ("steps", TRAINING, "fetch", "update", "update: read", "update: AdamW", "update: write", "norms", "evict")
MOST = 1 << 19


@dataclass(frozen=True, slots=True)
class Span:
    """`start` and `end` in nanoseconds of time.perf_counter_ns; equal for what takes no time."""

    row: str
    kind: str
    name: str
    start: int
    end: int
    args: Mapping[str, Any] = field(default_factory=dict)


class Track:
    """The training thread's row of a recorder, as watch.Sink wants it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._nest: Nest[tuple[str, str, int]] = Nest()

    def begin(self, key: object, kind: str, name: str) -> None:
        if key not in self._nest:
            self._nest.push(key, (kind, name, self._recorder.now()))

    def end(self, key: object) -> None:
        self._close(self._nest.pop(key))

    def clear(self) -> None:
        self._close(self._nest.pop_all())

    def _close(self, spans: Iterable[tuple[str, str, int]]) -> None:
        now = self._recorder.now()
        for kind, name, start in spans:
            self._recorder.add(TRAINING, kind, name, start, now)


class Recorder:
    """Keeps spans, from any thread, and samples of counters."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now = now
        self.started = now()
        self.spans: list[Span] = []
        self.samples: list[tuple[int, dict[str, float]]] = []
        self.steps_before = 0  # that the engine does not know of: those before a resume
        self.most = MOST  # spans kept; what comes after is counted
        self.dropped = 0
        self.sampler: threading.Thread | None = None  # until `stop`
        self.stop = threading.Event()
        self.track = Track(self)

    def add(self, row: str, kind: str, name: str, start: int, end: int, **args: Any) -> None:
        """A span that is over; one that began before the recorder did begins with it."""
        if len(self.spans) >= self.most:
            self.dropped += 1
        elif end >= self.started:
            self.spans.append(Span(row, kind, name, max(start, self.started), end, args))

    def moment(self, row: str, kind: str, name: str, **args: Any) -> None:
        """Something that takes no time, now."""
        now = self.now()
        self.add(row, kind, name, now, now, **args)

    def step(self, number: int, start: int, end: int, parts: Mapping[str, float]) -> None:
        """A step is over; `parts` in seconds."""
        number += self.steps_before
        self.add("steps", "step", f"step {number}", start, end, step=number, parts_s=dict(parts))

    def sample(self, **totals: float) -> None:
        """The running totals of some counters at this moment."""
        self.samples.append((self.now(), totals))

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace events, in microseconds since the recorder started."""
        pid = os.getpid()
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "tierzero"}}
        tid = 0
        for row in ROWS:
            for lane in _lanes([span for span in self.spans if span.row == row]):
                tid += 1
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": row}}
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
                for span in lane:
                    common = {"pid": pid, "tid": tid, "cat": span.kind, "name": span.name, "args": dict(span.args)}
                    if span.row == "evict":
                        yield {"ph": "i", "s": "t", "ts": self._us(span.start), **common}
                    else:
                        at = self._us(span.start)
                        yield {"ph": "X", "ts": at, "dur": round(self._us(span.end) - at, 3), **common}
        for before, after in zip(self.samples, self.samples[1:], strict=False):
            for name, value in _rates(before, after):
                yield {"ph": "C", "pid": pid, "ts": self._us(before[0]), "name": name, "args": {name: value}}

    def _us(self, at: int) -> float:
        return (at - self.started) / 1000

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON; the file is whole or not there."""
        target = Path(path)
        beside = target.with_name(target.name + ".part")
        found = {"traceEvents": list(self.events()), "displayTimeUnit": "ms", "otherData": {"dropped": self.dropped}}
        try:
            with naming(target):
                beside.write_text(json.dumps(found), encoding="utf-8")
            beside.replace(target)
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                beside.unlink(missing_ok=True)
            raise


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """`spans` in as few rows as need be for them not to cross; longer ones first where they begin together."""
    lanes: list[tuple[list[Span], list[int]]] = []  # with the ends of what is open there
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for _, ends in lanes:
            while ends and ends[-1] <= span.start:
                ends.pop()
        free = (each for each in lanes if not each[1] or (span.row == TRAINING and span.end <= each[1][-1]))
        lane, ends = found = next(free, ([], []))
        if not lane:
            lanes.append(found)
        lane.append(span)
        ends.append(span.end)
    return [lane for lane, _ in lanes]


def _rates(before: tuple[int, dict[str, float]], after: tuple[int, dict[str, float]]) -> Iterator[tuple[str, float]]:
    """(name, GB/s) of what is counted in bytes, (name, MiB) of what is held."""
    seconds = (after[0] - before[0]) / 1e9
    for name, value in after[1].items():
        if name.endswith("_held"):
            yield f"{name.removesuffix('_held')} MiB", round(value / 2**20, 3)
        elif seconds > 0 and name in before[1]:
            yield f"{name} GB/s", round((value - before[1][name]) / 1e9 / seconds, 4)


__all__ = ["ROWS", "TRAINING", "Recorder", "Span"]
