"""`tierzero bench`: measuring what the machine can do."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tierzero.doctor.child import Child
from tierzero.errors import ConfigError
from tierzero.sizes import parse_size

LEAST_SECONDS = 2.0
SILENCE = 15.0  # seconds that the first small file on a drive may take


class Stopped(BaseException):
    """A signal asked to end; not an Exception, so that nothing on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        self.number = number


def nvme(paths: list[Path], size: str, seconds: float, *, compare_fio: bool, as_json: bool) -> None:
    """Measure and print. ConfigError for arguments that cannot be, typer.Exit(128 + n) when signal n came."""
    try:
        with _signals():
            _nvme(paths, size, seconds, compare_fio=compare_fio, as_json=as_json)
    except Stopped as stopped:
        print("stopped; nothing was left behind and no profile was stored", file=sys.stderr)
        raise typer.Exit(128 + stopped.number) from None


def _nvme(paths: list[Path], size: str, seconds: float, *, compare_fio: bool, as_json: bool) -> None:
    from tierzero.bench.scratch import MINIMUM, UNIT

    try:
        nbytes = parse_size(size, what="--size") // UNIT * UNIT
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if nbytes < MINIMUM:
        raise ConfigError(f"--size {size} is too small to measure a drive: give at least {MINIMUM >> 20}MiB")
    if not LEAST_SECONDS <= seconds <= 86400:
        raise ConfigError(f"--seconds {seconds:g}: give {LEAST_SECONDS:g} or more, up to a day's 86400")
    if nbytes // len(paths) < MINIMUM:
        raise ConfigError(
            f"--size {size} over {len(paths)} paths is too little: give at least {len(paths) * MINIMUM >> 20}MiB"
        )
    for path in paths:
        _check_answers(path)
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ConfigError("the same directory is given twice: give each drive's once")
    from tierzero.bench.nvme import measure
    from tierzero.bench.show import show

    with _progress() as progress:
        report = measure(paths, nbytes, seconds=seconds, compare=compare_fio, progress=progress)
    if as_json:
        for note in report.notes:
            print(f"note: {note}", file=sys.stderr)
        print(json.dumps(report.as_json()))
    else:
        show(Console(), report)


def _check_answers(path: Path) -> None:
    """OSError where the file system lets a first small file wait: this process must not hang with it."""
    with Child("tierzero.bench.scratch:answer", str(path)) as child:
        ended = child.listen(SILENCE).ended
    if "did not answer" in ended:
        raise OSError(
            errno.ETIMEDOUT,
            f"the file system did not answer within {SILENCE:.0f} s: it is frozen, its server is away or the drive is "
            "failing. See dmesg, or give another directory",
            str(path),
        )


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped, once; a second one acts as it always does. Ignored ones stay so."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {}

    def stop(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_DFL)
        raise Stopped(number)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator:
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
