"""How fast a save goes on beside training: faster and faster, until training waits for the drive.

Note [pace]
What a save reads and writes costs training nothing while the drive has time left, and its whole time where the drive is
what a step waits for. The two are told apart by what is counted anyway: how long the training thread waited for
fetches, updates and gradients, and how long the drive was busy for it. The save begins with SHARE of the drive's time:
after each buffer it rests. In each window of time in which training does not wait for a busy drive it rests half as
long, otherwise twice as long, up to that. What a buffer costs is the least that one has taken: the rest of its time it
stood in line. Where a limit holds its writing, that is taken to last as long as its reading.
Whoever waits for the save ends that.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from tierzero.monitoring.metrics import Metrics

SHARE = 0.04  # of the drive's time that a save takes at least
_MOST = (1 - SHARE) / SHARE  # seconds of rest for one of I/O
_WINDOW = 0.25  # seconds
_WAITS = 0.02  # of the time that training waits: less is no bottleneck
_BUSY = 0.5  # of the time that the drive is busy for training
_SLICE = 0.05  # seconds after which a rest looks whether somebody waits


class Pace:
    """The pace of one save beside the training that `metrics` count. `hurry()`: whether somebody waits for the save.
    `limited`: whether its writes are held below a rate.
    """

    def __init__(
        self,
        metrics: Metrics,
        hurry: Callable[[], bool],
        limited: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._limited = limited
        self.metrics = metrics
        self.hurry = hurry
        self.rest = _MOST
        self._least = math.inf  # seconds for a byte
        self._then = self._look()

    def _look(self) -> tuple[float, float, float]:
        """(now, seconds that training has waited, seconds that the drive was busy for it)."""
        drives, metrics = self.metrics.drives(), self.metrics
        waited = metrics.stall_fetch_s + metrics.stall_update_s + metrics.stall_grad_s
        return self._now(), waited, (drives.read_ns + drives.write_ns) / 1e9

    def judge(self) -> None:
        """Look at what has happened since the last look, a window ago."""
        now, waited, busy = self._look()
        seconds = now - self._then[0]
        if seconds < _WINDOW:
            return
        disturbed = waited - self._then[1] > _WAITS * seconds and busy - self._then[2] > _BUSY * seconds
        self._then = now, waited, busy
        self.rest = min(max(2 * self.rest, 1.0), _MOST) if disturbed else self.rest / 2 if self.rest > 0.1 else 0.0

    async def after(self, read: float, written: float, nbytes: int) -> None:
        """Rest after `nbytes` that were read in `read` and written in `written` seconds, as long as training needs the
        drive.
        """
        self.judge()
        seconds = read + (min(read, written) if self._limited else written)
        self._least = min(self._least, seconds / nbytes)
        until = self._now() + self.rest * self._least * nbytes
        while (left := until - self._now()) > 0 and not self.hurry():
            await asyncio.sleep(min(left, _SLICE))
            self.judge()
