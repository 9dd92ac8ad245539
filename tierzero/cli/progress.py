"""What a person sees while a run goes on: a live line on a terminal, a plain line every few steps elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tierzero.cli.report import StepReport


class View(Protocol):
    """Where a run tells what it is doing."""

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def phase(self, text: str) -> None:
        """A part of the run that takes a while begins."""
        ...

    def running(self, done: int, total: int) -> AbstractContextManager[None]:
        """The context in which steps are shown, after `done` of `total` steps."""
        ...

    def warn(self, text: str) -> None:
        """Something went wrong, and the run goes on."""
        ...

    def step(self, report: StepReport, also: str = "") -> None:
        """A step is done; `also`: what else goes on."""
        ...


def warn(text: str) -> None:
    """A line on stderr, which is also for those who asked for quiet."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def describe(report: StepReport, also: str = "") -> str:
    """Norms, speed, GB/s per link and what the step waited for, and what else goes on."""
    rate = report.rates()
    waited = ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in report.stalls.items() if seconds >= 0.005)
    return (
        f"norm {report.grad_norm:.3f} -> {report.grad_norm_clipped:.3f}  {report.tokens_per_s:,.0f} tok/s  "
        f"GB/s: NVMe read {rate['nvme_read']:.2f} write {rate['nvme_written']:.2f} "
        f"H2D {rate['h2d']:.2f} D2H {rate['d2h']:.2f}  waited: {waited or 'nothing'}" + (f"  {also}" if also else "")
    )


class PlainView:
    """One line every `every` steps, the first and the last one included."""

    def __init__(self, console: Console, every: int) -> None:
        self.console = console
        self.every = every
        self.total = 0
        self.first = True

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    phase = say

    def warn(self, text: str) -> None:
        warn(text)

    @contextmanager
    def running(self, done: int, total: int) -> Iterator[None]:
        self.total = total
        yield

    def step(self, report: StepReport, also: str = "") -> None:
        if self.first or report.step % self.every == 0 or report.step == self.total:
            self.say(f"step {report.step}/{self.total}  loss {report.loss:.4f}  {describe(report, also)}")
        self.first = False


class LiveView:
    """A bar with step, loss and times left, and under it the rest of the last step."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[loss]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def phase(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=True)

    def warn(self, text: str) -> None:
        warn(text)

    @contextmanager
    def running(self, done: int, total: int) -> Iterator[None]:
        self._task = self._bar.add_task("", total=total, completed=done, loss="")
        with Live(self._bar, console=self.console, refresh_per_second=4) as self._live:
            yield
        self._live = None

    def step(self, report: StepReport, also: str = "") -> None:
        self._bar.update(self._task, completed=report.step, loss=f"loss {report.loss:.4f}")
        if self._live is not None:
            self._live.update(Group(self._bar, Text(describe(report, also), style="cyan")))


class QuietView:
    """Says nothing but what went wrong."""

    def say(self, text: str) -> None:
        pass

    phase = say

    def warn(self, text: str) -> None:
        warn(text)

    @contextmanager
    def running(self, done: int, total: int) -> Iterator[None]:
        yield

    def step(self, report: StepReport, also: str = "") -> None:
        pass


def choose_view(console: Console, quiet: bool, every: int) -> View:
    """The view that fits the output."""
    if quiet:
        return QuietView()
    return LiveView(console) if console.is_terminal else PlainView(console, every)


@contextmanager
def share_done() -> Iterator[Callable[[str, float], None]]:
    """A function that shows a phase and the share done, on stderr where that is a terminal."""
    console = Console(stderr=True)
    columns = (
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    # drawn by hand between phases: a thread that draws would be counted as the engine's CPU time
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=1.0)

        def show(what: str, done: float) -> None:
            bar.update(task, completed=done, description=what)
            bar.refresh()

        yield show
