"""One unit's step of a wrapped torch optimizer: everything is computed in working memory, then written, then published.

Note [one unit at a time]
An update reads the unit's generic record, the masters and the gradients, lets the user's class step them, and writes
new versions of what changed. Records in host memory change only as it is published, so an update that failed has
changed nothing. Its working memory is one unit's: float32 masters and gradients (8 bytes per parameter), the generic
record (the state, and 4 bytes per 16-bit parameter), the parameters, the state record of AdamW where the unit has one
(12 bytes), and what the class itself allocates, which nobody can know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierzero.optim.generic_recipe import Named, Recipe, Values
from tierzero.paging.malloc import trim
from tierzero.tiers.base import aligned_empty, settle
from tierzero.units.generic import GenericState, Kept, drafts_of, fill, in_place, lay_out
from tierzero.units.homes import Homes
from tierzero.units.records import DiskRecord, HostRecord, StateRecord
from tierzero.units.unit import Unit


def work_bytes(unit: Unit, record: int) -> int:
    """Working memory of one update of `unit` with a generic record of `record` bytes. See Note [one unit at a time]."""
    layout = unit.layout
    params = sum(one.nbytes for name, one in unit.records.items() if name != "frozen")
    return 8 * layout.elements + record + params + (unit.state.record.nbytes if unit.state is not None else 0)


@dataclass
class Change:
    """Something new that is not known yet: `apply` publishes it, `drop` gives it up."""

    apply: Callable[[], None]
    drop: Callable[[], None]


class GenericUpdate:
    """The update of one unit, as the queue runs it (updates.Work). `numbers`: group of each parameter, by index."""

    def __init__(
        self, homes: Homes, unit: Unit, recipe: Recipe, now: Sequence[Values], numbers: dict[int, int], names: Any
    ) -> None:
        self.homes = homes
        self.unit = unit
        self.recipe = recipe
        self.now = now
        self.numbers = numbers
        self.names = names
        self.coefs = {index: (unit.unscaled[index], unit.coef[index]) for index in numbers}

    async def compute(self, due: int, ready: Callable[[], None]) -> list[Change]:
        async with self.homes.share.turn:
            await settle(asyncio.ensure_future(asyncio.to_thread(trim)))  # what the update before this one left
            return await self._compute()

    def publish(self, fresh: list[Change]) -> None:
        for change in fresh:
            change.apply()

    def discard(self, fresh: list[Change]) -> None:
        for change in fresh:
            change.drop()

    async def restore(self) -> None:
        """Nothing was overwritten."""

    async def _compute(self) -> list[Change]:
        unit = self.unit
        raw, drafts = await read_drafts(unit)
        state_raw, state = await self._state()
        masters = {index: await self._master(index, state, drafts.get(index)) for index in self.numbers}
        stepped = await settle(asyncio.ensure_future(asyncio.to_thread(self._step, masters, drafts)))
        for index, (master, values) in stepped.items():
            own = state is None and unit.layout.places[index].region == "param"
            drafts[index] = Kept(self.recipe.name, master if own else None, values)
            masters[index] = master
        if state is not None:
            for draft in drafts.values():
                draft.master = None
        changes: list[Change] = []
        try:
            await new_record(self.homes, unit, raw, drafts, f"a step by {self.recipe.cls.__name__}", changes)
            if state is not None:
                await self._write_masters(state_raw, state, masters, changes)
            for region in ("param", "fp32"):
                await self._write_params(region, masters, changes)
        except BaseException:
            self.discard(changes)
            raise
        return changes

    # -- reading -------------------------------------------------------------------------------------------------------

    async def _state(self) -> tuple[torch.Tensor | None, StateRecord | None]:
        """The bytes of AdamW's state record, if the unit has one on NVMe, and a StateRecord to read masters from."""
        state = self.unit.state
        if state is None or not state.on_disk:
            return None, state
        raw = aligned_empty(state.record.nbytes)
        await state.record.read(0, raw)
        return raw, StateRecord(HostRecord(raw), state.elements, state.chunk, state.format)

    async def _master(self, index: int, state: StateRecord | None, draft: Kept | None) -> torch.Tensor:
        place = self.unit.layout.places[index]
        if state is not None:
            out = torch.empty(place.spec.numel, dtype=torch.float32)
            await state.read(StateRecord.MASTER, place.elem, out)
            return out.view(place.spec.shape)
        if draft is not None and draft.master is not None:
            return torch.as_tensor(draft.master)
        return (await self.unit.read_param(index)).float()

    # -- the step ------------------------------------------------------------------------------------------------------

    def _step(
        self, masters: dict[int, torch.Tensor], drafts: dict[int, Kept]
    ) -> dict[int, tuple[torch.Tensor, dict[str, Any]]]:
        """New masters and states. Runs on a thread of its own, because the class may take its time."""
        groups: list[list[Named]] = [[] for _ in self.now]
        states: list[list[dict[str, Any]]] = [[] for _ in self.now]
        order: list[list[int]] = [[] for _ in self.now]
        for index, number in self.numbers.items():
            param = nn.Parameter(masters[index])
            param.grad = self._grad(index)
            groups[number].append((self.names.get(index), param))
            states[number].append(drafts[index].values if index in drafts else {})
            order[number].append(index)
        after = self.recipe.step(groups, self.now, states)
        return {
            index: (param.detach(), values)
            for indices, params, one in zip(order, groups, after, strict=True)
            for index, (_, param), values in zip(indices, params, one, strict=True)
        }

    def _grad(self, index: int) -> torch.Tensor:
        """The gradient in float32, unscaled and clipped, in memory of its own."""
        view = self.unit.grad_views[index]
        assert view is not None
        value = view.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for factor in self.coefs[index]:
            if factor != 1.0:
                value.mul_(factor)
        return value

    # -- writing -------------------------------------------------------------------------------------------------------

    async def _write_masters(
        self, raw: torch.Tensor | None, state: StateRecord, masters: dict[int, torch.Tensor], changes: list[Change]
    ) -> None:
        """The masters in AdamW's state record, whose bytes are `raw` if it lies on NVMe."""
        record = state.record if self.unit.state is None else self.unit.state.record
        if raw is not None:
            assert isinstance(record, DiskRecord)
            self._put_masters(raw, state, masters)
            await new_version(self.homes, record, raw, changes)
            return

        def apply() -> None:
            assert isinstance(record, HostRecord)
            self._put_masters(record.data, state, masters)
            record.version += 1

        changes.append(Change(apply, _nothing))

    def _put_masters(self, raw: torch.Tensor, state: StateRecord, masters: dict[int, torch.Tensor]) -> None:
        for index, master in masters.items():
            first, flat = self.unit.layout.places[index].elem, master.reshape(-1)
            last = first + flat.numel()
            for piece in state.pieces(StateRecord.MASTER, first, last):
                target = raw[piece.offset : piece.offset + 4 * piece.count].view(torch.float32)
                target.copy_(flat[piece.elem - first : piece.elem - first + piece.count])

    async def _write_params(self, region: str, masters: dict[int, torch.Tensor], changes: list[Change]) -> None:
        """The parameters of one region in their own dtype, wherever they are kept."""
        unit, record = self.unit, self.unit.records.get(region)
        places = unit.layout.places
        mine = {index: master for index, master in masters.items() if places[index].region == region}
        if record is None or not mine:
            return

        def put(raw: torch.Tensor) -> None:
            for index, master in mine.items():
                place = places[index]
                dtype = unit.live[index].dtype
                raw[place.offset : place.offset + place.spec.nbytes].view(dtype).copy_(master.reshape(-1))

        if isinstance(record, DiskRecord):
            raw = aligned_empty(record.nbytes).zero_()
            if any(place.region == region and index not in mine for index, place in enumerate(places)):
                await record.read(0, raw)
            put(raw)
            await new_version(self.homes, record, raw, changes)
            return
        host = record

        def apply() -> None:
            host.version += 1
            put(host.data)

        changes.append(Change(apply, _nothing))


