"""Portable checkpoints of runs, as they are found on a drive: which there are, whose they are, how far they got."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierzero.checkpoint.index import INDEX, read_head, read_index
from tierzero.checkpoint.place import checkpoints_in, written_beside
from tierzero.cli.config import Config
from tierzero.cli.runid import owner_of, same_place
from tierzero.errors import ConfigError, TierzeroError
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


def found_in(folder: Path) -> tuple[list[Portable], dict[str, list[str]]]:
    """The checkpoints of runs in this directory, in the order in which they were saved; and by the id of the run what
    is wrong with those that are damaged.
    """
    there: list[Portable] = []
    damaged: dict[str, list[str]] = {}
    for _, path in checkpoints_in(folder) if folder.is_dir() else []:
        try:
            there.append(read(path))
        except ConfigError:
            continue  # of another program
        except (OSError, TierzeroError) as error:
            damaged.setdefault(str((read_head(path) or {}).get("run")), []).append(str(error))
    return there, damaged


def of_run(folder: Path, run: str, out: Path) -> tuple[list[Portable], list[str]]:
    """Those of the run with this id in the directory `out`, or moved to there, the last saved one last; and what is
    wrong with its damaged ones.
    """
    there, damaged = found_in(folder)
    mine = [one for one in there if is_of(one, run, out)]
    return sorted(mine, key=lambda one: one.saves), damaged.get(run, [])


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
