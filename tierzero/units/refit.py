"""The format of one model's optimizer states: taken from the first optimizer or from the snapshot, kept ever after, and
the buffers and the room on the drives that it needs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tierzero.errors import TierzeroError
from tierzero.native import NATIVE
from tierzero.optim.generic import WrappedOptimizer
from tierzero.optim.shadow import Shadows
from tierzero.optim.streamed import StreamedStep
from tierzero.storage.room import Room
from tierzero.units.fit import Fit, fit
from tierzero.units.state_format import PLAIN, StateFormat


class States:
    """What `engine` (an engine.Engine) knows of its optimizer states. `fit` says where they go, also before there are
    any.
    """

    def __init__(self, engine: Any, layouts: list[Any]) -> None:
        self.engine = engine
        self.layouts = layouts
        self.fit = self._fit(PLAIN, engine.placement.param_host)
        self._buffers: Any = None

    def _fit(self, format: StateFormat, cached: Sequence[bool]) -> Fit:
        engine = self.engine
        nvme = bool(engine.tiers.directories())
        return fit(format, self.layouts, engine.placement, cached, engine.metrics.host_budget, nvme=nvme)

    def use(self, format: StateFormat, cached: Sequence[bool]) -> None:
        """Have states of `format` from here on; `cached`: whose parameters lie in host memory. TierzeroError if the
        model has others, BudgetError if it does not fit.
        """
        engine, before = self.engine, self.engine.homes.format
        if before is not None and before != format:
            raise TierzeroError(
                f"the optimizer states of this model have {before} and cannot have {format} as well: build the "
                "optimizer with the state_dtype=, master= and amsgrad= that they were made with"
            )
        if before is not None:
            return
        if format.master == "split" and any(isinstance(other, WrappedOptimizer) for other in engine.optimizers):
            raise TierzeroError(
                'master="split" and wrapped optimizers cannot be in one model, they cannot step split masters: use '
                'master="float32"'
            )
        self.fit = self._fit(format, cached)
        if format != PLAIN:
            self.make_room()
            engine.streamed = self.streamed()
        engine.homes.format = format
        for unit in engine.units:
            unit.state_host = self.fit.state_host[unit.uid]

    def take(self, saved: dict[str, Any] | None) -> list[str]:
        """Go on with a snapshot's states (see `describe`); returns the names of the units whose masters are split
        there.
        """
        if saved is None:
            return []
        self.use(StateFormat(**saved["format"]), self.engine.placement.param_host)
        return list(saved["split"])

    def describe(self) -> dict[str, Any] | None:
        """What is needed to read the states of a snapshot; None if there are none."""
        format: StateFormat | None = self.engine.homes.format
        if format is None:
            return None
        units = [unit for unit in self.engine.units if unit.state is not None]
        return {"format": format.to_json(), "split": [u.name for u in units if u.state.format.master == "split"]}

    def make_room(self) -> None:
        """Reserve on the drives what steps write, so that a full disk shows now."""
        engine, store = self.engine, self.engine.store
        held = {name: extent.nbytes for name, extent in store.current.items()} if store is not None else {}
        if store is None:
            return
        records = engine.disk_records()
        need = sum(n for name, n in records if name not in held) + sum(held.values())
        sizes = zip(self.fit.state_bytes, self.layouts, strict=True)
        working = engine.streamed.width * max((size + layout.flat_bytes for size, layout in sizes), default=0)
        engine.room = Room(store, working, records)
        engine.room.reserve(need + working, need)

    def streamed(self) -> StreamedStep:
        """The streamed step for `fit`, in place of the one before."""
        engine, fitted = self.engine, self.fit
        stepper = work = None
        if NATIVE is not None and fitted.update_bytes:
            buffers = self._block(fitted.update_bytes, "chunk buffers of the optimizer step")
            chunk = engine.placement.chunk
            threads, cores = engine.tiers.crew()
            with _on(cores):
                stepper = NATIVE.Stepper(engine.io.native, buffers.tensor, chunk, threads, format=fitted.widest.native)
            engine.at_end.append(stepper.close)
        elif fitted.work_bytes:
            work = self._block(fitted.work_bytes, "one state record for the optimizer step")
        what = "the parameters of a split update"
        blocks = [engine.homes.share.block(fitted.shadow_bytes, what) for _ in range(fitted.shadows)]
        return StreamedStep(engine.store, engine.metrics, stepper, engine.io, work, Shadows(blocks))

    def _block(self, nbytes: int, what: str) -> Any:
        engine, block = self.engine, self._buffers
        if block is not None and engine.streamed.stepper is not None:
            engine.streamed.stepper.close()
        if block is None or block.nbytes < nbytes:
            if block is not None:
                block.free()
            block = self._buffers = engine.homes.share.block(nbytes, what)
            if NATIVE is not None and engine.store is not None:
                engine.io.register(block.tensor)  # all that the step transfers goes through them
        return block


@contextmanager
def _on(cores: Collection[int]) -> Iterator[None]:
    """Threads that are started inside run on these cores, if there are any."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)
