"""What a run left behind, read leniently: a run that goes on or was cut short has a report too."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tierzero.cli.runlog import read_metrics
from tierzero.errors import ConfigError


def number(value: Any, *keys: str) -> float:
    """The number under `keys` of nested dicts, NaN where there is none that a float can hold."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer that no float holds
        return math.nan


def median(values: list[float]) -> float:
    """Of those that are finite; NaN if none is."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


@dataclass(frozen=True)
class Run:
    """`lines` of metrics.jsonl, one a step in order, at least one; `about` is run.json, `summary` summary.json,
    `events` those of trace.json; empty where there is no such file.
    """

    directory: Path
    lines: list[dict[str, Any]]
    about: dict[str, Any]
    summary: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def title(self) -> str:
        return f"Run {self.directory.absolute().name}"

    @property
    def last_step(self) -> int:
        return int(self.lines[-1]["step"])

    @property
    def total_steps(self) -> int:
        planned = number(self.about, "steps")
        return max(self.last_step, int(planned)) if math.isfinite(planned) else self.last_step

    @cached_property
    def steps(self) -> list[float]:
        return [float(line["step"]) for line in self.lines]

    @cached_property
    def settled(self) -> list[dict[str, Any]]:
        """Without the first two steps, which learn the order of use, unless there are no others."""
        return [line for line in self.lines if line["step"] > 2] or self.lines

    def of(self, *keys: str) -> list[float]:
        """A number of each step."""
        return [number(line, *keys) for line in self.lines]

    def usual(self, *keys: str) -> float:
        """The median of a number over the settled steps."""
        return median([number(line, *keys) for line in self.settled])


def load_run(directory: Path) -> Run:
    """ConfigError where `directory` holds no run that has done a step."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: give the one that train.out of a run named")
    log = directory / "metrics.jsonl"
    if not log.is_file():
        raise ConfigError(
            f"{directory} holds no run of tierzero train, there is no metrics.jsonl in it: give the directory that "
            "train.out named"
        )
    lines = {line["step"]: line for line in read_metrics(log)}
    if not lines:
        raise ConfigError(f"the run in {directory} has not finished a step yet: there is nothing to report")
    events = _json(directory / "trace.json").get("traceEvents")
    return Run(
        directory,
        [lines[step] for step in sorted(lines)],
        _json(directory / "run.json"),
        _json(directory / "summary.json"),
        [event for event in events if isinstance(event, dict)] if isinstance(events, list) else [],
    )


def _json(path: Path) -> dict[str, Any]:
    """What is in the file; nothing where it is not there, not JSON, or not an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
