"""Portable checkpoints while a run trains: one is written at a time, and a failure does not end the run."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import nn

import tierzero as tz
from tierzero.cli.checkpoints import name_of
from tierzero.cli.config import Config
from tierzero.cli.portable import of_run
from tierzero.cli.progress import View
from tierzero.cli.runid import id_in
from tierzero.errors import ConfigError, TierzeroError, describe
from tierzero.hardware.drives import existing_parent
from tierzero.sizes import format_size, parse_rate


class Saver:
    """Saves `model` and `optimizer` as the [checkpoint] section says. `last`: the step of the last checkpoint that was
    begun or is there.
    """

    def __init__(self, config: Config, model: nn.Module, optimizer: Any, view: View) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.view = view
        self.last: int | None = None
        self._going: tz.Saving | None = None
        self._begun = 0.0
        self._done: list[tz.Saving] = []
        self._failed = 0
        self._waited = 0.0  # seconds
        self._error: Exception | None = None  # of the last one

    @property
    def wanted(self) -> bool:
        """Whether there are to be any."""
        return self.config.checkpoint.every is not None

    def due(self, step: int) -> bool:
        """Whether one is to be begun after that many steps."""
        every = self.config.checkpoint.every
        return every is not None and step % every == 0 and self.last != step

    def begin(self, step: int, meta: dict[str, Any]) -> None:
        """Begin one, once the one before is done; training goes on meanwhile."""
        self.settle()
        path, limit = self.config.checkpoint_folder / name_of(step), self.config.checkpoint.limit
        self.last = step
        try:
            self._going = tz.save(
                self.model,
                path,
                self.optimizer,
                meta=meta,
                keep=self.config.checkpoints_kept,
                overwrite=True,  # of the run's own, when it goes that way again: others' were looked for at the start
                limit=0 if limit is None else parse_rate(limit),
            )
        except (TierzeroError, OSError) as error:
            self._fails(path, error)
            return
        self.view.say(f"saving {path.name} into {path.parent}, {format_size(self._going.nbytes)}")

    def progress(self) -> str:
        """What of the one that goes on is written, for the line of a step; empty if none does."""
        one = self._going
        return "" if one is None else f"saving {100 * one.written // max(1, one.nbytes)}%"

    def look(self) -> None:
        """Say how it went, if it is over."""
        if self._going is not None and self._going.done():
            self.settle()

    def settle(self) -> None:
        """Wait for the one that goes on, and say how it went."""
        one = self._going
        if one is None:
            return
        begun = time.perf_counter()
        error = one.exception()
        self._going = None
        self._waited += time.perf_counter() - begun
        if error is None:
            self._done.append(one)
            self._error = None
            self.view.say(f"saved {one.path}: {format_size(one.nbytes)} in {one.seconds:.1f} s")
        elif isinstance(error, TierzeroError | OSError):
            self._fails(one.path, error)
        else:
            raise error

    def cancel(self) -> None:
        """Give up the one that goes on: the run is to end at once."""
        one, self._going = self._going, None
        if one is not None and not one.done():
            one.cancel()
            self.view.say(f"gave up the checkpoint {one.path}")

    def _fails(self, path: Path, error: TierzeroError | OSError) -> None:
        self._failed += 1
        self._error = error
        why = describe(error).removeprefix(f"{os.path.abspath(path)}: ")
        self.view.warn(f"the checkpoint {path} was not written, and training goes on without it: {why}")

    def path_of(self, step: int) -> Path | None:
        """The checkpoint after that many steps, if it is whole and durable."""
        path = self.config.checkpoint_folder / name_of(step)
        return path if any(one.path == Path(os.path.abspath(path)) for one in self._done) else None

    def check(self) -> None:
        """Raise what the last one failed with."""
        if self._error is not None:
            raise self._error

    def summary(self, stalled: float) -> dict[str, Any] | None:
        """How many there were, their bytes, and the seconds that training waited for them; `stalled` as the engine
        counts them.
        """
        if not self.wanted:
            return None
        return {
            "saved": len(self._done),
            "failed": self._failed,
            "bytes": sum(one.nbytes for one in self._done),
            "seconds": sum(one.seconds for one in self._done),
            "waited_s": self._waited + stalled,
            "last": str(self._done[-1].path) if self._done else None,
        }


def checkpoint_bytes(model: nn.Module) -> int:
    """About what a portable checkpoint takes: parameters, moments in float32, and masters of 16-bit parameters."""
    total = 0
    for param in model.parameters():
        width = param.element_size()
        trained = 8 + (4 if width < 4 else 0) if param.requires_grad else 0
        total += param.numel() * (width + trained)
    return total


def check_folder(folder: Path) -> None:
    """ConfigError if something on the way to `folder` is no directory, OSError if none can be made there: it is tried,
    in what is there of it, and nothing is left.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path) or path == path.parent)
    if not there.is_dir():
        where = "" if there == folder else f" lies below {there}, which"
        raise ConfigError(f"the directory for checkpoints {folder}{where} is no directory: set checkpoint.path to one")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".tierzero-", dir=there))
    except OSError as error:
        raise OSError(
            error.errno,
            f"checkpoints cannot be written into {folder}, as no directory can be made in {there}: {error.strerror}. "
            "Set checkpoint.path to one where you may",
            str(folder),
        ) from None


def check_room(config: Config, model: nn.Module) -> str:
    """A line about the checkpoints that there will be, empty for none. OSError(ENOSPC) where not even one fits; and as
    check_folder.
    """
    if config.checkpoint.every is None:
        return ""
    folder, size, kept = config.checkpoint_folder, checkpoint_bytes(model), config.checkpoints_kept
    check_folder(folder)
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < size:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes {format_size(size)} and the drive of {folder} has {format_size(free)} free: free some "
            "space, or set checkpoint.path to a directory on a larger drive",
            str(folder),
        )
    which = "all are kept" if kept is None else f"the last {kept} are kept" if kept > 1 else "the last one is kept"
    return (
        f"checkpoints every {config.checkpoint.every} steps in {folder}, {format_size(size)} each, {which}, "
        f"{format_size(free)} free{_shortage(config, free // size)}"
    )


def _shortage(config: Config, fit: int) -> str:
    """What to say where only `fit` more checkpoints fit, and there will be more at a time."""
    every, kept, run = config.checkpoint.every, config.checkpoints_kept, id_in(config.train.out)
    if every is None or kept is None:
        return ""
    there = len(of_run(config.checkpoint_folder, run, config.train.out)[0]) if run is not None else 0
    most = min(kept + 1, math.ceil(config.train.steps / every))
    if there + fit >= most:
        return ""
    return (
        f", which is too little: {most} are there while one is written, and there is room for {there + fit}. Set "
        "checkpoint.keep lower, or checkpoint.path to a directory on a larger drive"
    )
