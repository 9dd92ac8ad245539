"""The options of `tierzero doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Directories for a store; default: this one.")
    ] = None,
    selftest: Annotated[
        Path | None,
        typer.Option(
            "--selftest", metavar="PATH", help="Also write, read and verify there, through every backend, in 30 s."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with everything.")] = False,
) -> None:
    """Check this machine and the drives under PATHS, with one line of advice for each thing that is not as it should
    be.

    Kernel, io_uring, O_DIRECT, file systems and their mount options, free space, limits, memory, huge pages, processor,
    torch, CUDA, GPUDirect: what was found is really tried, the dangerous parts in child processes. The output is enough
    for a bug report.

    Exits 0 unless training cannot work here (or the self-test finds a backend that fails), then 1.
    """
    from tierzero.cli.doctor import run

    raise typer.Exit(run(paths or [], selftest, as_json=as_json))
