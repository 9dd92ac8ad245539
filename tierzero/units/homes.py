"""The first bytes of a unit's records: from parameters, from a snapshot, or fresh optimizer state; and the way back.

Note [unchanged data]
A snapshot puts the records that lie in host memory into the store. Each counts its changes; where the count is the one
of the last snapshot, the snapshot's extent is taken once more and nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tierzero.errors import StoreError
from tierzero.storage.extents import Extent
from tierzero.storage.manifest import Snapshot
from tierzero.units.borrowed import FrozenRecord
from tierzero.units.generic import GenericState, kept_from
from tierzero.units.records import DiskRecord, HostRecord, StateRecord
from tierzero.units.state_homes import StateHomes
from tierzero.units.unit import Unit


class Homes(StateHomes):
    """Where the records of one model's units are made; all coroutines run on the engine's loop."""

    async def write_first(self, unit: Unit, params: list[nn.Parameter]) -> None:
        """Give the unit's records their first bytes, from real parameters; those of a meta model stay blank."""
        for region in unit.layout.regions:
            nbytes = unit.layout.region_bytes(region)
            members = [(index, place) for index, place in enumerate(unit.layout.places) if place.region == region]
            unit.blank.update(index for index, _ in members if params[index].is_meta)
            record = unit.records.get(region)
            if record is None:
                assert self.store is not None
                blank = len(members) == sum(params[index].is_meta for index, _ in members)
                if blank and region == "frozen":  # it may stay in the file that it is loaded from
                    unit.records[region] = FrozenRecord(self.store, f"{unit.name}/{region}", nbytes, self.metrics)
                    continue
                record = unit.records[region] = DiskRecord(self.store, f"{unit.name}/{region}", nbytes, self.metrics)
                if blank:
                    self.store.create(record.name, nbytes)
                    continue
                data = torch.zeros(nbytes, dtype=torch.uint8)
            else:
                assert isinstance(record, HostRecord)
                record.version += 1
                data = record.data
                data.zero_()
            for index, place in members:
                if not params[index].is_meta and place.spec.nbytes:
                    raw = params[index].detach().to("cpu").contiguous().view(-1).view(torch.uint8)
                    data[place.offset : place.offset + place.spec.nbytes].copy_(raw)
            if isinstance(record, DiskRecord):
                self.metrics.add("nvme_written_expected", nbytes)
                await self.store.put(record.name, data)  # type: ignore[union-attr]

    async def reopen(self, unit: Unit, split: bool) -> None:
        """Take the unit's records from the snapshot to wherever they are placed now. `split`: its master is."""
        store = self.store
        assert store is not None
        name = f"{unit.name}/state"
        gone = []
        borrowed = store.resumed.meta["engine"].get("borrowed", {}) if store.resumed is not None else {}
        if name in store.current:
            assert self.format is not None
            format = replace(self.format, master="split" if split else "f32")
            on_disk = DiskRecord(store, name, format.record_bytes(unit.layout.elements, self.chunk), self.metrics)
            high = DiskRecord(store, f"{unit.name}/param", unit.layout.region_bytes("param"), self.metrics)
            unit.state = StateRecord(on_disk, unit.layout.elements, self.chunk, format, high if split else None)
        for region in unit.layout.regions:
            stored = f"{unit.name}/{region}"
            host = unit.records.get(region)
            if stored in store.current:
                record_on_disk = DiskRecord(store, stored, unit.layout.region_bytes(region), self.metrics)
                if isinstance(host, HostRecord):
                    await record_on_disk.read(0, host.data)
                    self.note(stored, host)
                    gone.append(stored)
                else:
                    unit.records[region] = record_on_disk
            elif stored in borrowed:
                await self._borrow_again(unit, region, borrowed[stored])
            elif region == "fp32" and unit.state is not None:
                if host is not None:
                    assert isinstance(host, HostRecord)
                    await unit.state.read(StateRecord.MASTER, 0, host.data.view(torch.float32))
            else:
                raise StoreError(
                    f"the snapshot in {store.directory} lacks the record {stored!r}; it was not written by a whole "
                    "snapshot"
                )
        if unit.state is not None:
            unit.state = await self.resettle(unit, unit.state)
            if not unit.state.on_disk:
                gone.append(name)
        for stored in gone:
            store.remove(stored)

    async def _borrow_again(self, unit: Unit, region: str, described: dict[str, Any]) -> None:
        """Take a region from the files that the snapshot names."""
        there, host = self.files.reopened(described), unit.records.get(region)
        if isinstance(host, HostRecord):
            self.metrics.add("nvme_read_expected", host.nbytes)
            await there.read(0, host.data)
            host.origin = (host.version, there)
        else:
            assert self.store is not None
            nbytes = unit.layout.region_bytes(region)
            record = unit.records[region] = FrozenRecord(self.store, f"{unit.name}/{region}", nbytes, self.metrics)
            record.borrow(there)

    async def settle_borrowed(self, units: list[Unit]) -> None:
        """Copy into the store what a snapshot could not name."""
        for unit in units:
            for record in unit.records.values():
                if isinstance(record, FrozenRecord):
                    await record.settle()

    def borrowed(self, units: list[Unit]) -> dict[str, Any]:
        """What a snapshot names in place of holding it, by record."""
        found = {}
        for unit in units:
            for region, record in unit.records.items():
                if isinstance(record, FrozenRecord) and record.borrowed is not None:
                    found[record.name] = record.borrowed.describe()
                elif isinstance(record, HostRecord) and _as_in_file(record):
                    found[f"{unit.name}/{region}"] = record.origin[1].describe()  # type: ignore[index]
        return found

    # -- states of other optimizers; see generic.py

    def generic_place(self, unit: Unit, nbytes: int) -> tuple[HostRecord | DiskRecord | None, Any]:
        """A record of `nbytes` for the unit's generic state, and its memory: where AdamW's state would go, on NVMe if
        the host budget has no room. What the unit has now serves again if it fits.
        """
        if nbytes == 0:
            return None, None
        old: GenericState | None = unit.generic
        before = old.record if old is not None else None
        if old is not None and isinstance(before, HostRecord) and before.nbytes == nbytes:
            return before, old.block
        block = self.state_block(unit, nbytes)
        if block is not None:
            record = HostRecord(block.tensor[:nbytes])
            record.version = before.version if isinstance(before, HostRecord) else 0
            return record, block
        assert self.store is not None
        return DiskRecord(self.store, f"{unit.name}/optim", nbytes, self.metrics), None

    async def move_out(self, unit: Unit) -> None:
        """Take the unit's parameters from host memory to NVMe."""
        store, block = self.store, unit.host_flat
        assert store is not None
        assert block is not None
        if unit.arrival is not None:
            await asyncio.wait([unit.arrival])
        if unit.ready_event is not None:
            unit.ready_event.synchronize()  # a copy to the device may still read them
        for region, record in list(unit.records.items()):
            if region == "fp32" and unit.state is not None:  # the masters in its record
                del unit.records[region]
                continue
            assert isinstance(record, HostRecord)
            on_disk = DiskRecord(store, f"{unit.name}/{region}", record.nbytes, self.metrics)
            self.metrics.add("nvme_written_expected", record.nbytes)
            await store.put(on_disk.name, record.data)
            unit.records[region] = on_disk
        unit.host_flat = None
        block.free()

    def publish_generic(self, unit: Unit, new: GenericState) -> None:
        """Make `new` the unit's generic state."""
        old, unit.generic = unit.generic, new
        self.drop_generic(unit, old)

    def drop_generic(self, unit: Unit, gone: GenericState | None) -> None:
        """Give up what only `gone` has."""
        now: GenericState | None = unit.generic
        if gone is None or gone is now:
            return
        if gone.block is not None and (now is None or gone.block is not now.block):
            gone.block.free()
        record = gone.record if now is not None and not isinstance(now.record, DiskRecord) else None
        if isinstance(record, DiskRecord) and record.name in record.store.current:
            record.store.remove(record.name)

    async def reopen_generic(self, unit: Unit) -> None:
        """Take the unit's generic state from the snapshot, if it has one; all units have their memory by now."""
        assert self.store is not None
        assert self.store.resumed is not None
        described = self.store.resumed.meta["engine"].get("generic", {}).get(unit.name)
        if described is None:
            return
        record, block = self.generic_place(unit, described["nbytes"])
        if isinstance(record, HostRecord):
            on_disk = DiskRecord(self.store, f"{unit.name}/optim", record.nbytes, self.metrics)
            await on_disk.read(0, record.data)
            self.note(on_disk.name, record)
            self.store.remove(on_disk.name)
        unit.generic = GenericState(record, block, kept_from(described))

    def host_bytes(self, units: list[Unit], *, changed: bool = False) -> int:
        """Bytes of the records that lie in host memory; with `changed`, of those that `flush_host` would write."""
        return sum(record.nbytes for name, record in _in_host(units) if not (changed and self._unchanged(name, record)))

    def _unchanged(self, name: str, record: HostRecord) -> bool:
        return name in self._saved and self._saved[name][0] == record.version

    def equals(self, name: str, record: HostRecord, extent: Extent) -> bool:
        """Whether the record has not changed since it was what `extent` of the last snapshot holds."""
        return self._saved.get(name) == (record.version, extent)

    async def flush_host(self, units: list[Unit], flushed: dict[str, int]) -> None:
        """Make the records that lie in host memory current in the store too, so that a snapshot holds everything.

        Their names there and versions are added to `flushed`, one by one. See Note [unchanged data].
        """
        store = self.store
        assert store is not None
        for name, record in _in_host(units):
            version = record.version
            if not self._unchanged(name, record) or not store.recall(name, self._saved[name][1]):
                self.metrics.add("nvme_written_expected", record.nbytes)
                await store.put(name, record.data)
            flushed[name] = version

    def saved(self, flushed: dict[str, int], snapshot: Snapshot) -> None:
        """`snapshot`, committed, holds what `flush_host` had flushed."""
        self._saved = {name: (version, snapshot.records[name][0]) for name, version in flushed.items()}


def _in_host(units: list[Unit]) -> Iterator[tuple[str, HostRecord]]:
    """The records of `units` that lie in host memory, by their names in the store. A float32 parameter with optimizer
    state is its master there; what is in a file that a snapshot can name needs no place there.
    """
    for unit in units:
        for region, record in unit.records.items():
            if not isinstance(record, HostRecord) or _as_in_file(record):
                continue
            if not (region == "fp32" and unit.state is not None):
                yield f"{unit.name}/{region}", record
        if unit.state is not None and isinstance(unit.state.record, HostRecord):
            yield f"{unit.name}/state", unit.state.record
        if unit.generic is not None and isinstance(unit.generic.record, HostRecord):
            yield f"{unit.name}/optim", unit.generic.record


def _as_in_file(record: HostRecord) -> bool:
    """Whether its bytes are those of a file that is still in its place."""
    return record.origin is not None and record.origin[0] == record.version and bool(record.origin[1].in_place)
