"""One unit's optimizer step as a read -> update -> write over its state record, native or in Python.

Note [versions]
Records in the store are never overwritten: the update reads the current version and writes new extents, and both (state
and parameter copy) are published only when all bytes are written. An update that failed has changed nothing and may be
run again; records in host memory are written as it goes, but from the old state alone, so running again gives the same
bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from tierzero.monitoring.metrics import Metrics
from tierzero.optim.shadow import Shadows
from tierzero.paging.waiting import WIDTH
from tierzero.storage.extents import Extent
from tierzero.storage.store import Store
from tierzero.tiers.host import Block
from tierzero.units.layout import Place
from tierzero.units.records import DiskRecord, HostRecord, StateRecord
from tierzero.units.unit import Unit

MODEL_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Hyper:
    """What one parameter's update needs besides tensors; `step` counts from 1, `coef` is the clip coefficient."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    coef: float
    maximize: bool = False
    decoupled: bool = True  # AdamW's weight decay, else Adam's
    noise: int = 0  # what the rounding of moments that are not float32 draws from, 64 bits

    def scalars(self) -> tuple[float, ...]:
        """(decay, w1, beta2, w2, eps, step size, sqrt(bias correction 2), coef, l2), as torch's fused kernels form them
        in double.
        """
        correction1 = 1 - self.beta1**self.step
        correction2 = 1 - self.beta2**self.step
        return (
            1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.eps,
            self.lr / correction1,
            math.sqrt(correction2),
            -self.coef if self.maximize else self.coef,
            0.0 if self.decoupled else self.weight_decay,
        )


IDLE = (1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)  # scalars of a parameter without a gradient: not used


@dataclass(frozen=True)
class Fresh:
    """A new version of a record, written but not published."""

    record: DiskRecord
    extent: Extent
    sums: Any


class UnitUpdate:
    """The update of one unit, as the queue runs it (updates.Work)."""

    def __init__(self, streamed: StreamedStep, unit: Unit, hypers: dict[int, Hyper]) -> None:
        self.streamed = streamed
        self.unit = unit
        self.hypers = hypers

    async def compute(self, due: int, ready: Callable[[], None]) -> list[Fresh]:
        return await self.streamed.compute(self.unit, self.hypers, due, ready)

    def publish(self, fresh: list[Fresh]) -> None:
        for new in fresh:
            new.record.store.publish(new.record.name, new.extent, new.sums)
        self.unit.master_edited = False

    def discard(self, fresh: list[Fresh]) -> None:
        for new in fresh:
            new.record.store.discard(new.extent)

    async def restore(self) -> None:
        await self.streamed.restore(self.unit)


