"""Ctrl-C and SIGTERM as a wish to stop after the step."""

from __future__ import annotations

import os
import signal
import threading
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
        # written directly: printing from a handler could wait for a lock that the interrupted code holds
        os.write(2, b"\nstopping after this step, then saving (once more: stop at once)\n")
        self._restore()
