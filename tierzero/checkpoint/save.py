"""save: a training run as a directory that torch.distributed.checkpoint reads, written while training goes on.

Note [a save in the background]
`save` waits only until the small values and the tensors that are not the engine's are in the file; the engine's are
frozen (see frozen.py) and read unit by unit on its loop. The directory has its name only when all of it is durable. A
failure leaves nothing behind, comes out of the handle, and if nobody has asked that, of the next save or of close().
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401, registers its own end, which then comes after ours
import datetime
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierzero
from tierzero.api import check_outside, open_engine
from tierzero.checkpoint.contents import Contents, checked_values, gather
from tierzero.checkpoint.data_file import Section, Writer, lay_out
from tierzero.checkpoint.frozen import Frozen, freeze, in_order
from tierzero.checkpoint.frozen_unit import FrozenUnit
from tierzero.checkpoint.index import DATA, INDEX, METADATA, Index, to_bytes
from tierzero.checkpoint.metadata import metadata_bytes
from tierzero.checkpoint.pace import Pace
from tierzero.checkpoint.place import Place, named_full, next_sequence, prune, write_durably
from tierzero.checkpoint.randomness import random_state
from tierzero.clock import SAVE
from tierzero.engine import Engine
from tierzero.errors import TierzeroError
from tierzero.native import NATIVE
from tierzero.tiers.base import open_block_file

log = logging.getLogger("tierzero")


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    states: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
    gradients: bool = True,
    random: bool = True,
    keep: int | None = None,
    overwrite: bool = False,
    wait: bool = False,
    limit: int = 0,
) -> Saving:
    """Save a run into the directory `path`, while training goes on: the parameters and persistent buffers of the
    offloaded `model`, the states and hyper-parameters of `optimizer` (one of this package's, or several), and what is
    given here. `load` resumes from it bit for bit, under any placement, budget and drives.

    The directory is a checkpoint of torch.distributed.checkpoint in its canonical layout (model.<name>,
    optimizer.state.<name>.exp_avg, ...), which `dcp.load` reads without this package. It appears under its name when it
    is whole and durable; until then, and whatever happens, all that was there before stays.

    states: by name, objects with state_dict() and load_state_dict() (schedulers, scalers, data loaders, modules), or
    plain values. meta: JSON values (the position in the data), which `load` returns. gradients: also the `.grad` of the
    parameters, so that a run can be saved between the micro-batches of a step; without effect after zero_grad().
    random: also the state of the random generators of torch, CUDA, Python and NumPy.
    keep: delete all but the last `keep` checkpoints of this run in the directory above once this one, which counts, is
    durable. A run is what has saved them, with all that has loaded them to go on; those of other runs stay.
    overwrite: replace a checkpoint of that name. What is no checkpoint of this package is never replaced or deleted.
    wait: return when it is done. limit: bytes per second to write at most, 0: no limit.

    Returns a Saving. Raises TierzeroError inside a forward, backward or `unsharded`, StoreError for a target that is
    not ours or there already, TypeError for states that cannot be loaded safely, OSError(ENOSPC) if the drive has no
    room; and what an earlier save of the model failed with, if nobody has seen that.
    """
    engine = open_engine(model)
    check_outside(engine, engine.model() or model, "save")
    engine.hooks.arrivals.check(engine.model() or model, trained=False)
    given = checked_values(states, meta, keep, limit)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the path comes second, then the optimizer: save(model, path, optimizer), not {path!r:.40}")
    if engine.last_save is not None:
        engine.last_save.result()
    with engine.metrics.inside(SAVE, "save", f"save {path}"):
        place = Place(Path(os.path.abspath(path)), overwrite)
        try:
            frozen = freeze(engine, gradients=gradients)
            try:
                contents = gather(frozen, model, optimizer, states or {}, given, gradients=gradients)
                if random:
                    contents.extra["random"] = random_state()
                saving = Saving(engine, place, frozen, contents, given, keep, limit)
            except BaseException:
                frozen.release()
                raise
        except BaseException:
            place.close()
            raise
        try:
            saving.begin()
        except TierzeroError:  # the engine was closed meanwhile
            if not saving.begun:
                saving.give_up()
            raise
        if wait:
            saving.result()
    return saving


class Saving:
    """A save that goes on. `path`: the checkpoint's directory."""

    def __init__(
        self,
        engine: Engine,
        place: Place,
        frozen: Frozen,
        contents: Contents,
        meta: dict[str, Any],
        keep: int | None,
        limit: int,
    ) -> None:
        self.path = place.target
        self._engine = engine
        self._place = place
        self._frozen = frozen
        self._contents = contents
        self._keep = keep
        self._limit = limit
        self._error: BaseException | None = None
        self._seen = False
        self._done = False
        self._waited_for = 0  # by how many threads
        self.pid = os.getpid()
        self._task: asyncio.Task[None] | None = None
        self._free_to_go: asyncio.Event | None = None  # the caller's own tensors are written
        head = {
            "sequence": next_sequence(place.target.parent),
            "run": engine.lineage,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "tierzero": tierzero.__version__,
            "torch": torch.__version__,
        }
        self.index = Index(head, meta=meta, extra=contents.extra)
        self.index.aliases = contents.aliases
        self.index.paths = {key: list(path) for key, path in contents.paths.items()}

    def begin(self) -> None:
        """Start, and return when the caller's own tensors are in the file."""
        self._engine.last_save = self
        self._engine.closing.append(self.finish)
        _RUNNING.add(self)

        def start() -> None:
            self._free_to_go = asyncio.Event()
            self._task = asyncio.ensure_future(self._run())

        self._engine.loop.do(start)
        self._engine.run(self._first_over())
        if self._done and self._error is not None:
            self.result()

    @property
    def begun(self) -> bool:
        """Whether it goes on, or did."""
        return self._task is not None

    def give_up(self) -> None:
        """Leave nothing of a save that could not begin."""
        _RUNNING.discard(self)
        with suppress(ValueError):
            self._engine.closing.remove(self.finish)
        self._engine.last_save = None
        self._give_up_place()
        with suppress(TierzeroError):  # closed: nothing is held
            self._frozen.release()

    async def _first_over(self) -> None:
        assert self._free_to_go is not None
        await self._free_to_go.wait()

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over, `timeout` seconds at most; whether it is. Raises nothing for a save that failed."""

        async def over() -> None:
            assert self._task is not None
            await asyncio.wait([self._task], timeout=timeout)

        self._waited_for += 1
        try:
            if not self._done:
                self._engine.run(over())
        finally:
            self._waited_for -= 1
        return self._done

    def exception(self) -> BaseException | None:
        """Wait until it is over; what it failed with."""
        self.wait()
        self._seen = True
        return self._error

    def result(self) -> Path:
        """Wait until it is over; the checkpoint's directory. Raises what it failed with, once."""
        seen = self._seen
        error = self.exception()
        if error is not None and not seen:
            raise error
        return self.path

    def finish(self) -> None:
        """Wait, and log what it failed with if nobody has seen that: at close(), and as the process ends."""
        error = None if self._seen else self.exception()
        if error is not None:
            log.error("the checkpoint %s was not written: %s", self.path, error)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        began = time.monotonic()
        try:
            await self._save()
            seconds, size = time.monotonic() - began, self.index.head["bytes"]
            log.info("saved %s: %d tensors, %.1f MB in %.1f s", self.path, len(self.index.tensors), size / 1e6, seconds)
        except BaseException as error:
            self._error = named_full(error, self.path)
        finally:
            self._frozen.release()
            await asyncio.to_thread(self._give_up_place)
            self._contents = Contents()
            _RUNNING.discard(self)
            with suppress(ValueError):
                self._engine.closing.remove(self.finish)
            self._done = True
            assert self._free_to_go is not None
            self._free_to_go.set()

    def _give_up_place(self) -> None:
        try:
            self._place.close()
        except OSError as error:
            log.warning("%s could not be removed: %s", self._place.path, error)

    async def _save(self) -> None:
        contents, index = self._contents, self.index
        first, index.objects, index.tensors = lay_out(0, contents.objects, contents.first)
        at = first.end
        sections: dict[tuple[Any, bool], Section] = {}
        for unit, tensors in contents.units.items():
            for in_host in (True, False):
                mine = {key: one for key, one in tensors.items() if getattr(one, "in_host", False) == in_host}
                sections[unit, in_host], _, stored = lay_out(at, {}, mine)
                index.tensors.update(stored)
                at = sections[unit, in_host].end
        self._place.check_space(at)
        io: Any = None
        path = self._place.path / DATA
        if NATIVE is not None:
            from tierzero.tiers.nvme import NativeEngine

            io = NativeEngine(depth=4, limit=self._limit)
        try:
            file = open_block_file(str(path), io, limit=self._limit)
            try:
                await asyncio.to_thread(file.preallocate, at)
                hurry = lambda: self._waited_for > 0
                writer = Writer(file, hurry, Pace(self._engine.metrics, hurry).after)
                try:
                    await writer.write(first)
                    await writer.finish()
                    assert self._free_to_go is not None
                    self._free_to_go.set()
                    begun = []
                    for unit in self._frozen:  # first what training waits for
                        await writer.write(sections[unit, True])
                        begun.append(unit)
                    await self._write_units(writer, begun, sections)
                    await writer.finish()
                finally:
                    await writer.abandon()
                await file.sync()
                index.files[DATA] = file.size()
            finally:
                file.close()
        finally:
            if io is not None:
                io.close()
        await asyncio.to_thread(self._publish)

    async def _write_units(self, writer: Writer, units: list[FrozenUnit], sections: dict[Any, Section]) -> None:
        """What lies on the drive, two units at a time if somebody waits: its queue does not run dry then."""

        async def one(unit: FrozenUnit) -> None:
            await writer.write(sections[unit, False], urgent=False)
            self._frozen.unit_done(unit)

        running: list[asyncio.Task[None]] = []
        try:
            for unit in in_order(units):
                running.append(asyncio.ensure_future(one(unit)))
                while len(running) >= (2 if self._waited_for else 1):
                    await running.pop(0)
            while running:
                await running.pop(0)
        finally:
            await asyncio.gather(*running, return_exceptions=True)

    def _publish(self) -> None:
        index, directory = self.index, self._place.path
        raw = metadata_bytes(index, str(self._place.target))
        write_durably(directory / METADATA, raw)
        index.files[METADATA] = len(raw)
        index.head["tensors"] = len(index.tensors)
        index.head["bytes"] = sum(index.files.values())
        write_durably(directory / INDEX, to_bytes(index))
        self._place.publish()
        if self._keep is not None:
            prune(self.path.parent, self._keep, self._engine.lineage)


_RUNNING: set[Saving] = set()


def _end_all() -> None:
    for saving in list(_RUNNING):
        if os.getpid() == saving.pid:  # not in a forked child
            saving.finish()


# atexit comes too late: by then no thread may begin that the rest of a save needs
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
