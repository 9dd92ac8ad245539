"""`tierzero report`: one self-contained HTML page about a run."""

from __future__ import annotations

import os
from pathlib import Path

from tierzero.cli.files import write_atomically
from tierzero.cli.page.html import page
from tierzero.cli.page.rundata import load_run
from tierzero.cli.page.sections import sections
from tierzero.errors import ConfigError


def write_page(directory: Path, out: Path | None) -> str:
    """Write the page of the run in `directory` to `out` (report.html there by default); what to tell about it.

    ConfigError where there is no run or `out` is no file, OSError where the page cannot be written.
    """
    run = load_run(directory)
    target = out if out is not None else directory / "report.html"
    real = Path(os.path.realpath(target))  # a link stays one
    if os.path.lexists(real) and not real.is_file():
        raise ConfigError(f"{target} is not a file that a page can be written to: name another with --out")
    text = page(run.title, sections(run))
    write_atomically(real, text.encode(errors="backslashreplace").decode())  # a path's bytes may be no text
    return f"wrote {target}: {run.last_step:,} of {run.total_steps:,} steps"
