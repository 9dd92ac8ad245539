"""A link's bytes per second held below a limit, on an event loop."""

from __future__ import annotations

import asyncio
import math
import time


class Pacer:
    """Shares time out: n bytes take at least n / `rate` seconds however they are cut. `rate` is bytes per second.

    Time in which nothing was asked for earns nothing. `delay`: seconds until bytes arrive that have passed; others pass
    meanwhile. For one thread: that of the loop.
    """

    def __init__(self, rate: float, delay: float = 0.0) -> None:
        self.rate = rate
        self.delay = delay
        self._free = -math.inf  # of time.monotonic, when the bytes asked for so far have passed

    async def pace(self, nbytes: int) -> None:
        """Return once `nbytes` more may have arrived. Cancelled, their time is taken all the same."""
        self._free = max(self._free, time.monotonic()) + nbytes / self.rate
        due = self._free + self.delay
        while (left := due - time.monotonic()) > 0:
            await asyncio.sleep(left)
