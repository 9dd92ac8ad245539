"""Ctrl-C and SIGTERM as a wish to stop: after the step, or at once with everything put away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopSignal:
    """Inside the context the first SIGINT or SIGTERM only sets `asked`; a second one acts as it always does."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()
        # written directly: printing from a handler could wait for a lock that the interrupted code holds
        os.write(2, b"\nstopping after this step, then saving (once more: stop at once)\n")


class Stopped(BaseException):
    """A signal asked to end; not an Exception, so that nothing on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def signals_stop() -> Iterator[Callable[[], None]]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped, once; a second one acts as it always does. Ignored ones stay so.

    The exception can come where it is swallowed (a finalizer, a library that catches everything): what is yielded
    raises it again if a signal came, and so does the end.
    """
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {}
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_DFL)
        came.append(number)
        raise Stopped(number)

    def check() -> None:
        if came:
            raise Stopped(came[0])

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield check
        check()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
