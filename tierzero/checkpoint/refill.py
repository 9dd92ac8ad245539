"""Tensors of a checkpoint into the records of a unit: whole regions of parameters, and AdamW's states chunk by chunk.

Note [staged]
What a unit has on the drive is written as a new version beside the old one, while its bytes are compared with their
checksums, and becomes current only when all of the load is there: so it needs no reading before. What lies in host
memory, or changes in part, is changed where it is; see undo.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

import torch

from tierzero.checkpoint.frozen_unit import MOMENTS
from tierzero.paging.malloc import mapped
from tierzero.storage.blocks import WINDOW, in_window
from tierzero.storage.checksum import Sums
from tierzero.storage.extents import Extent
from tierzero.storage.store import Store
from tierzero.tiers.base import aligned_empty
from tierzero.units.layout import Place
from tierzero.units.records import DiskRecord, HostRecord, StateRecord
from tierzero.units.unit import Unit

MASTER = "master"
PART = 2 << 20  # bytes of a region that are made at once
_MASTERS = 256 << 10  # float32 values that are replaced at once


class Source(Protocol):
    """A tensor to read from, each element once and in any order."""

    dtype: torch.dtype

    async def read_async(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` (one-dimensional, of this dtype) with the elements from `first` on."""
        ...


class Staged:
    """New versions of records in `store` that nobody sees yet."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._found: list[tuple[Unit, DiskRecord, Extent, Sums]] = []

    def add(self, unit: Unit, record: DiskRecord, version: tuple[Extent, Sums]) -> None:
        """`version` is written and was not published."""
        self._found.append((unit, record, *version))

    def has(self, record: object) -> bool:
        """Whether there is a new version of `record`."""
        return any(record is there for _, there, _, _ in self._found)

    def publish(self, unit: Unit) -> None:
        """Make those of `unit` current."""
        mine = [one for one in self._found if one[0] is unit]
        self._found = [one for one in self._found if one[0] is not unit]
        for _, record, extent, sums in mine:
            record.replace(extent, sums)

    def discard(self) -> None:
        """Give up what was not published."""
        while self._found:
            self.store.discard(self._found.pop()[2])


class Memory:
    """Memory for the parts of a record: what one part had serves again WINDOW parts later."""

    def __init__(self) -> None:
        self._there: dict[int, torch.Tensor] = {}

    def of(self, number: int, nbytes: int) -> torch.Tensor:
        """uint8[nbytes], as many for every part."""
        found = self._there.get(number % WINDOW)
        if found is None:
            with mapped():
                found = self._there[number % WINDOW] = aligned_empty(nbytes)
        return found


class Region:
    """One region of a unit's parameters, `sources` by parameter, made in parts. Bytes between parameters are zero."""

    def __init__(self, unit: Unit, region: str, sources: Mapping[int, Source]) -> None:
        self.unit = unit
        self.nbytes = unit.layout.region_bytes(region)
        self.cuts = range(0, self.nbytes, PART)
        places = unit.layout.places
        self._sources = [(places[i], unit.live[i].dtype, one) for i, one in sources.items() if places[i].spec.nbytes]
        self._memory = Memory()

    async def make(self, number: int) -> torch.Tensor:
        """The part from cuts[number] on; see blocks.fill_extent."""
        start = self.cuts[number]
        part = self._memory.of(number, min(PART, self.nbytes))[: min(PART, self.nbytes - start)]
        await self.fill(start, part)
        return part

    async def fill(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8[n]) with the bytes from `start` on."""
        end, done, reads = start + out.numel(), start, []
        for place, dtype, source in sorted(self._sources, key=lambda one: one[0].offset):
            low, high = max(start, place.offset), min(end, place.offset + place.spec.nbytes)
            if low < high:
                out[done - start : low - start].zero_()
                first = (low - place.offset) // place.spec.itemsize
                reads.append(_into(source, first, out[low - start : high - start].view(dtype)))
                done = high
        out[done - start :].zero_()
        await all_of(reads)


async def new_region(unit: Unit, region: str, sources: Mapping[int, Source]) -> tuple[Extent, Sums]:
    """A new version of a region that lies on the drive, which is not published. On failure nothing is left."""
    record, made = unit.records[region], Region(unit, region, sources)
    assert isinstance(record, DiskRecord)
    version: tuple[Extent, Sums] = await unit.owner.homes.new_version(record.name, made.nbytes, made.cuts, made.make)
    return version


async def refill_region(unit: Unit, region: str, sources: Mapping[int, Source]) -> None:
    """Replace a region where it is."""
    record, made = unit.records[region], Region(unit, region, sources)
    if isinstance(record, DiskRecord):

        async def one(number: int) -> None:
            await record.write(made.cuts[number], await made.make(number))
    else:
        data = record.data
        record.version += 1

        async def one(number: int) -> None:
            await made.fill(made.cuts[number], data[made.cuts[number] : made.cuts[number] + PART])

    await in_window(len(made.cuts), one)


async def refill_masters(unit: Unit, sources: Mapping[int, Source]) -> None:
    """Replace the float32 values that the unit's states hold by the tensors as its parameters have them."""
    state = unit.state
    assert state is not None
    places = unit.layout.places
    parts = [
        (index, first, min(_MASTERS, places[index].spec.numel - first))
        for index in sources
        if places[index].elem >= 0
        for first in range(0, places[index].spec.numel, _MASTERS)
    ]

    async def one(number: int) -> None:
        index, first, count = parts[number]
        value = torch.empty(count, dtype=unit.live[index].dtype)
        await _into(sources[index], first, value)
        await state.write(StateRecord.MASTER, places[index].elem + first, value.float())

    await in_window(len(parts), one)


