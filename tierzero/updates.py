"""The queue of unit updates: run in order of next use, jumped by whoever waits for one, kept until they succeed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tierzero.metrics import Metrics
from tierzero.unit import Unit


class Update:
    """One unit's queued optimizer step. `begin` is called as it is queued. `work` may be run again after it failed: it
    reads the old version and the gradients, both still there.
    """

    def __init__(
        self, unit: Unit, work: Callable[[], Awaitable[None]], begin: Callable[[], None] = lambda: None
    ) -> None:
        self.unit = unit
        self.begin = begin
        self.work = work
        self.queued = False
        self.finished = asyncio.Event()
        self.error: BaseException | None = None


class UpdateQueue:
    """Lives on the loop thread; `put` and `settled` run there. At most `width` updates are on their way at a time."""

    def __init__(self, metrics: Metrics, width: int) -> None:
        self.metrics = metrics
        self.width = width
        self._waiting: list[Update] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, jobs: list[Update]) -> None:
        """Queue `jobs` in this order, behind what waits already."""
        for job in jobs:
            if not job.queued:
                job.queued = True
                self._waiting.append(job)
        self._pump()

    async def settled(self, unit: Unit) -> None:
        """Return when `unit` has no queued update; raises what its update raised. One that had failed before is tried
        again first.
        """
        job: Update | None = unit.pending
        if job is None:
            return
        if job.error is not None:
            job.error, job.queued = None, False
            job.finished.clear()
        if not job.queued:
            job.queued = True
            self._waiting.insert(0, job)
        elif job in self._waiting:
            self._waiting.remove(job)
            self._waiting.insert(0, job)
        self._pump()
        await job.finished.wait()
        if job.error is not None:
            raise job.error

    def _pump(self) -> None:
        while self._waiting and len(self._tasks) < self.width:
            task = asyncio.ensure_future(self._run(self._waiting.pop(0)))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pump()

    async def _run(self, job: Update) -> None:
        start = time.perf_counter()
        try:
            await job.work()
        except BaseException as error:
            job.error = error
        else:
            job.unit.pending = None
        finally:
            self.metrics.add("update_s", time.perf_counter() - start)
            job.finished.set()
