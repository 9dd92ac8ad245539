"""Whole regions of a unit's parameters out of files in which each tensor lies in one run: read and written at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tierzero.checkpoint.refill import Region, Source, new_region, refill_region
from tierzero.checkpoint.stored import Stored
from tierzero.errors import NO_ROOM
from tierzero.storage.blocks import in_window
from tierzero.tiers.base import settle
from tierzero.tiers.readonly import ReadOnlyFile
from tierzero.units.records import DiskRecord, StateRecord
from tierzero.units.unit import Unit

_THREADS = 4  # that read: as many requests the drive has at once


class ByRegion:
    """Fills units, one after the other; a context manager."""

    def __init__(self) -> None:
        self._files: dict[Path, ReadOnlyFile] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierzero-load")

    def fill(self, unit: Unit, stored: Mapping[int, Stored]) -> set[int]:
        """Replace the parameters of `unit` that `stored` has, cast, and their masters, where it has whole regions;
        whose they are. None of a unit whose states another optimizer than AdamW keeps: its masters change as a whole.
        """
        if unit.generic is not None:
            return set()
        regions: dict[str, set[int]] = {}
        for index, place in enumerate(unit.layout.places):
            if place.spec.nbytes:
                regions.setdefault(place.region, set()).add(index)
        fits = {index for index, one in stored.items() if one.whole is not None}
        chosen = [name for name, members in regions.items() if members <= fits]
        done = {index for name in chosen for index in regions[name]}
        if not done:
            return done
        sources = self._sources({index: stored[index] for index in done})
        if unit.state is not None:
            trained = {index for index in done if unit.layout.places[index].elem >= 0}
            sources |= {index: _WithMaster(sources[index], unit, index) for index in trained}

        async def fill() -> None:
            for name in chosen:
                await _fill(unit, name, {index: sources[index] for index in regions[name]})

        unit.at_rest(fill(), changes=True)
        unit.blank -= done
        return done

    def _sources(self, stored: Mapping[int, Stored]) -> dict[int, Source]:
        places = {index: one.whole for index, one in stored.items() if one.whole is not None}
        wanted = {path for path, _ in places.values()}
        for path in self._files.keys() - wanted:
            self._files.pop(path).close()
        for path in wanted - self._files.keys():
            self._files[path] = ReadOnlyFile(path)
        return {
            index: _Run(self._files[path], at, stored[index].dtype, self._pool) for index, (path, at) in places.items()
        }

    def __enter__(self) -> ByRegion:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        while self._files:
            self._files.popitem()[1].close()


class _Run:
    """A tensor that lies in one run from byte `at` of `file` on; see refill.Source."""

    def __init__(self, file: ReadOnlyFile, at: int, dtype: torch.dtype, pool: ThreadPoolExecutor) -> None:
        self.file = file
        self.at = at
        self.dtype = dtype
        self.pool = pool

    async def read_async(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `first` on."""
        loop, at = asyncio.get_running_loop(), self.at + first * self.dtype.itemsize
        await settle(loop.run_in_executor(self.pool, self.file.read, at, out.view(torch.uint8)))


class _WithMaster:
    """A trained parameter from `source`: what is read becomes its master too, as it passes; see refill.Source."""

    def __init__(self, source: Source, unit: Unit, index: int) -> None:
        self.source = source
        self.dtype = source.dtype
        self.unit = unit
        self.index = index

    async def read_async(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements from `first` on."""
        await self.source.read_async(first, out)
        unit, place, state = self.unit, self.unit.layout.places[self.index], self.unit.state
        assert state is not None
        values = out.to(unit.live[self.index].dtype).float()
        await state.write(StateRecord.MASTER, place.elem + first, values)


async def _fill(unit: Unit, region: str, sources: Mapping[int, Source]) -> None:
    """A region, on the drive by a new version where there is room for one."""
    record = unit.records.get(region)
    split = region == "param" and unit.state is not None and unit.state.format.master == "split"
    if record is None or split:  # float32 parameters that are their masters; those that are written with their masters
        masters = Region(unit, region, sources)

        async def one(number: int) -> None:
            await masters.make(number)

        await in_window(len(masters.cuts), one)
        return
    if isinstance(record, DiskRecord):
        try:
            version = await new_region(unit, region, sources)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        else:
            record.replace(*version)
            return
    await refill_region(unit, region, sources)