class InMemory:
    """A parameter whose region, which lies in host memory, was filled before; see Source."""

    def __init__(self, unit: Unit, index: int) -> None:
        place, self.dtype = unit.layout.places[index], unit.live[index].dtype
        record = unit.records[place.region]
        assert isinstance(record, HostRecord)
        self._values = record.data[place.offset : place.offset + place.spec.nbytes].view(self.dtype)

    async def read_async(self, first: int, out: torch.Tensor) -> None:
        """Copy the elements from `first` on into `out`."""
        out.copy_(self._values[first : first + out.numel()])


class States:
    """The parts of a unit's state record, chunk by chunk, from a checkpoint. `sources`: by parameter and part; what is
    not there is as after the first step's preparation: masters are the parameters, moments are zero. `others`:
    parameters of other optimizers, whose states stay.
    """

    def __init__(self, unit: Unit, sources: dict[int, dict[str, Source]], others: set[int]) -> None:
        assert unit.state is not None
        self.unit = unit
        self.state = unit.state
        self.others = others
        parts = (MASTER, *MOMENTS)[: unit.state.format.parts]
        self.sources = {index: [own.get(part) for part in parts] for index, own in sources.items()}
        self._memory = Memory()

    async def planes(self, first: int, last: int) -> list[torch.Tensor]:
        """See state_homes' Planes."""
        kept = any(self._overlaps(self.unit.layout.places[index], first, last) for index in self.others)
        if kept:
            planes = await self.state.planes(first)
        else:
            planes = self._planes(first, last)
        reads, left = [], len(planes) * (last - first)
        for index, sources in self.sources.items():
            place = self.unit.layout.places[index]
            if self._overlaps(place, first, last):
                low, high = max(first, place.elem), min(last, place.elem + place.spec.numel)
                cut = slice(low - first, high - first)
                for source, plane in zip(sources, planes, strict=True):
                    if source is not None:
                        reads.append((source, low - place.elem, plane[cut]))
                        left -= high - low
        if left and not kept:
            for plane in planes:
                plane.zero_()
        await all_of([_into(*read) for read in reads])
        return planes

    def _planes(self, first: int, last: int) -> list[torch.Tensor]:
        """Memory for them: where they will be, or some that serves again."""
        chunk, parts, record = min(self.state.chunk, self.state.elements), self.state.format.parts, self.state.record
        if isinstance(record, HostRecord) and self.state.format.plain:
            start = first // self.state.chunk * self.state.format.chunk_bytes(self.state.chunk)
            flat = record.data[start : start + 4 * parts * (last - first)].view(torch.float32)
        else:
            flat = self._memory.of(first // self.state.chunk, 4 * chunk * parts).view(torch.float32)
        return list(flat[: parts * (last - first)].view(parts, last - first))

    def _overlaps(self, place: Place, first: int, last: int) -> bool:
        return place.elem >= 0 and place.elem < last and first < place.elem + place.spec.numel


async def all_of(reads: Sequence[Awaitable[None]]) -> None:
    """All of them at once; none goes on after an error."""
    for done in await asyncio.gather(*reads, return_exceptions=True):
        if isinstance(done, BaseException):
            raise done


async def _into(source: Source, first: int, out: torch.Tensor) -> None:
    """Fill `out` from `source`, cast."""
    if source.dtype == out.dtype:
        await source.read_async(first, out)
    else:
        with mapped():
            value = torch.empty(out.numel(), dtype=source.dtype)
        await source.read_async(first, value)
        out.copy_(value)