class StreamedStep:
    """Runs updates; `stepper` is the native pipeline, or None: then `work` (host bytes for one record) serves a plain
    Python one.
    """

    def __init__(
        self, store: Store | None, metrics: Metrics, stepper: Any, io: Any, work: Block | None, shadows: Shadows
    ) -> None:
        self.store = store
        self.metrics = metrics
        self.stepper = stepper
        self.io = io
        self.work = work
        self.shadows = shadows

    @property
    def width(self) -> int:
        """How many updates may be on their way at once."""
        return WIDTH if self.stepper is not None else 1

    @property
    def under_way(self) -> int:
        """Chunks of state that are kept under way at once; 0 without the native pipeline."""
        return self.stepper.appetite if self.stepper is not None else 0

    async def compute(self, unit: Unit, hypers: dict[int, Hyper], due: int, ready: Callable[[], None]) -> list[Fresh]:
        """Step the parameters of `unit` that `hypers` names, from the gradients in its buffer: new versions of its
        records in the store, to be published or discarded; records in host memory in place. What is due sooner goes in
        front of what is under way. `ready` is called when the parameters in host memory are all there.
        """
        state, param = unit.state, unit.records.get("param")
        assert state is not None
        for record in (state.record, param, unit.records.get("fp32")):
            if isinstance(record, HostRecord):
                record.version += 1  # before the update, which writes it as it goes
        extents: list[Extent] = []
        try:
            new_state: Extent | None = None
            new_param: Extent | None = None
            if isinstance(state.record, DiskRecord):
                extents.append(new_state := self._room(state.record))
            if isinstance(param, DiskRecord):
                extents.append(new_param := self._room(param))
            if self.stepper is None:
                state_sum, param_sum = await self._python(unit, hypers, new_state, new_param)
            elif state.format.master == "split":
                state_sum, param_sum = await self._split(unit, hypers, new_state, due)
            else:
                state_sum, param_sum = await self._native(unit, hypers, new_state, new_param, due, ready)
        except BaseException:
            for extent in extents:
                assert self.store is not None
                self.store.discard(extent)
            raise
        return [
            Fresh(record, new, sums)
            for record, new, sums in ((state.record, new_state, state_sum), (param, new_param, param_sum))
            if isinstance(record, DiskRecord) and new is not None
        ]

    async def restore(self, unit: Unit) -> None:
        """Write the parameters that are cached in host memory again, from the masters that are current."""
        if unit.host_flat is None or unit.state is None:
            return
        for place in unit.layout.places:
            if place.elem < 0:
                continue
            offset, dtype = unit.layout.flat_offset(place), MODEL_DTYPES[place.spec.dtype]
            target = unit.host_flat.tensor[offset : offset + place.spec.nbytes].view(dtype)
            for first in range(0, place.spec.numel, unit.state.chunk):
                part = torch.empty(min(unit.state.chunk, place.spec.numel - first), dtype=torch.float32)
                await unit.state.read(StateRecord.MASTER, place.elem + first, part)
                target[first : first + part.numel()].copy_(part)

    def _room(self, record: DiskRecord) -> Any:
        extent = record.store.allocate(record.nbytes, record.name)
        self.metrics.add("nvme_written_expected", record.nbytes)
        return extent

    # -- native --------------------------------------------------------------------------------------------------------

    async def _split(self, unit: Unit, hypers: dict[int, Hyper], new_state: Any, due: int) -> tuple[Any, Any]:
        """With the high halves of the masters in the parameters; see state_format's Note [split masters]."""
        record = unit.records["param"]
        assert isinstance(record, HostRecord)
        if new_state is None:  # nothing can fail on the way
            return await self._native(unit, hypers, None, None, due, _nothing, out=record.data)
        async with self.shadows.take(record.nbytes) as shadow:
            sums = await self._native(unit, hypers, new_state, None, due, _nothing, out=shadow, params=record.data)
            for place in unit.layout.places:
                if place.elem >= 0:
                    part = slice(place.offset, place.offset + place.spec.nbytes)
                    record.data[part].copy_(shadow[part])
        return sums

    async def _native(
        self,
        unit: Unit,
        hypers: dict[int, Hyper],
        new_state: Any,
        new_param: Any,
        due: int,
        ready: Callable[[], None],
        **where: Any,
    ) -> tuple[Any, Any]:
        state, param = unit.state, unit.records.get("param")
        assert state is not None
        assert unit.grad_block is not None
        segments = []
        for index, place in enumerate(unit.layout.places):
            if place.elem < 0 or not place.spec.numel:
                continue
            hyper = hypers.get(index)
            out = self._out_offset(unit, place)
            grad = place.grad if hyper is not None else -1
            scalars = hyper.scalars() if hyper is not None else IDLE
            noise = hyper.noise if hyper is not None else 0
            dtype = place.spec.dtype
            segments.append((place.elem, place.spec.numel, grad, dtype, out, dtype, *scalars, noise, 0))
        if new_state is not None:
            self.metrics.add("nvme_read_expected", state.record.nbytes)
            file = self.store.file.native  # type: ignore[union-attr]
            where["src"] = (file, self.store.current[state.record.name].offset)  # type: ignore[union-attr]
            where["dst"] = (file, new_state.offset)
        else:
            where["state"] = state.record.data  # type: ignore[union-attr]
        if new_param is not None:
            where["out_file"] = (self.store.file.native, new_param.offset, param.nbytes)  # type: ignore[union-attr]
        elif unit.host_flat is not None and "out" not in where:
            where["out"] = unit.host_flat.tensor[: unit.layout.flat_bytes]
        grads = unit.grad_block.tensor[: unit.layout.grad_bytes]
        where["out_first"] = unit.layout.low_first if new_param is not None else 0
        recorder = self.metrics.recorder
        ticket, updated = self.stepper.submit(
            state.elements, segments, grads, format=state.format.native, due=due, early=True, **where
        )
        telling = asyncio.ensure_future(self._tell(updated, ready))
        sums: tuple[Any, Any] = await self.io.wait(ticket)
        await telling
        if recorder is not None:
            for row, (start, end) in zip(("read", "AdamW", "write"), ticket.phases, strict=True):
                if start:
                    recorder.add(f"update: {row}", row, f"{row} {unit.name}", start, end)
        return sums

    async def _tell(self, updated: Any, ready: Callable[[], None]) -> None:
        with suppress(OSError):  # the record's own ticket says it
            await self.io.wait(updated)
            ready()

    def _out_offset(self, unit: Unit, place: Place) -> int:
        """Where the parameter copy goes: into the host copy of the flat buffer, into the parameter record, or nowhere
        (-1).
        """
        if unit.host_flat is not None:
            return unit.layout.flat_offset(place)
        return place.offset if place.region == "param" else -1

    # -- Python --------------------------------------------------------------------------------------------------------

    async def _python(self, unit: Unit, hypers: dict[int, Hyper], new_state: Any, new_param: Any) -> tuple[Any, Any]:
        from tierzero.storage.checksum import checksum

        state, param = unit.state, unit.records.get("param")
        assert state is not None
        if new_state is not None:
            assert self.work is not None
            raw = self.work.tensor[: state.record.nbytes]
            await state.record.read(0, raw)
        else:
            raw = state.record.data  # type: ignore[union-attr]
        floats = raw.view(torch.float32)
        copies = None
        if new_param is not None:
            assert self.work is not None
            assert param is not None
            copies = self.work.tensor[state.record.nbytes :][: param.nbytes]
            copies.zero_()
        for index, place in enumerate(unit.layout.places):
            if place.elem < 0 or not place.spec.numel:
                continue
            parts = [_gather(floats, state, place, part) for part in range(state.format.parts)]
            if index in hypers:
                grad = unit.grad_views[index]
                assert grad is not None
                _fused(parts, grad.reshape(-1), hypers[index])
                for part, value in enumerate(parts):
                    _scatter(floats, state, place, part, value)
            target = copies if copies is not None and place.region == "param" else None
            offset = place.offset
            if unit.host_flat is not None:
                target, offset = unit.host_flat.tensor, unit.layout.flat_offset(place)
            if target is not None:
                target[offset : offset + place.spec.nbytes].view(MODEL_DTYPES[place.spec.dtype]).copy_(parts[0])
        state_sum = param_sum = None
        if new_state is not None:
            await self.store.file.write(new_state.offset, raw)  # type: ignore[union-attr]
            state_sum = checksum(raw)
        if copies is not None:
            await self.store.file.write(new_param.offset, copies)  # type: ignore[union-attr]
            param_sum = checksum(copies)
        return state_sum, param_sum


