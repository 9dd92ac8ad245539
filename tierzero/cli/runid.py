"""What a run and its checkpoints know each other by, so that no run goes on from another's."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any


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


def owner_of(meta: dict[str, Any]) -> Path | None:
    """The directory of the run that has saved these values, if that run is still there."""
    out = Path(str(meta.get("out", "")))
    return out if id_in(out) == meta.get("run") is not None else None


def same_place(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same directory."""
    return one.resolve() == other.resolve()
