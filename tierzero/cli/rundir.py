"""The directory of a run: whether it holds one, and taking it over."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from tierzero.checkpoint.place import checkpoints_in, discard, strange
from tierzero.cli.config import Config
from tierzero.cli.portable import check_folder, found_in, is_of, made_by_train
from tierzero.cli.runid import id_in, owner_of, same_place
from tierzero.errors import ConfigError, TierzeroError
from tierzero.storage import members
from tierzero.storage.manifest import Manifest, Snapshot

FILES = ("metrics.jsonl", "summary.json", "sample.txt", "run.json", "trace.json", "report.html")
FOLDERS = ("checkpoints", "tensorboard", "export")
STORE = ("manifest.json", "data.bin", members.NAME)


def holds_run(config: Config) -> bool:
    """Whether train.out or a store has something of an earlier run in it."""
    return holds_files(config.train.out) or any(map(store_exists, config.stores))


def holds_files(out: Path) -> bool:
    """Whether there are files of a run in this directory."""
    return any((out / name).exists() for name in FILES + FOLDERS)


def store_exists(store: Path) -> bool:
    """Whether there is a tierzero store in this directory."""
    return any(os.path.lexists(store / name) for name in STORE)


def check_new(config: Config) -> None:
    """ConfigError when a run that starts would mix with another one. Touches nothing. StoreError where a part of a
    store is not there: it may only be that a drive is not mounted.
    """
    out = config.train.out
    # what lies in the directories comes before any advice to remove it
    _, found = members.arrange([os.path.abspath(store) for store in config.stores])
    if holds_files(out):
        raise ConfigError(
            f"{out} already holds a run: go on with it by --resume, remove it by --overwrite, "
            "or name another directory with --set train.out=DIR"
        )
    if holds_run(config):
        name, owner = foreign(found), owner_in(found)
        if name is not None:
            what = f" with the snapshot {name!r}, which was not made by tierzero train: "
        elif owner is not None:
            what = f" of the run in {owner}: go on with that by --resume and --set train.out={owner}, or "
        else:
            what = " of a run: go on with it by --resume, give it up by --overwrite, or "
        raise ConfigError(
            f"{config.store} already holds a store{what}" + "name another directory with --set tiers.nvme=DIR"
        )
    check_folder(config, None, 0)


def foreign(found: Manifest | None) -> str | None:
    """The name of the store's latest snapshot if another program made it."""
    latest = found.latest if found is not None else None
    if latest is None or (made_by_train(latest.meta) and isinstance(latest.meta.get("random"), dict)):
        return None
    return latest.name


def owner_in(found: Manifest | None) -> Path | None:
    """The directory of the run whose snapshot the store holds, if the run is still there."""
    return None if found is None or found.latest is None else owner_of(found.latest.meta)


def check_overwrite(config: Config) -> None:
    """ConfigError where --overwrite would give up what is not a run's, or may not be. Touches nothing."""
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
        check_store(config, store)
    check_folder(config, id_in(config.train.out), 0)


def check_store(config: Config, store: Path) -> Snapshot | None:
    """The latest snapshot in one directory of NVMe. ConfigError where it may not be given up: it is not a run's, is
    that of a run elsewhere, or cannot be told.
    """
    out = config.train.out
    try:
        _, found = members.arrange([os.path.abspath(store)])
    except TierzeroError as error:  # damaged, or a part of a striped one: the run's own may be given up
        if holds_files(out):
            return None
        raise ConfigError(
            f"{store} holds a store, and whether it is a run's cannot be told ({error}): name another directory "
            "with --set tiers.nvme=DIR, or remove the store yourself"
        ) from None
    snapshot, owner = foreign(found), owner_in(found)
    if snapshot is not None:
        raise ConfigError(
            f"{store} holds the snapshot {snapshot!r}, which was not made by tierzero train, and --overwrite "
            "removes runs only: name another directory with --set tiers.nvme=DIR, or remove the store yourself"
        )
    if owner is not None and not same_place(owner, out):
        raise ConfigError(
            f"{store} holds the checkpoint of the run in {owner}, which could not go on without it: name another "
            f"directory with --set tiers.nvme=DIR, or give that run up with --set train.out={owner}"
        )
    return found.latest if found is not None else None


def clear_rundir(config: Config) -> None:
    """Remove the files of an earlier run from train.out, its portable checkpoints wherever they are, and nothing else;
    the store is the engine's to reclaim.
    """
    out, folder = config.train.out, config.checkpoint_folder
    run = id_in(out)
    others = {one.path for one in found_in(folder)[0] if not is_of(one, run, out)}
    for _, path in checkpoints_in(folder, run) if run is not None and folder.is_dir() else []:
        if path not in others and not strange(path):
            discard(path)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    for name in FOLDERS[1:]:
        shutil.rmtree(out / name, ignore_errors=True)
    for path in (*out.glob("tokens-*"), *out.glob("checkpoints/step-*.json")):
        path.unlink()
    with suppress(OSError):  # not there, or holds checkpoints of others
        (out / FOLDERS[0]).rmdir()


def make_directory(path: Path) -> None:
    """Create a directory with its parents; OSError with a sentence where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot create the directory {path}: {error.strerror}", str(path)) from None
