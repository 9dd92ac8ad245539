"""`tierzero report`: one self-contained HTML page about a run."""

from __future__ import annotations

from pathlib import Path

from tierzero.cli.files import write_atomically
from tierzero.cli.page.html import page
from tierzero.cli.page.rundata import load_run
from tierzero.cli.page.sections import sections


def write_page(directory: Path, out: Path | None) -> str:
    """Write the page of the run in `directory` to `out` (report.html there by default); what to tell about it.

    ConfigError where there is no run, OSError where the page cannot be written.
    """
    run = load_run(directory)
    target = out if out is not None else directory / "report.html"
    write_atomically(target, page(run.title, sections(run)))
    return f"wrote {target}: {run.last_step:,} of {run.total_steps:,} steps"
