"""`tierzero ckpt`: list, show, verify, export and remove checkpoints, without a model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from tierzero.checkpoint.export import export_tensors
from tierzero.cli.ckpt_entry import BEING_WRITTEN, Entry
from tierzero.cli.ckpt_find import find, find_one
from tierzero.errors import ConfigError
from tierzero.sizes import format_size


def ls(path: Path, *, as_json: bool) -> None:
    """All checkpoints at `path`."""
    found = find(path)
    if as_json:
        print(json.dumps([_summary(entry) for entry in found], indent=1))
        return
    table = _table("name", "kind", "step", "date", "size", "tensors", "state")
    for entry in found:
        used = entry.state != BEING_WRITTEN and entry.user()
        state = f"{entry.state}, in use" if used else entry.state
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created))
        step = "-" if entry.step is None else str(entry.step)
        kind = f"snapshot in {entry.path}" if entry.kind == "snapshot" else entry.kind
        table.add_row(entry.name, kind, step, when, format_size(entry.nbytes), str(entry.count or "-"), state)
    _console().print(table)


def show(path: Path, name: str | None, *, as_json: bool) -> None:
    """One checkpoint: what it says of itself, the user's values, parameter groups, tensors."""
    entry = find_one(path, name)
    entry.check_whole()
    groups, tensors = entry.groups(), list(entry.tensors())
    if as_json:
        rest = {"facts": entry.facts, "groups": groups, "tensors": [asdict(one) for one in tensors]}
        print(json.dumps({**_summary(entry), "meta": entry.meta, **rest}, indent=1, default=str))
        return
    print(f"{entry.kind} {entry.name} in {entry.path}, {format_size(entry.nbytes)}, {entry.state}")
    for key, value in {**entry.facts, **entry.meta}.items():
        text = json.dumps(value, default=str)
        print(f"  {key}: {text if len(text) <= 200 else text[:200] + '...'}")
    for number, group in enumerate(groups):
        print(f"  group {number}: " + ", ".join(f"{key} {value}" for key, value in group.items()))
    table = _table("tensor", "dtype", "shape", "size", "file")
    for one in tensors:
        shape = " x ".join(map(str, one.shape)) or "scalar"
        table.add_row(one.name, one.dtype, shape, format_size(one.nbytes), one.file)
    _console().print(table)


def verify(path: Path, name: str | None) -> None:
    """Every byte against its checksum, of one checkpoint. StoreCorruptError names the file and the tensor."""
    entry = find_one(path, name)
    started, count, nbytes = time.monotonic(), 0, 0
    with _progress(f"verifying {entry.name}", entry.nbytes) as advance:
        for _, done in entry.verify():
            count, nbytes = count + 1, nbytes + done
            advance(done)
    seconds = max(time.monotonic() - started, 1e-9)
    print(
        f"{entry.name} in {entry.path} is whole: {count} parts, {format_size(nbytes)}, all as they were written "
        f"({format_size(int(nbytes / seconds))}/s)"
    )


def export(path: Path, out: Path, name: str | None, *, max_shard: str, tied: str, overwrite: bool) -> None:
    """The weights of one checkpoint as safetensors, one tensor in memory at a time."""
    entry = find_one(path, name)
    if tied not in ("list", "copy"):
        raise ConfigError(f'--tied {tied}: use "list" or "copy"')
    weights = entry.weights()
    try:
        export_tensors(weights, out, max_shard=max_shard, tied=tied, overwrite=overwrite)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(f"exported {len(weights)} tensors of {entry.name} to {out}")


def rm(path: Path, name: str | None, *, yes: bool) -> None:
    """Remove one checkpoint, after a question unless `yes`."""
    entry = find_one(path, name, latest=False)
    entry.check_unused()
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{entry.name} in {entry.path} is not removed: there is no terminal to ask on. Pass --yes to do it"
            )
        typer.confirm(
            f"Remove the {entry.kind} {entry.name} in {entry.path} ({format_size(entry.nbytes)})?", abort=True
        )
    entry.remove()
    print(f"removed {entry.name}, {format_size(entry.nbytes)}")


def _summary(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "path": str(entry.path),
        "step": entry.step,
        "created": entry.created,
        "bytes": entry.nbytes,
        "tensors": entry.count,
        "state": entry.state,
        "problem": entry.problem,
        "in_use": entry.user(),
    }


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column in ("step", "size", "tensors")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def _console() -> Console:
    """Wraps nothing where it is no terminal that prints."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)


@contextmanager
def _progress(what: str, nbytes: int) -> Iterator[Any]:
    """A bar on the terminal, if there is one, that is told of bytes."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda done: bar.advance(task, done)
