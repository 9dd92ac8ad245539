"""The options of `tierzero report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="What `train.out` was of a run of `tierzero train`.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page to write. Default: RUN_DIR/report.html.")
    ] = None,
) -> None:
    """Write one HTML page about a run: loss, speed, stalls, a step's timeline, traffic, budgets, wear.

    The page holds everything itself and loads nothing from the network. The run may still be going on, or have been cut
    short.
    """
    from tierzero.cli.page import write_page

    print(write_page(directory, out))
