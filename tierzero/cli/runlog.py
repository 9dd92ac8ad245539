"""What a run leaves behind for people and programs: metrics.jsonl, TensorBoard events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from tierzero.cli.files import write_atomically
from tierzero.errors import naming

_STEPS = 1 << 53  # more than any run has


class Events(Protocol):
    """The part of a TensorBoard writer that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...

    def close(self) -> None: ...


class RunLog:
    """Appends a line of metrics.jsonl per step, flushed at once, and the same figures as TensorBoard events.

    Opened at `after` steps it first drops the lines of later steps (and a torn last line), so each step has one line.
    """

    def __init__(self, out: Path, after: int = 0) -> None:
        self.path = out / "metrics.jsonl"
        kept = [line for line in read_metrics(self.path) if line["step"] <= after]
        self.first: dict[str, Any] | None = kept[0] if kept else None
        self.last: dict[str, Any] | None = kept[-1] if kept else None
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self.events = _events(out / "tensorboard", after)

    def write(self, line: dict[str, Any]) -> None:
        """`line` has "step" and JSON values; numbers (also one level down) become TensorBoard scalars."""
        with naming(self.path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        self.first = self.first or line
        self.last = line
        if self.events is not None:
            for tag, value in _scalars(line):
                self.events.add_scalar(tag, value, line["step"])

    def close(self) -> None:
        self._file.close()
        if self.events is not None:
            self.events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; none where there is no file."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue  # cut off by a crash, or not ours
            if isinstance(line, dict) and type(step := line.get("step")) is int and 0 <= step < _STEPS:
                lines.append(line)
    return lines


def _scalars(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{inner}", number) for inner, number in value.items())
        elif key != "step" and value is not None:
            yield f"train/{key}", value


def _events(folder: Path, after: int) -> Events | None:
    """A TensorBoard writer; None without tensorboardX."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    writer: Events = SummaryWriter(str(folder), purge_step=after + 1 if after else None)
    return writer
