"""A checkpoint's tensors into the records of a unit: parameters in parts, AdamW's states chunk by chunk."""

from __future__ import annotations

import asyncio

import torch

from tierzero.checkpoint.frozen_unit import MOMENTS
from tierzero.checkpoint.reader import InOrder, Reader
from tierzero.layout import Place
from tierzero.parts import parts_of
from tierzero.records import StateRecord
from tierzero.unit import Unit

MASTER = "master"


async def refill_params(reader: Reader, unit: Unit, keys: list[str], *, masters: bool) -> None:
    """Replace the parameters of `unit` by the tensors `keys`, cast; with `masters` also the float32 values that its
    optimizer states hold. One part is read while another is written.
    """
    for index, (place, key) in enumerate(zip(unit.layout.places, keys, strict=True)):
        source = InOrder(reader, key)
        parts = list(parts_of(place.spec.numel, source.dtype.itemsize))
        coming: asyncio.Task[torch.Tensor] | None = None
        try:
            for number, (first, _) in enumerate(parts):
                value = await (coming or _next(source, parts[number][1]))
                more = number + 1 < len(parts)
                coming = asyncio.ensure_future(_next(source, parts[number + 1][1])) if more else None
                await _write(unit, index, first, value.to(unit.live[index].dtype), masters)
        finally:
            if coming is not None:
                await asyncio.wait([coming])
                _ = coming.cancelled() or coming.exception()  # seen: the error before it goes first
        unit.blank.discard(index)
    unit.master_edited = True


async def _next(source: InOrder, count: int) -> torch.Tensor:
    out = torch.empty(count, dtype=source.dtype)
    await source.read_async(out)
    return out


async def _write(unit: Unit, index: int, first: int, value: torch.Tensor, masters: bool) -> None:
    place = unit.layout.places[index]
    record = unit.records.get(place.region)
    if value.numel() and record is not None:
        await record.write(place.offset + first * place.spec.itemsize, value.view(torch.uint8))
    if value.numel() and masters and unit.state is not None and place.elem >= 0:
        await unit.state.write(StateRecord.MASTER, place.elem + first, value.float())


class States:
    """The parts of a unit's state record, chunk by chunk, from a checkpoint. `keys`: by parameter and part; what is not
    there is as after the first step's preparation: masters are the parameters, moments are zero. `others`: parameters
    of other optimizers, whose states stay.
    """

    def __init__(self, reader: Reader, unit: Unit, keys: dict[int, dict[str, str]], others: set[int]) -> None:
        assert unit.state is not None
        self.unit = unit
        self.state = unit.state
        self.others = others
        parts = (MASTER, *MOMENTS)[: unit.state.format.parts]
        self.sources = {
            index: [InOrder(reader, own[part]) if part in own else None for part in parts]
            for index, own in keys.items()
        }

    async def planes(self, first: int, last: int) -> list[torch.Tensor]:
        """See state_homes' Planes."""
        if any(self._overlaps(self.unit.layout.places[index], first, last) for index in self.others):
            planes = await self.state.planes(first)
        else:
            planes = [torch.zeros(last - first) for _ in range(self.state.format.parts)]
        reads = []
        for index, sources in self.sources.items():
            place = self.unit.layout.places[index]
            if self._overlaps(place, first, last):
                low, high = max(first, place.elem), min(last, place.elem + place.spec.numel)
                cut = slice(low - first, high - first)
                reads += [_into(source, plane[cut]) for source, plane in zip(sources, planes, strict=True)]
        for done in await asyncio.gather(*reads, return_exceptions=True):
            if isinstance(done, BaseException):
                raise done
        return planes

    def _overlaps(self, place: Place, first: int, last: int) -> bool:
        return place.elem >= 0 and place.elem < last and first < place.elem + place.spec.numel


async def _into(source: InOrder | None, out: torch.Tensor) -> None:
    if source is None:
        out.zero_()
    elif source.dtype == out.dtype:
        await source.read_async(out)
    else:
        out.copy_(await _next(source, out.numel()))


async def refill_states(reader: Reader, unit: Unit, keys: dict[int, dict[str, str]], others: set[int]) -> None:
    """Replace the states of a unit's parameters; see States."""
    await unit.owner.homes.refill(unit, States(reader, unit, keys, others).planes)
    unit.master_edited = True
