"""The directory of a run: whether it holds one, and taking it over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tierzero import members
from tierzero.cli.checkpoints import check_same_model
from tierzero.cli.config import Config
from tierzero.cli.runid import id_in
from tierzero.errors import ConfigError, TierzeroError
from tierzero.manifest import Manifest

FILES = ("metrics.jsonl", "summary.json", "sample.txt", "run.json", "trace.json", "report.html")
FOLDERS = ("checkpoints", "tensorboard", "export")
STORE = ("manifest.json", "data.bin", members.NAME)
# what a run keeps with its snapshots
_OURS = {"model": dict, "random": dict, "step": int, "scheduler": dict, "settings": dict, "text": str, "run": str}


def holds_run(config: Config) -> bool:
    """Whether train.out or a store has something of an earlier run in it."""
    return holds_files(config.train.out) or any(map(store_exists, config.stores))


def holds_files(out: Path) -> bool:
    """Whether there are files of a run in this directory."""
    return any((out / name).exists() for name in FILES + FOLDERS)


def store_exists(store: Path) -> bool:
    """Whether there is a tierzero store in this directory."""
    return any(os.path.lexists(store / name) for name in STORE)


def check_rundir(config: Config, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """ConfigError when the run would mix with another, has nothing to go on from, or is of another model.

    Touches nothing. With `resume`: the meta data of the snapshot to go on from. StoreError where a part of a store is
    not there: it may only be that a drive is not mounted.
    """
    out = config.train.out
    if overwrite:
        _check_ours(config)
        return None
    # what lies in the directories comes before any advice to remove it
    _, found = members.arrange([os.path.abspath(store) for store in config.stores])
    if resume:
        return _snapshot_meta(config, found)
    if holds_files(out):
        raise ConfigError(
            f"{out} already holds a run: go on with it by --resume, remove it by --overwrite, "
            "or name another directory with --set train.out=DIR"
        )
    if holds_run(config):
        name = _foreign(found)
        raise ConfigError(
            f"{config.store} already holds a store"
            + (
                f" with the snapshot {name!r}, which was not made by tierzero train: "
                if name is not None
                else " of a run: go on with it by --resume, give it up by --overwrite, or "
            )
            + "name another directory with --set tiers.nvme=DIR"
        )
    return None


def _foreign(found: Manifest | None) -> str | None:
    """The name of the store's latest snapshot if another program made it."""
    latest = found.latest if found is not None else None
    ours = latest is None or all(isinstance(latest.meta.get(key), kind) for key, kind in _OURS.items())
    return None if ours or latest is None else latest.name


def _check_ours(config: Config) -> None:
    """ConfigError where --overwrite would give up what is not a run's, or may not be."""
    for name in FILES:
        if (config.train.out / name).is_dir():
            raise ConfigError(
                f"{config.train.out / name} is a directory, which no run makes: move it away, or name another "
                "directory with --set train.out=DIR"
            )
    for path in (path for name in FOLDERS for path in sorted((config.train.out / name).rglob("*"))):
        if path.name in STORE:
            raise ConfigError(
                f"{path.parent} holds a store, and --overwrite would remove the folder: name another directory with "
                "--set train.out=DIR, or move the store"
            )
    for store in filter(store_exists, config.stores):
        try:
            _, found = members.arrange([os.path.abspath(store)])
        except TierzeroError as error:  # damaged, or a part of a striped one: the run's own may be given up
            if holds_files(config.train.out):
                continue
            raise ConfigError(
                f"{store} holds a store, and whether it is a run's cannot be told ({error}): name another directory "
                "with --set tiers.nvme=DIR, or remove the store yourself"
            ) from None
        snapshot = _foreign(found)
        if snapshot is not None:
            raise ConfigError(
                f"{store} holds the snapshot {snapshot!r}, which was not made by tierzero train, and --overwrite "
                "removes runs only: name another directory with --set tiers.nvme=DIR, or remove the store yourself"
            )
        owner = _owner(found)
        if owner is not None and owner.resolve() != config.train.out.resolve():
            raise ConfigError(
                f"{store} holds the checkpoint of the run in {owner}, which could not go on without it: name another "
                f"directory with --set tiers.nvme=DIR, or give that run up with --set train.out={owner}"
            )


def _owner(found: Manifest | None) -> Path | None:
    """The directory of the run whose checkpoint the store holds, if the run is still there."""
    if found is None or found.latest is None:
        return None
    out = Path(str(found.latest.meta.get("out", "")))
    return out if id_in(out) == found.latest.meta.get("run") is not None else None


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
    if _foreign(found) is not None:
        raise ConfigError(
            f"the snapshot {found.latest.name!r} in {store} was not made by tierzero train: it cannot go on with it"
        )
    here = id_in(out)
    if here is not None and here != meta["run"]:
        raise ConfigError(
            f"the checkpoint in {store} (step {meta['step']}) is of another run, that of {meta['out']}, and not of the "
            f"one in {out}: name the store of this run with --set tiers.nvme=DIR, or that run with --set train.out=DIR"
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
