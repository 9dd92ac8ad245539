"""A short run for measuring: the configuration's model and drive, in a directory of its own that is removed after."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import tierzero as tz
from tierzero.api import engine_of
from tierzero.cli.config import Config
from tierzero.cli.placement import check_disk, choose_tiers
from tierzero.cli.progress import QuietView
from tierzero.cli.report import Meter, StepReport
from tierzero.cli.task import open_task
from tierzero.cli.trainer import Trainer, seed_everything, state_options
from tierzero.hardware.drives import existing_parent

SHORTEST = 0.3  # seconds that a sample measures, at least
MOST_STEPS = 20  # of a sample
_NAME = ".tierzero-tune-"


class Trial:
    """An offloaded model with its loop. `largest` is the depth beyond which nothing more fits the device budget."""

    def __init__(self, config: Config) -> None:
        """Builds, fills and trains two steps, which learn the order of use. Raises as `tierzero train` does."""
        self.config = config
        self.reports: dict[int, list[StepReport]] = {}  # by depth
        task = open_task(config)
        model = task.build()
        tiers = choose_tiers(config, model)
        pieces = config.train.micro_batches
        plan = tz.plan(model, tiers, snapshots=False, micro_batches=pieces, **state_options(config))
        check_disk(config, plan, exports=False)
        self.rate = drive_rate(tiers)
        self.model = tz.offload(model, tiers, micro_batches=pieces)
        self.engine = engine_of(self.model)
        try:
            seed_everything(config.train.seed)
            task.fill(self.model)
            self.trainer = Trainer(config, task, self.model, QuietView())
            self.meter = Meter(tz.stats(self.model))
            self.largest = largest_depth(
                [unit.layout.flat_bytes for unit in self.engine.units], self.engine.pager.residency.ahead.budget
            )
            self.depth: int | None = None
            self._steps(2)
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                self.close()
            raise

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.config.train.accumulate * self.config.data.batch * self.config.data.sequence

    def measure(self, depth: int, limit: float) -> float:
        """Seconds of a step at a depth, the median of a few; a first one above `limit` is the only one."""
        if self.depth != depth:
            self.engine.pager.look_ahead(depth)
            self.depth = depth
            self._steps(1)  # what was fetched ahead before does not count
        reports = self._steps(1)
        while reports[0].step_s <= limit and len(reports) < MOST_STEPS:
            if len(reports) > 1 and sum(report.step_s for report in reports) >= SHORTEST:
                break
            reports += self._steps(1)
        self.reports.setdefault(depth, []).extend(reports)
        return statistics.median(report.step_s for report in reports)

    def _steps(self, count: int) -> list[StepReport]:
        return [self.trainer.one_step(self.meter) for _ in range(count)]

    def close(self) -> None:
        tz.close(self.model)
        gc.collect()  # the next trial needs the memory


@contextmanager
def opened(config: Config) -> Iterator[Trial]:
    """A trial of `config` in directories of its own beside its stores; afterwards they are gone, whatever happens."""
    with ExitStack() as stack:
        stores = []
        for store in config.stores:
            where = beside(store)
            try:
                made = tempfile.mkdtemp(prefix=f"{_NAME}{os.getpid()}-", dir=where)
            except OSError as error:
                raise OSError(
                    error.errno, f"cannot make a directory to measure in: {error.strerror}", str(where)
                ) from None
            stack.callback(shutil.rmtree, made, ignore_errors=True)
            stores.append(Path(made) / "store")
        out = stores[0].parent / "out"  # what a task keeps beside a run
        tiers = config.tiers.model_copy(update={"nvme": stores, "prefetch": "auto"})
        trial = Trial(config.model_copy(update={"tiers": tiers, "train": config.train.model_copy(update={"out": out})}))
        try:
            yield trial
        finally:
            trial.close()


def beside(store: Path) -> Path:
    """A directory on the drive of `store` that is not in it if that can be: it may hold a run."""
    here = Path(existing_parent(store))
    if here != Path(os.path.abspath(store)):
        return here
    parent = here.resolve().parent
    return parent if os.stat(parent).st_dev == os.stat(here).st_dev and os.access(parent, os.W_OK) else here


def largest_depth(sizes: Sequence[int], budget: int) -> int:
    """How many of the smallest units fit beside the one in use, at most all others; sizes and budget are bytes."""
    total = count = 0
    for size in sorted(sizes):
        total += size
        if total > budget:
            break
        count += 1
    return max(1, count - 1)


def drive_rate(tiers: tz.Tiers) -> float | None:
    """Bytes per second of all drives together, reads and writes mixed: as measured, below the limit; None: unknown."""
    from tierzero.hardware.tuning import measured

    limit = tiers.drive_limit()
    rates: list[float | None] = []
    for profile in measured(tiers.directories()):
        known = [rate for rate in (profile.mixed if profile else 0, limit) if rate]
        rates.append(min(known) if known else None)
    return sum(rate for rate in rates if rate) if rates and None not in rates else None
