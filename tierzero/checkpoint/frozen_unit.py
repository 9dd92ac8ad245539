"""One unit of a Frozen: what its records were, tensor by tensor. See frozen's Note [frozen]."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tierzero.errors import TierzeroError
from tierzero.monitoring.metrics import Metrics
from tierzero.paging.gate import Gate
from tierzero.storage.extents import Extent
from tierzero.storage.store import Store
from tierzero.units.borrowed import FrozenRecord
from tierzero.units.generic import GenericState, Kept, Slot
from tierzero.units.records import DiskRecord, HostRecord, StateRecord
from tierzero.units.unit import Unit

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class HeldRecord:
    """One version of a record in the store, whatever is published later."""

    on_disk = True

    def __init__(self, store: Store, extent: Extent, metrics: Metrics) -> None:
        self.store = store
        self.extent = extent
        self.metrics = metrics
        self.nbytes = extent.nbytes

    async def read(self, offset: int, out: torch.Tensor) -> None:
        """As DiskRecord's."""
        self.store.space.hold(self.extent)
        try:
            self.metrics.add("nvme_read_expected", out.numel())
            await self.store.file.read(self.extent.offset + offset, out)
        finally:
            self.store.space.drop(self.extent)

    async def write(self, offset: int, data: torch.Tensor) -> None:
        raise TierzeroError("what is being saved cannot be written; please report this as a bug")


class HeldSpans:
    """A frozen region whose bytes lie in files of others, whatever becomes of the region."""

    on_disk = True

    def __init__(self, record: FrozenRecord) -> None:
        self.borrowed = record.borrowed
        self.metrics = record.metrics

    async def read(self, offset: int, out: torch.Tensor) -> None:
        """As FrozenRecord's."""
        assert self.borrowed is not None
        self.metrics.add("nvme_read_expected", out.numel())
        await self.borrowed.read(offset, out)


class Unread:
    """What nobody has read yet of `count` elements."""

    def __init__(self, count: int) -> None:
        self._left = [(0, count)]

    def over(self, first: int, count: int) -> bool:
        """Elements [first, first + count) have been read, in any order; whether nothing is left."""
        last, left = first + count, self._left
        pieces = [piece for low, high in left for piece in ((low, min(high, first)), (max(low, last), high))]
        self._left = [(low, high) for low, high in pieces if low < high]
        return not self._left


