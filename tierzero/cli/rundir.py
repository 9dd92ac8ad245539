"""The directory of a run: whether it holds one, and taking it over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tierzero import members
from tierzero.cli.checkpoints import check_same_model
from tierzero.cli.config import Config
from tierzero.errors import ConfigError
from tierzero.manifest import Manifest

FILES = ("metrics.jsonl", "summary.json", "sample.txt")
FOLDERS = ("checkpoints", "tensorboard", "export")


def holds_run(config: Config) -> bool:
    """Whether train.out has something of an earlier run in it."""
    out = config.train.out
    return any((out / name).exists() for name in FILES + FOLDERS) or any(map(store_exists, config.stores))


def store_exists(store: Path) -> bool:
    """Whether there is a tierzero store in this directory."""
    return any(os.path.lexists(store / name) for name in ("manifest.json", "data.bin", members.NAME))


def check_rundir(config: Config, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """ConfigError when the run would mix with another, has nothing to go on from, or is of another model.

    Touches nothing. With `resume`: the meta data of the snapshot to go on from. StoreError where a part of a store is
    not there: it may only be that a drive is not mounted.
    """
    out = config.train.out
    if overwrite:
        return None
    # what lies in the directories comes before any advice to remove it
    _, found = members.arrange([os.path.abspath(store) for store in config.stores])
    if resume:
        return _snapshot_meta(config, found)
    if holds_run(config):
        raise ConfigError(
            f"{out} already holds a run: go on with it by --resume, remove it by --overwrite, "
            "or name another directory with --set train.out=DIR"
        )
    return None


def _snapshot_meta(config: Config, found: Manifest | None) -> dict[str, Any]:
    out, store = config.train.out, config.store
    if not holds_run(config):
        raise ConfigError(f"there is nothing to resume in {out}: leave --resume out to start a run there")
    if found is None or found.latest is None:
        raise ConfigError(
            f"there is nothing to resume: the run in {out} has no checkpoint in {store}. "
            "Start it again with --overwrite"
        )
    meta = found.latest.meta
    if "model" not in meta or "random" not in meta:
        raise ConfigError(
            f"the snapshot {found.latest.name!r} in {store} was not made by tierzero train: it cannot go on with it"
        )
    check_same_model(meta["model"], config)
    return meta


def clear_rundir(config: Config) -> None:
    """Remove the files of an earlier run from train.out, and nothing else; the store is the engine's to reclaim."""
    out = config.train.out
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    for name in FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    for tokens in out.glob("tokens-*"):
        tokens.unlink()


def make_directory(path: Path) -> None:
    """Create a directory with its parents; OSError with a sentence where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot create the directory {path}: {error.strerror}", str(path)) from None
