"""`tierzero bench`: measuring what the machine can do."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import typer
from rich.console import Console

from tierzero.cli.progress import share_done
from tierzero.cli.stopping import Stopped, signals_stop
from tierzero.doctor.child import Child
from tierzero.errors import ConfigError
from tierzero.sizes import parse_size

LEAST_SECONDS = 2.0
SILENCE = 15.0  # seconds that the first small file on a drive may take


def nvme(paths: list[Path], size: str, seconds: float, *, compare_fio: bool, as_json: bool) -> None:
    """Measure and print. ConfigError for arguments that cannot be, typer.Exit(128 + n) when signal n came."""
    try:
        with signals_stop():
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

    with share_done() as progress:
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
