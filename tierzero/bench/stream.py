"""One phase: requests kept in flight on a file for a while, and what came of it."""

from __future__ import annotations

import resource
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierzero.bench.scratch import Scratch, native

KINDS = ("read", "write", "mixed")
LEAST_REQUEST, MOST_REQUEST = 32 << 20, 128 << 20  # bytes; the engine splits them into blocks


@dataclass(frozen=True)
class Setting:
    """engine: "uring" or "pool". block: bytes of a piece. depth: pieces in flight per drive."""

    engine: str
    block: int
    depth: int


@dataclass(frozen=True)
class Sample:
    """What a phase moved: bytes, wall seconds, CPU seconds of this process; `timeline`: (seconds, bytes so far)."""

    kind: str
    read: int
    written: int
    seconds: float
    cpu: float
    timeline: list[tuple[float, int]] = field(default_factory=list, repr=False)

    @property
    def moved(self) -> int:
        return self.read + self.written

    @property
    def rate(self) -> float:
        """Bytes per second, reads and writes together."""
        return self.moved / self.seconds

    @property
    def cpu_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu / self.moved * 1e9


class Buffers:
    """Memory for requests of up to `request` bytes of any of the settings, in huge pages where they are to be had."""

    def __init__(self, settings: Sequence[Setting], drives: int = 1, request: int = MOST_REQUEST) -> None:
        import numpy as np

        self.slab = native().Slab(max(request * requests(s, request, drives) for s in settings))
        self.array = self.slab.array()
        # not all zeros: drives and hypervisors may know those
        noise = np.random.default_rng(0).integers(0, 256, min(8 << 20, self.slab.nbytes), dtype=np.uint8)
        for start in range(0, self.slab.nbytes, noise.size):
            part = self.array[start : start + noise.size]
            part[:] = noise[: part.size]

    @property
    def huge_share(self) -> float:
        """Of the memory, what lies in huge pages: 0 to 1."""
        return float(self.slab.huge_bytes() / self.slab.nbytes)


def requests(setting: Setting, request: int, drives: int = 1) -> int:
    """Requests of so many bytes in flight: enough for the engine's depth on every drive, and one to go on with."""
    return -(-setting.depth * setting.block * drives // request) + 1


def request_for(rate: float) -> int:
    """Bytes of a request on a drive that does `rate` bytes/s: some 30 ms.

    Fewer and larger ones cost less outside the engine, which is what is measured; on a slow drive they would take
    longer than the phases.
    """
    return min(max(LEAST_REQUEST, int(rate * 0.03)), MOST_REQUEST)


def open_engine(setting: Setting) -> Any:
    """The native engine with that setting. OSError where it cannot work."""
    return native().Engine(kind=setting.engine, block=setting.block, depth=setting.depth)


def run(
    setting: Setting,
    scratch: Scratch,
    buffers: Buffers,
    kind: str,
    *,
    seconds: float = float("inf"),
    nbytes: int | None = None,
    size: int | None = None,
    request: int = LEAST_REQUEST,
    drives: int = 1,
    tick: Callable[[float], None] | None = None,
    engine: Any = None,
) -> Sample:
    """Transfers in order over the first `size` bytes of the file, round and round, for `seconds` or `nbytes`.

    "mixed" reads the first half and writes the second, as many requests of each. `request`: bytes of one, cut to whole
    blocks. `tick` is called with the seconds passed at every completion. `engine`: one to use and leave open, instead
    of one of `setting`.
    """
    own = engine is None
    length = request // setting.block * setting.block
    engine = open_engine(setting) if own else engine
    try:
        if engine.name == "uring":
            engine.register(buffers.array)
        if kind != "write" and not scratch.file.direct:
            scratch.file.sync()
            scratch.forget_cached()
        return _run(
            engine, setting, scratch, buffers, kind, seconds, nbytes, size or scratch.size, length, drives, tick
        )
    finally:
        if own:
            engine.close()


def _run(
    engine: Any,
    setting: Setting,
    scratch: Scratch,
    buffers: Buffers,
    kind: str,
    seconds: float,
    nbytes: int | None,
    size: int,
    length: int,
    drives: int,
    tick: Callable[[float], None] | None,
) -> Sample:
    file = scratch.file
    half = size // 2 // 4096 * 4096
    spans = {"read": (0, half if kind == "mixed" else size), "write": (half if kind == "mixed" else 0, size)}
    offsets = {name: first for name, (first, _) in spans.items()}
    slots = [buffers.array[i * length : (i + 1) * length] for i in range(requests(setting, length, drives))]
    flying: dict[Any, tuple[int, str]] = {}
    free = list(range(len(slots)))
    moved = {"read": 0, "write": 0}
    asked, turn = 0, 0
    timeline: list[tuple[float, int]] = []
    poll = select.poll()
    poll.register(engine.eventfd, select.POLLIN)
    engine.reap()
    cpu = _cpu()
    start = time.perf_counter()
    passed = 0.0
    while True:
        while free and passed < seconds and (nbytes is None or asked < nbytes):
            name = kind if kind != "mixed" else ("read", "write")[turn % 2]
            slot, turn = free.pop(), turn + 1
            first, last = spans[name]
            count = min(length, last - offsets[name])
            submit = engine.read if name == "read" else engine.write
            flying[submit(file, offsets[name], slots[slot][:count])] = (slot, name)
            asked += count
            offsets[name] += count
            if offsets[name] == last:
                offsets[name] = first
        if not flying:
            break
        poll.poll(1000)
        for ticket in engine.reap():
            slot, name = flying.pop(ticket)
            moved[name] += ticket.result()
            free.append(slot)
        passed = time.perf_counter() - start
        timeline.append((passed, moved["read"] + moved["write"]))
        if tick is not None:
            tick(passed)
    if kind != "read" and not file.direct:
        file.sync()
        # until then it is only in memory: when within that time the drive took what, nobody tells
        timeline = [(time.perf_counter() - start, moved["read"] + moved["write"])]
    total = time.perf_counter() - start
    return Sample(kind, moved["read"], moved["write"], total, _cpu() - cpu, timeline)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rates(timeline: Sequence[tuple[float, int]], count: int) -> list[float]:
    """Bytes/s in each of `count` equal parts of the time that a phase took."""
    if not timeline:
        return []
    end = timeline[-1][0]
    marks = [end * (i + 1) / count for i in range(count)]
    totals, position, before = [], 0, (0.0, 0)
    for mark in marks:
        while position < len(timeline) - 1 and timeline[position][0] < mark:
            before = timeline[position]
            position += 1
        (t0, b0), (t1, b1) = before, timeline[position]
        totals.append(b0 + (b1 - b0) * (min(mark, t1) - t0) / (t1 - t0) if t1 > t0 else float(b1))
    return [(b - a) / (end / count) for a, b in zip([0.0, *totals[:-1]], totals, strict=True)]
