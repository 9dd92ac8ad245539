"""What a run goes on from: the snapshot in its store, one of its portable checkpoints, or one from elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierzero.checkpoint.reader import Reader
from tierzero.cli import portable
from tierzero.cli.checkpoints import check_same_model
from tierzero.cli.config import Config
from tierzero.cli.portable import Damaged, Portable, check_folder, found_in, of_run
from tierzero.cli.rundir import (
    FILES,
    FOLDERS,
    check_new,
    check_overwrite,
    check_store,
    foreign,
    holds_run,
    owner_in,
    store_exists,
)
from tierzero.cli.runid import id_in, same_place
from tierzero.errors import ConfigError, StoreCorruptError, TierzeroError
from tierzero.storage import members
from tierzero.storage.manifest import Manifest, Snapshot


@dataclass(frozen=True)
class Wanted:
    """What was asked for: go on from the newest (`resume`) or the checkpoint `source`; `overwrite` what is there."""

    resume: bool = False
    source: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Origin:
    """`meta`: what was saved beside the tensors. `checkpoint`: None for the snapshot in the store. `anew`: the run's
    directory holds none of this run, so that it becomes a run of its own. `newest`: the greatest `saves` that is seen.
    `skipped`: a sentence about each later checkpoint that is damaged, and so passed over.
    """

    meta: dict[str, Any]
    checkpoint: Portable | None = None
    anew: bool = False
    newest: int = 0
    skipped: list[str] = field(default_factory=list)

    def verify(self) -> None:
        """Compare the checkpoint with its checksums, before anything is given up for it. StoreCorruptError names the
        file, the tensor and what to do.
        """
        if self.checkpoint is None:
            return
        path = self.checkpoint.path
        try:
            with Reader(path) as reader:
                for _ in reader.verify():
                    pass
        except StoreCorruptError as error:
            raise StoreCorruptError(
                f"{error}. Go on from another one by --resume-from PATH (`tierzero ckpt ls {path.parent}` lists them), "
                f"or from the one before by --resume after `tierzero ckpt rm {path}`"
            ) from None


def find_origin(config: Config, wanted: Wanted) -> Origin | None:
    """What to go on from, None for a run that starts. Touches nothing.

    ConfigError when the run would mix with another, has nothing to go on from, or is of another model. StoreError where
    a part of a store is not there: it may only be that a drive is not mounted.
    """
    if wanted.source is not None:
        return _given(config, wanted.source, wanted.overwrite)
    if wanted.overwrite:
        check_overwrite(config)
        return None
    if wanted.resume:
        return _newest(config)
    check_new(config)
    return None


def _newest(config: Config) -> Origin:
    """The last thing that the run in train.out has saved."""
    out, store = config.train.out, config.store
    try:
        _, found = members.arrange([os.path.abspath(one) for one in config.stores])
    except TierzeroError as error:
        raise with_advice(error, config) from None
    if not holds_run(config):
        others, lost = found_in(config.checkpoint_folder)
        more = f", or go on from {others[-1].path} by --resume-from" if others else _problems(lost)
        raise ConfigError(f"there is nothing to resume in {out}: leave --resume out to start a run there{more}")
    snapshot = found.latest if found is not None else None
    if snapshot is not None:
        _check_own(config, found, snapshot)
    run = snapshot.meta["run"] if snapshot is not None else id_in(out)
    there, lost = of_run(config.checkpoint_folder, run, out)
    saves = snapshot.meta["saves"] if snapshot is not None else -1
    newest = max([saves, *(one.saves for one in there)])
    if there and there[-1].saves > saves:
        last = there[-1]
        origin = Origin(last.meta, last, newest=newest, skipped=_passed_over(lost, last.step, last.path))
    elif snapshot is not None:
        passed = _passed_over(lost, snapshot.meta["step"], f"snapshot in {store}")
        origin = Origin(snapshot.meta, newest=newest, skipped=passed)
    else:
        raise ConfigError(
            f"there is nothing to resume: the run in {out} has no snapshot in {store} and no whole checkpoint in "
            f"{config.checkpoint_folder}{_problems(lost)}. Start it again with --overwrite, or go on from a checkpoint "
            "elsewhere by --resume-from"
        )
    where = store if origin.checkpoint is None else origin.checkpoint.path
    check_same_model(origin.meta["model"], config, where, moved=origin.checkpoint is not None)
    check_folder(config, run, origin.meta["step"])
    return origin


def _passed_over(lost: list[Damaged], step: int, older: object) -> list[str]:
    """A sentence about each damaged checkpoint after `step`, at which `older` is gone on from instead."""
    found = []
    for one in lost:
        if one.step is None or one.step > step:
            said = f"{one.path} is damaged and passed over, going on from the older {older}, after step {step}: "
            said += one.problem
            if one.run is None:  # no save replaces what may be somebody else's
                said += ". Move it away, so that the run can save under that name again"
            found.append(said)
    return found


def _problems(lost: list[Damaged]) -> str:
    """What is wrong with damaged checkpoints, as the end of a sentence."""
    return "".join(f". {one.problem}" for one in lost)


def _check_own(config: Config, found: Manifest | None, snapshot: Snapshot) -> None:
    """ConfigError for a snapshot in the store that is not of the run in train.out."""
    out, store, meta = config.train.out, config.store, snapshot.meta
    if foreign(found) is not None:
        raise ConfigError(
            f"the snapshot {snapshot.name!r} in {store} was not made by tierzero train: it cannot go on with it"
        )
    here, owner = id_in(out), owner_in(found)
    elsewhere = owner is not None and not same_place(owner, out)
    if here != meta["run"] and (here is not None or elsewhere):
        raise ConfigError(
            f"the checkpoint in {store} (step {meta['step']}) is of the run in {meta['out']}"
            + (
                f", and not of the one in {out}: name the store of this run with --set tiers.nvme=DIR, or "
                if here
                else ": "
            )
            + f"go on with that run by --set train.out={meta['out']}"
        )


def _given(config: Config, source: Path, overwrite: bool) -> Origin:
    """The checkpoint `source`, into train.out and stores that hold nothing that would be lost, or with `overwrite`."""
    out = config.train.out
    given = portable.read(source)
    check_same_model(given.meta["model"], config, source, moved=True)
    here = id_in(out)
    mine = here is not None and here == given.meta["run"]
    if not mine and any((out / name).exists() for name in FILES):
        if not overwrite:
            raise ConfigError(
                f"{out} holds a run that {source} is not of: name another directory with --set train.out=DIR, or "
                "remove that run by --overwrite"
            )
        check_overwrite(config)
        _check_stays(config, source)
    if not overwrite:
        members.arrange([os.path.abspath(one) for one in config.stores])  # one that cannot be told is not given up
    newest = given.saves
    for store in filter(store_exists, config.stores):
        latest = check_store(config, store)
        if latest is None or (mine and latest.meta["saves"] <= given.saves):
            continue
        newest = max(newest, latest.meta["saves"])
        if not overwrite:
            raise ConfigError(
                f"{store} holds the snapshot of step {latest.meta['step']} of the run in {latest.meta['out']}, and "
                f"going on from {source} (step {given.step}) gives it up: do so by --overwrite, go on from it by "
                "--resume, or name other directories with --set train.out=DIR and --set tiers.nvme=DIR"
            )
    there = of_run(config.checkpoint_folder, given.meta["run"], out)[0] if mine else []
    check_folder(config, here, given.step)
    return Origin(given.meta, given, anew=not mine, newest=max([newest, *(one.saves for one in there)]))


def _check_stays(config: Config, source: Path) -> None:
    """ConfigError if --overwrite would remove `source` with the run that it is in the way of."""
    inside = [config.train.out / name for name in FOLDERS[1:]]
    for folder in inside:
        if folder.resolve() in source.resolve().parents:
            raise ConfigError(f"{source} is in {folder}, which --overwrite removes: move it away first")


def with_advice(error: TierzeroError, config: Config) -> TierzeroError:
    """An error about the store, which also says from which portable checkpoint the run could go on."""
    run = id_in(config.train.out)
    there = of_run(config.checkpoint_folder, run, config.train.out)[0] if run is not None else []
    if not there or not isinstance(error, StoreCorruptError):  # a drive that is not mounted will be
        return error
    return StoreCorruptError(
        f"{error}. Or give the store up and go on after step {there[-1].step} by --overwrite --resume-from "
        f"{there[-1].path}"
    )