@dataclass(frozen=True)
class Source:
    """One tensor of the frozen moment.

    name: of the parameter that it belongs to. part: "param", "grad", "master", "exp_avg", "exp_avg_sq",
    "max_exp_avg_sq", or whatever a wrapped optimizer calls it. States of AdamW are float32 whatever they are kept in.
    in_host: training waits until it has been read, so it is best read first. When all that the unit has in host memory
    has been read, it can be read no more.
    """

    unit: FrozenUnit
    index: int
    name: str
    part: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    in_host: bool

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    async def read(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` (one-dimensional, of this dtype, on the CPU) with elements [first, first + n), as stored row by
        row. Runs on the engine's loop. TierzeroError when it is too late, OSError for a drive that fails.
        """
        if out.dtype != self.dtype or out.dim() != 1 or not 0 <= first <= first + out.numel() <= self.numel:
            raise ValueError(
                f"{self.name} ({self.part}) is read into {self.dtype}[n] inside its {self.numel} elements, not into "
                f"{out.dtype} {tuple(out.shape)} from element {first}"
            )
        await self.unit.read(self, first, out)


class FrozenUnit:
    """One unit: `sources` for all its tensors. `steps`: each parameter's optimizer steps.
    `scales`: what waits to be multiplied into each gradient at the step (inverse loss scale, clip coefficient).
    `values`: what wrapped optimizers keep for each parameter besides tensors, by its index. `adam`: the parameters
    whose moments are AdamW's, zero where another optimizer has yet to step.
    """

    def __init__(self, unit: Unit, *, gradients: bool) -> None:
        self.unit = unit
        self.name = unit.name
        self.steps = list(unit.steps)
        self.scales = list(zip(unit.unscaled, unit.coef, strict=True))
        self.values: dict[int, dict[str, Any]] = {}
        self.adam: set[int] = set()
        self.gradients = [index for index, rest in enumerate(unit.rest) if gradients and rest.grad is not None]
        self.gate = Gate(unit.pending, gradients=bool(self.gradients))
        self.done = False
        self._extents: list[Extent] = []
        self._keep_gated = False
        self._as_they_are = False  # some records lie elsewhere than in the store
        self._records: dict[str, Any] = {}
        self._state: StateRecord | None = None
        self._generic: GenericState | None = None
        self._taken = asyncio.Event()
        self._error: BaseException | None = None
        found = [one for index in range(len(unit.rest)) for one in self._sources(index)]
        self.sources = [Source(self, *one, self._lies_in_host(one[0], one[2])) for one in found]
        self._unread: dict[bool, dict[tuple[int, str], Unread]] = {False: {}, True: {}}  # of gradients or not
        for one in self.sources:
            if one.in_host and one.numel:
                self._unread[one.part == "grad"][one.index, one.part] = Unread(one.numel)

    def _sources(self, index: int) -> Iterator[tuple[int, str, str, tuple[int, ...], torch.dtype]]:
        unit = self.unit
        name, shape = unit.names[index], tuple(unit.rest[index].shape)
        yield index, name, "param", shape, unit.rest[index].dtype
        place = unit.layout.places[index]
        kept: Kept | None = unit.generic.kept.get(index) if unit.generic is not None else None
        if unit.state is not None and place.elem >= 0:
            if place.region == "param":
                yield index, name, "master", shape, torch.float32
            if kept is None or not kept.values:
                self.adam.add(index)
                for part in MOMENTS[: unit.state.format.parts - 1]:
                    yield index, name, part, shape, torch.float32
        if kept is not None:
            if kept.master is not None:
                yield index, name, "master", tuple(kept.master.shape), torch.float32
            plain = {key: value for key, value in kept.values.items() if not isinstance(value, Slot)}
            self.values[index] = {"made_by": kept.made_by, **_copied(plain)}
            for key, slot in kept.values.items():
                if isinstance(slot, Slot):
                    yield index, name, key, slot.shape, slot.dtype
        if index in self.gradients:
            yield index, name, "grad", shape, unit.rest[index].dtype

    def _lies_in_host(self, index: int, part: str) -> bool:
        unit, state = self.unit, self.unit.state
        region = unit.layout.places[index].region
        if part == "grad" or (part == "param" and region in unit.records):
            return part == "grad" or isinstance(unit.records[region], HostRecord)
        kept = unit.generic.kept.get(index) if unit.generic is not None else None
        if _slot(kept, part) is not None:
            return isinstance(unit.generic.record, HostRecord)
        return state is not None and (isinstance(state.record, HostRecord) or state.params is not None)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    @property
    def in_host(self) -> bool:
        """Whether training may wait for `unit_done`."""
        return self.gate.holds(None) or self.gate.holds_gradients

    def take(self, keep_gated: bool) -> None:
        """Hold what the unit's records are now; `keep_gated`: they may not be replaced either."""
        unit = self.unit
        for region, record in unit.records.items():
            self._records[region] = self._hold(record)
        if unit.state is not None:
            state = unit.state
            high = self._records["param"] if state.params is not None else None
            self._state = StateRecord(self._hold(state.record), state.elements, state.chunk, state.format, high)
        if unit.generic is not None:
            old: GenericState = unit.generic
            own = None if old.record is None else self._hold(old.record)
            kept = {index: Kept(one.made_by, one.master, dict(one.values)) for index, one in old.kept.items()}
            self._generic = GenericState(own, None, kept)
        self._keep_gated = keep_gated
        if not keep_gated and not self._as_they_are:
            self.gate.open(gradients=False)
        self._taken.set()

    def _hold(self, record: HostRecord | DiskRecord) -> Any:
        if isinstance(record, FrozenRecord) and not record.owned:
            return HeldSpans(record)
        if not isinstance(record, DiskRecord):
            self._as_they_are = True
            return record
        extent = record.store.current[record.name]
        record.store.space.hold(extent)
        self._extents.append(extent)
        return HeldRecord(record.store, extent, record.metrics)

    async def take_later(self, keep_gated: bool) -> None:
        """`take` when the update that was queued before has been published."""
        try:
            await self.unit.owner.updates.settled(self.unit, urgent=False)
        except BaseException as error:
            self._error = error
            self._taken.set()
            return
        if not self.done:
            self.take(keep_gated)

    def let_go(self) -> None:
        """Nothing more is read: what was held may go, and training need not wait. Any number of times."""
        self.done = True
        self.gate.open()
        if self.unit.gate is self.gate:
            self.unit.gate = None
        for extent in self._extents:
            self.unit.owner.store.space.drop(extent)
        self._extents.clear()
        self._records.clear()
        self._state = self._generic = None
        self._taken.set()

    async def read(self, source: Source, first: int, out: torch.Tensor) -> None:
        """See Source.read."""
        await self._taken.wait()
        if self._error is not None:
            raise TierzeroError(
                f"{source.name} cannot be saved: the update of unit {self.name} that was queued before has failed"
            ) from self._error
        self._check(source)
        await self._read(source, first, out)
        self._check(source)
        if source.in_host:
            self._has_read(source, first, out.numel())

    def _holds(self, source: Source) -> bool:
        return self.gate.holds_gradients if source.part == "grad" else self.gate.holds(None)

    def _has_read(self, source: Source, first: int, count: int) -> None:
        """Let training go on as soon as all that it could change has been read."""
        gradients, key = source.part == "grad", (source.index, source.part)
        unread = self._unread[gradients]
        if key in unread and unread[key].over(first, count):
            del unread[key]
        if not unread:
            if gradients:
                self.gate.open_gradients()
            elif not self._keep_gated:
                self.gate.open(gradients=False)

    def _check(self, source: Source) -> None:
        over = source.in_host and source.numel > 0 and not self._unread[source.part == "grad"]
        if self.done or (over and not self._holds(source)):
            raise TierzeroError(
                f"{source.name} ({source.part}) was read too late: the save of it has been finished, given up, or cut "
                "short by close()"
            )

    async def _read(self, source: Source, first: int, out: torch.Tensor) -> None:
        unit, index, part = self.unit, source.index, source.part
        place = unit.layout.places[index]
        raw = out.view(torch.uint8) if out.numel() else torch.empty(0, dtype=torch.uint8)
        kept = self._generic.kept.get(index) if self._generic is not None else None
        if not out.numel():
            return
        if part == "grad":
            view = unit.grad_views[index]
            assert view is not None
            out.copy_(view.reshape(-1)[first : first + out.numel()])
        elif part == "param" and place.region in self._records:
            await self._records[place.region].read(place.offset + first * out.itemsize, raw)
        elif self._state is not None and part in ("param", "master", *MOMENTS) and not _slot(kept, part):
            number = 1 + MOMENTS.index(part) if part in MOMENTS else StateRecord.MASTER
            await self._state.read(number, place.elem + first, out)
        else:
            slot = _slot(kept, part)
            assert slot is not None
            assert self._generic is not None
            assert self._generic.record is not None
            await self._generic.record.read(slot.offset + first * out.itemsize, raw)


def _slot(kept: Kept | None, part: str) -> Slot | None:
    found = None if kept is None else kept.master if part == "master" else kept.values.get(part)
    return found if isinstance(found, Slot) else None


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
