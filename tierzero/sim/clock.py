"""Simulated time: events in order, signals, and processes that wait for either."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from itertools import count

Wait = Generator["float | Signal", None, None]  # a process: yields seconds to pass, or a signal to wait for


class Signal:
    """Something that happens once; whoever waits for it goes on then, and whoever comes later does not wait."""

    __slots__ = ("_waiting", "done")

    def __init__(self) -> None:
        self.done = False
        self._waiting: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Call it when this has happened, at once if it has."""
        if self.done:
            call()
        else:
            self._waiting.append(call)

    def fire(self) -> None:
        """It happens now. Harmless when it has happened already."""
        if not self.done:
            self.done = True
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()


class Clock:
    """`now` is seconds since the start. Events of the same moment come in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it that much later; never before anything that is due now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._number), call))

    def start(self, process: Wait) -> Signal:
        """Run a process from now on; the signal says that it has ended."""
        ended = Signal()

        def go_on() -> None:
            while True:
                try:
                    wait = next(process)
                except StopIteration:
                    ended.fire()
                    return
                if isinstance(wait, Signal):
                    if not wait.done:
                        wait.then(go_on)
                        return
                elif wait > 0:
                    self.after(wait, go_on)
                    return

        go_on()
        return ended

    def run(self, until: Signal) -> None:
        """Go through the events until that has happened. RuntimeError when nothing is left that could make it."""
        while not until.done:
            if not self._events:
                raise RuntimeError("the simulation waits for something that nothing will bring about")
            self.now, _, call = heapq.heappop(self._events)
            call()

    def drain(self) -> None:
        """Go through all events that are left."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
