"""The options of `tierzero tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tune(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="The file that `tierzero train` is given.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="As for `train`: over the file, for measuring only."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="NAME",
            help="Also choose `accumulate` (micro-batches, with the same tokens a step), `block` (of the drive's I/O) "
            "or `state_dtype` (of the moments: other numbers than before). Repeatable.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="How long to measure, about, without loading.")] = 120.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it, as .png, .svg or .pdf.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Leave the file as it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the prefetch depth that is fastest for your model on your drive, and write it to CONFIG.toml.

    Trains the model of the configuration for a few steps at a time, in a directory of its own beside the store, with
    the same budgets; a search that drops losers early finds the smallest depth whose step is as fast as the fastest.
    Shows the steps' times, what they waited for, how far the best is from its bound, and what limits it.

    The file keeps its comments; without one the values are only printed. Runs that are there are not touched. Ctrl-C
    leaves the file as it is and nothing on the drive.
    """
    from tierzero.cli.tune import run

    run(
        config,
        settings or [],
        sweeps=list(dict.fromkeys(sweep or [])),
        seconds=seconds,
        plot=plot,
        dry_run=dry_run,
        as_json=as_json,
    )
