"""The options of `tierzero bench nvme`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def nvme(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="A directory on each drive.", show_default=False)
    ],
    size: Annotated[str, typer.Option("--size", help="Of the file to measure on.")] = "4GiB",
    seconds: Annotated[float, typer.Option("--seconds", help="How long to measure, in all.")] = 48.0,
    compare_fio: Annotated[
        bool, typer.Option("--compare-fio", help="Run fio in turns with the engine and print the ratios.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the drive under each PATH and keep the result.

    Reads, writes and both at once, through every engine that works there, over a grid of block size and depth; then
    how long the best setting's rates hold. It is stored as the drive's profile, which `offload` and `plan` use. Several
    paths are measured alone and then together, striped.

    The file it writes is new and nameless: nothing of yours is touched, and nothing is left behind.
    """
    from tierzero.cli.bench import nvme as run

    run(paths, size, seconds, compare_fio=compare_fio, as_json=as_json)
