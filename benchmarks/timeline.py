"""One training step as text: what the compute, each link and the updates did, a column for each stretch of time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

TICK = 0.004  # seconds
SHADES = " .:-=+*#%@"


class Recorder:
    """Watches an engine from a thread of its own while a step runs."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.samples: list[tuple[float, int, int, int, int]] = []
        self._stop = threading.Event()

    def run(self, step: Callable[[], None]) -> tuple[float, float]:
        """(start, end) of `step`."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        start = time.perf_counter()
        try:
            step()
            return start, time.perf_counter()
        finally:
            self._stop.set()
            thread.join()

    def _watch(self) -> None:
        engine = self.engine
        while not self._stop.is_set():
            read, written = engine.moved()
            waiting = sum(
                unit.pending is not None or (unit.guess is not None and unit.guess.fresh is None)
                for unit in engine.units
            )
            self.samples.append((time.perf_counter(), read, written, engine.metrics.h2d, waiting))
            time.sleep(TICK)


def draw(
    recorder: Recorder, span: tuple[float, float], computing: list[tuple[str, float, float]], columns: int = 100
) -> list[str]:
    """Lines of text: compute F(orward) or B(ackward), blank while it waits; the links by how busy they were, relative
    to their busiest; units whose update is under way or waits, in tenths of all.
    """
    start, end = span
    width = (end - start) / columns
    column = lambda at: min(columns - 1, max(0, int((at - start) / width)))
    compute = [" "] * columns
    for kind, first, last in computing:
        if first < end and last > start:
            for index in range(column(max(first, start)), column(min(last, end)) + 1):
                compute[index] = kind
    moved = [[0.0] * columns for _ in range(3)]
    updates = [0.0] * columns
    for before, after in zip(recorder.samples, recorder.samples[1:], strict=False):
        index = column(after[0])
        for link in range(3):
            moved[link][index] += after[1 + link] - before[1 + link]
        updates[index] = max(updates[index], after[4] / max(len(recorder.engine.units), 1))
    lines = [f"{'compute':12}|{''.join(compute)}|"]
    for name, link in zip(("drive read", "drive write", "to device"), moved, strict=True):
        most = max(link) or 1.0
        lines.append(f"{name:12}|{''.join(_shade(value / most) for value in link)}|")
    lines.append(f"{'updates':12}|{''.join(_shade(value) for value in updates)}|")
    lines.append(f"{'':12} 0 s{f'{end - start:.2f} s':>{columns - 2}}")
    return lines


def _shade(share: float) -> str:
    return SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))] if share > 0 else " "