def _gather(floats: torch.Tensor, state: StateRecord, place: Place, part: int) -> torch.Tensor:
    """One parameter's run of `part` as one contiguous tensor: a view where it lies in one chunk, else a copy."""
    pieces = [
        floats[piece.offset // 4 : piece.offset // 4 + piece.count]
        for piece in state.pieces(part, place.elem, place.elem + place.spec.numel)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _scatter(floats: torch.Tensor, state: StateRecord, place: Place, part: int, value: torch.Tensor) -> None:
    for piece in state.pieces(part, place.elem, place.elem + place.spec.numel):
        at = piece.elem - place.elem
        floats[piece.offset // 4 : piece.offset // 4 + piece.count].copy_(value[at : at + piece.count])


def _fused(parts: list[torch.Tensor], grad: torch.Tensor, hyper: Hyper) -> None:
    """torch's own fused Adam or AdamW on one parameter's master and moments, in place."""
    from torch.optim.adam import adam
    from torch.optim.adamw import adamw

    value = grad.float()
    if hyper.coef != 1.0:
        value = value * hyper.coef
    (adamw if hyper.decoupled else adam)(
        [parts[0]],
        [value],
        [parts[1]],
        [parts[2]],
        parts[3:],
        [torch.tensor(float(hyper.step - 1))],
        fused=True,
        amsgrad=len(parts) > 3,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=hyper.maximize,
    )


def _nothing() -> None:
    pass
