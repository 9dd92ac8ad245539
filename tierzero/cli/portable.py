"""Portable checkpoints of runs, as they are found on a drive: which there are, whose they are, how far they got."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierzero.checkpoint.index import INDEX, read_head, read_index
from tierzero.checkpoint.place import checkpoints_in, unreadable_in, written_beside
from tierzero.cli.config import Config
from tierzero.cli.runid import owner_of, same_place
from tierzero.errors import ConfigError, TierzeroError, describe
from tierzero.storage.manifest import NAME

# what a run keeps with everything that it saves
MARKS = {
    "model": dict,
    "step": int,
    "scheduler": dict,
    "settings": dict,
    "text": str,
    "run": str,
    "out": str,
    "saves": int,
}
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Portable:
    """A checkpoint that a run has saved. `nbytes`: of its files."""

    path: Path
    meta: dict[str, Any]
    nbytes: int

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.meta["step"])

    @property
    def saves(self) -> int:
        """Orders what one run has saved, see Trainer."""
        return int(self.meta["saves"])


@dataclass(frozen=True)
class Damaged:
    """One that cannot be gone on from: `problem` says why. `run`: the id of its run, None where that cannot be told."""

    path: Path
    run: str | None
    problem: str

    @property
    def step(self) -> int | None:
        """Steps done, as far as its name tells."""
        match = _NAME.fullmatch(self.path.name)
        return int(match[1]) if match is not None else None


def made_by_train(meta: dict[str, Any]) -> bool:
    """Whether these are values that a run keeps with what it saves."""
    return all(isinstance(meta.get(key), kind) for key, kind in MARKS.items())


def read(path: Path) -> Portable:
    """The checkpoint in the directory `path`. ConfigError for what is none, or none of a run's; StoreCorruptError that
    names the file that is damaged.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is {'a file' if path.exists() else 'not there'}: name the directory of a checkpoint")
    if read_head(path) is None and not (path / INDEX).is_file():
        raise ConfigError(f"{path} is no checkpoint{_what_instead(path)}")
    index = read_index(path)
    if not made_by_train(index.meta):
        raise ConfigError(
            f"{path} was not saved by tierzero train, so it does not say where in the data to go on: load it with "
            "tierzero.load in a loop of your own, or its weights (`tierzero ckpt export`) with model.path"
        )
    return Portable(path, index.meta, sum(index.files.values()))


def _what_instead(path: Path) -> str:
    """What to name instead of a directory that is no checkpoint, as the end of a sentence."""
    if written_beside(path) is not None:
        return f" but what a save has left that was cut short, or goes on: name a whole one in {path.parent}"
    folders = [folder for folder in (path, path / "checkpoints") if folder.is_dir()]
    inside = [str(one.relative_to(path)) for folder in folders for _, one in checkpoints_in(folder)]
    if inside:
        return f", but contains some: name one of {', '.join(inside[-4:])} (the last is the youngest)"
    if (path / NAME).is_file():
        return " but a store, and a snapshot cannot leave its store: go on with the run that it is of by --resume"
    return ": `tierzero ckpt ls` shows where some are"


def found_in(folder: Path) -> tuple[list[Portable], list[Damaged]]:
    """The checkpoints of runs in this directory, in the order in which they were saved; and those that are damaged."""
    there: list[Portable] = []
    damaged: list[Damaged] = []
    if not folder.is_dir():
        return there, damaged
    for _, path in checkpoints_in(folder):
        try:
            there.append(read(path))
        except ConfigError:
            continue  # of another program
        except (OSError, TierzeroError) as error:
            run = (read_head(path) or {}).get("run")
            damaged.append(Damaged(path, run if isinstance(run, str) else None, describe(error)))
    by_name = [path for path in unreadable_in(folder) if _NAME.fullmatch(path.name)]
    return there, damaged + [Damaged(path, None, _why_unreadable(path)) for path in by_name]


def _why_unreadable(path: Path) -> str:
    try:
        read_index(path)
    except (OSError, TierzeroError) as error:
        return describe(error)
    return f"{path / INDEX} could not be read before, and can be now: run the command again"


def of_run(folder: Path, run: str | None, out: Path) -> tuple[list[Portable], list[Damaged]]:
    """Those of the run with this id in the directory `out`, or moved to there, the last saved one last; and the damaged
    ones that are its, or may be, by the steps in their names.
    """
    there, damaged = found_in(folder)
    mine = [one for one in there if is_of(one, run, out)]
    lost = [one for one in damaged if one.run in (run, None)]
    return sorted(mine, key=lambda one: one.saves), sorted(lost, key=lambda one: one.step or 0)


def is_of(one: Portable, run: str | None, out: Path) -> bool:
    """Whether it belongs to the run with this id in `out`, rather than to a copy of that run elsewhere."""
    owner = owner_of(one.meta)
    inside = out.resolve() in one.path.resolve().parents
    return one.meta["run"] == run and (inside or owner is None or same_place(owner, out))


def check_folder(config: Config, run: str | None, step: int) -> None:
    """ConfigError where a run with the id `run` that goes on after `step` steps would come upon checkpoints of others,
    whose names it needs.
    """
    folder = config.checkpoint_folder
    if config.checkpoint.every is None:
        return
    for one in found_in(folder)[0]:
        match = _NAME.fullmatch(one.path.name)
        if match is not None and int(match[1]) > step and not is_of(one, run, config.train.out):
            raise ConfigError(
                f"{one.path} is a checkpoint of the run in {one.meta['out']}, and this run would come to the same "
                "name: name another directory with --set checkpoint.path=DIR"
            )