async def read_drafts(unit: Unit) -> tuple[torch.Tensor, dict[int, Kept]]:
    """The bytes of the unit's generic record, and what they are."""
    old: GenericState | None = unit.generic
    raw = aligned_empty(0 if old is None or old.record is None else old.record.nbytes)
    if old is not None and old.record is not None:
        await old.record.read(0, raw)
    return raw, {} if old is None else drafts_of(raw, old.kept)


async def new_record(
    homes: Homes, unit: Unit, raw: torch.Tensor, drafts: dict[int, Kept], what: str, changes: list[Change]
) -> None:
    """The unit's generic record anew, from `drafts`, whose tensors may lie in `raw`; `what` needs memory for it."""
    kept, nbytes = lay_out(drafts)
    homes.share.set_aside(work_bytes(unit, nbytes), f"{what} of unit {unit.name}")
    if nbytes != raw.numel() or not in_place(raw, kept, drafts):
        whole = aligned_empty(nbytes).zero_()
        fill(whole, kept, drafts)
        raw = whole
    new = GenericState(*homes.generic_place(unit, nbytes), kept)
    changes.append(Change(lambda: homes.publish_generic(unit, new), lambda: homes.drop_generic(unit, new)))
    if isinstance(new.record, HostRecord):
        record = new.record

        def copy() -> None:
            record.data.copy_(raw)
            record.version += 1

        changes.append(Change(copy, _nothing))
    elif new.record is not None:
        await new_version(homes, new.record, raw, changes)


async def new_version(homes: Homes, record: DiskRecord, raw: torch.Tensor, changes: list[Change]) -> None:
    """Write a new version of a record in the store."""
    store = record.store
    homes.metrics.add("nvme_written_expected", raw.numel())
    extent, sums = await store.write_new(record.name, raw)
    changes.append(Change(lambda: store.publish(record.name, extent, sums), lambda: store.discard(extent)))


async def replace_states(homes: Homes, unit: Unit, fresh: dict[int, Kept], what: str) -> None:
    """Make `fresh` the states of their parameters, and their masters where it has some."""
    async with homes.share.turn:
        raw, drafts = await read_drafts(unit)
        for index, new in fresh.items():
            if unit.state is not None and new.master is not None:
                await unit.state.write(StateRecord.MASTER, unit.layout.places[index].elem, new.master.reshape(-1))
                unit.master_edited = True
                new.master = None
            elif new.master is None and index in drafts:
                new.master = drafts[index].master
            drafts[index] = new
        changes: list[Change] = []
        try:
            await new_record(homes, unit, raw, drafts, what, changes)
        except BaseException:
            for change in changes:
                change.drop()
            raise
        for change in changes:
            change.apply()


def _nothing() -> None:
    pass
