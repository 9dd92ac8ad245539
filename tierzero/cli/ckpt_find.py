"""Which checkpoints a path means: a checkpoint itself, a store, the directory of a run, or one with any of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierzero.checkpoint import place
from tierzero.checkpoint.index import INDEX
from tierzero.cli.ckpt_entry import COMPLETE, Entry, Unreadable
from tierzero.cli.ckpt_portable import Portable
from tierzero.cli.ckpt_snapshot import snapshots_in
from tierzero.errors import ConfigError, TierzeroError, describe
from tierzero.storage import manifest as manifests
from tierzero.storage import members

_DEPTH = 3  # how far below a path to look: runs/demo/checkpoints/step-00000020 is a checkpoint in `runs`


def find(path: Path) -> list[Entry]:
    """The checkpoints at `path`, oldest first. ConfigError for a path that is no directory, or holds none."""
    if not path.is_dir():
        raise ConfigError(f"{path} is {'a file' if path.exists() else 'not there'}: name the directory of a checkpoint")
    found = list(_below(path, path, _DEPTH))
    for note in _notes(path):
        if isinstance(note.get("store"), str) and os.path.isdir(note["store"]):
            found += _readable(Path(note["store"]), path)
        found += _checkpoints_of(note)
    # a store may be met in several of its directories, a checkpoint on both ways
    seen: dict[Any, Entry] = {}
    for entry in found:
        seen.setdefault((entry.path.resolve(), entry.kind, entry.name if entry.kind == "snapshot" else ""), entry)
    found = list(seen.values())
    if not found:
        raise ConfigError(
            f"{path} holds no checkpoint: name what tierzero.save wrote, a store with a snapshot, a run's directory, "
            "or a directory that contains some of them"
        )
    return sorted(found, key=lambda entry: (entry.created, int(entry.facts.get("sequence", 0))))


def _below(path: Path, base: Path, depth: int) -> Iterator[Entry]:
    """What `path` is, or else what the directories in it are."""
    here = _readable(path, base)
    yield from here
    if not here and depth:
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.is_symlink() and os.access(child, os.R_OK | os.X_OK):
                yield from _below(child, base, depth - 1)


def _readable(path: Path, base: Path) -> list[Entry]:
    """What `path` itself is; what cannot be read below `base` keeps nobody from seeing the others."""
    try:
        return list(_at(path, base))
    except (OSError, TierzeroError) as error:
        if path == base:
            raise
        return [Unreadable(path, describe(error))] if path.exists() else []


def _at(path: Path, base: Path) -> Iterator[Entry]:
    """What `path` itself is, by its name below `base`."""
    if any(os.path.lexists(path / name) for name in (manifests.NAME, members.NAME)):
        yield from snapshots_in(path)
    elif (path / INDEX).is_file() or place.written_beside(path) is not None:
        entry = Portable(path)
        if base in path.parents and place.written_beside(path) is None:
            entry.name = str(path.relative_to(base))
        yield entry


def _notes(path: Path) -> Iterator[dict[str, Any]]:
    """What `tierzero train` has written into the directories of runs about their checkpoints."""
    below = ("*/" * depth + "checkpoints/*.json" for depth in range(_DEPTH))
    for file in (one for pattern in below for one in sorted(path.glob(pattern))):
        try:
            note = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(note, dict):
            yield note


def _checkpoints_of(note: dict[str, Any]) -> Iterator[Entry]:
    """The portable checkpoints of the run of a note, wherever they lie; and beside them those of which it cannot be
    told whose they are.
    """
    folder, run = note.get("checkpoints"), note.get("run")
    if not isinstance(folder, str) or not isinstance(run, str) or not os.path.isdir(folder):
        return
    own = [one for _, one in place.checkpoints_in(Path(folder), run)]
    for one in (*own, *place.unreadable_in(Path(folder)), *place.unfinished_in(Path(folder))):
        for entry in _readable(one, Path(folder)):
            entry.name = os.path.join(folder, entry.name)
            yield entry


def find_one(path: Path, name: str | None, *, latest: bool = True) -> Entry:
    """The checkpoint called `name`, or the only one, or with `latest` the last one that is whole; of several with that
    name, the only whole one.

    ConfigError if there is none of that name, or it is not clear which one is meant.
    """
    found = find(path)
    named = [entry for entry in found if name is None or entry.name == name]
    if name is not None and len(named) == 1:
        return named[0]
    there = ", ".join(entry.name for entry in found)
    if not named:
        raise ConfigError(f"{path} holds no checkpoint called {name!r}; there are {there}")
    if len(named) == 1:
        return named[0]
    whole = [entry for entry in named if entry.state == COMPLETE]
    if name is not None and (not latest or len(whole) != 1):
        where = ", ".join(str(entry.path) for entry in named)
        raise ConfigError(f"{path} holds several checkpoints called {name!r}: give the directory of one, of {where}")
    if not latest or not whole:
        raise ConfigError(f"{path} holds several checkpoints ({there}): name one with --name, or give its directory")
    return whole[-1]
