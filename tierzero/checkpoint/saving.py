"""What `save` returns: a save that goes on, its progress and what becomes of it.

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import tierzero
from tierzero.checkpoint.contents import Contents
from tierzero.checkpoint.data_file import Section, Writer, lay_out
from tierzero.checkpoint.frozen import Frozen, in_order
from tierzero.checkpoint.frozen_unit import FrozenUnit
from tierzero.checkpoint.index import DATA, INDEX, METADATA, Index, to_bytes
from tierzero.checkpoint.metadata import metadata_bytes
from tierzero.checkpoint.pace import Pace
from tierzero.checkpoint.place import Place, named_full, next_sequence, prune, write_durably
from tierzero.engine import Engine
from tierzero.errors import TierzeroError
from tierzero.native import NATIVE
from tierzero.sizes import format_size
from tierzero.tiers.base import open_block_file

log = logging.getLogger("tierzero")


class Saving:
    """A save that goes on. `path`: the checkpoint's directory. `nbytes`: its size, `written`: bytes that have been
    written. `seconds`: what it took in all, 0 while it goes on.
    """

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
        self.nbytes = 0
        self.seconds = 0.0
        self._writer: Writer | None = None  # has buffers, so it goes as soon as it is done
        self._written = 0
        self._engine = engine
        self._place = place
        self._frozen = frozen
        self._contents = contents
        self._keep = keep
        self._limit = limit
        self._error: BaseException | None = None
        self._seen = False
        self._cancelled = False
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

    def __repr__(self) -> str:
        size = format_size(self.nbytes)
        if not self._done:
            state = f"{format_size(self.written)} of {size} written"
        elif self._error is None:
            state = f"done, {size} in {self.seconds:.1f} s"
        else:
            state = f"failed: {type(self._error).__name__}: {self._error}"
        return f"<Saving {str(self.path)!r}: {state}>"

    @property
    def written(self) -> int:
        """Bytes that have been written."""
        writer = self._writer
        return writer.written if writer is not None else self._written

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

    def cancel(self) -> None:
        """Give it up, unless all is written but for its index: nothing of it stays, and earlier checkpoints do. Returns
        when it is over; `result` then raises TierzeroError.
        """

        def stop() -> None:
            if self._writer is not None:
                self._cancelled = True
                self._writer.cancel(TierzeroError(f"the save into {self.path} was cancelled: nothing of it is left"))

        self._engine.loop.call(stop)  # not behind a wait of this thread that a signal has interrupted
        self.wait()

    def finish(self) -> None:
        """Wait, and log what it failed with if nobody has seen that: at close(), and as the process ends."""
        error = None if self._seen or self._cancelled else self.exception()
        if error is not None:
            log.error("the checkpoint %s was not written: %s", self.path, error)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        began = time.monotonic()
        try:
            await self._save()
            self.seconds, self.nbytes = time.monotonic() - began, self.index.head["bytes"]
            size = self.nbytes / 1e6
            log.info("saved %s: %d tensors, %.1f MB in %.1f s", self.path, len(self.index.tensors), size, self.seconds)
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
        self.nbytes = at
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
                writer = self._writer = Writer(file, hurry, Pace(self._engine.metrics, hurry, self._limit > 0).after)
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
                    self._written, self._writer = writer.written, None
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
