"""Where the training thread's time goes, and how long the links were busy.

Note [parts]
The clock is always in exactly one part, in whole nanoseconds, and reading it moves nothing: so the parts of a step add
up to its wall time to the last one. Hooks go over to a part and back; what they find as they begin is compute, which is
therefore everything outside the engine: the model, the loss, and the rest of the user's loop. One thread at a time runs
forward, backward and the optimizer (on CUDA autograd's own, while the other one waits for it), so nothing is locked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PARTS = ("compute", "fetch", "update", "gradient", "activation", "d2h", "engine", "save")
COMPUTE, FETCH, UPDATE, GRADIENT, ACTIVATION, D2H, ENGINE, SAVE = range(len(PARTS))


class Clock:
    """Nanoseconds that the training thread has spent in each part. See Note [parts]."""

    __slots__ = ("_now", "_since", "part", "spent", "started")

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self.part = COMPUTE
        self.spent = [0] * len(PARTS)
        self.started = self._since = now()

    def enter(self, part: int) -> int:
        """Go over to `part`; returns the one before, which is what to go back to."""
        now = self._now()
        before = self.part
        self.spent[before] += now - self._since
        self._since = now
        self.part = part
        return before

    def read(self) -> tuple[int, list[int]]:
        """(now, nanoseconds spent in each part until now)."""
        self.enter(self.part)
        return self._since, list(self.spent)


class Busy:
    """How long at least one of something was under way, in nanoseconds. Thread-safe; a context, entered by each."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0
        self._total = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._since = self._now()
            self._under_way += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._total += self._now() - self._since

    def add(self, nanoseconds: int) -> None:
        """Time that was measured elsewhere."""
        with self._lock:
            self._total += nanoseconds

    @property
    def total(self) -> int:
        """Until now."""
        with self._lock:
            return self._total + (self._now() - self._since if self._under_way else 0)


__all__ = ["COMPUTE", "D2H", "ENGINE", "FETCH", "GRADIENT", "PARTS", "SAVE", "UPDATE", "Busy", "Clock"]
