"""What a run and its checkpoints know each other by, so that no run goes on from another's."""

from __future__ import annotations

import json
import uuid
from pathlib import Path


def new_id() -> str:
    """Of a run that begins."""
    return uuid.uuid4().hex


def id_in(out: Path) -> str | None:
    """Of the run in this directory, from its run.json; None where there is none, or none that can be read."""
    try:
        found = json.loads((out / "run.json").read_text())
    except (OSError, ValueError):
        return None
    known = found.get("id") if isinstance(found, dict) else None
    return known if isinstance(known, str) else None
