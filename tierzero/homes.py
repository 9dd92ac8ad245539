"""The first bytes of a unit's records: from parameters, from a snapshot, or fresh optimizer state; and the way back.

Note [unchanged data]
A commit puts the records that lie in host memory into the store. Each counts its changes; where the count is the one
of the last snapshot, the snapshot's extent is taken once more and nothing is written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from tierzero.checksum import Sums, checksum, combine
from tierzero.errors import StoreError
from tierzero.extents import Extent
from tierzero.manifest import Snapshot
from tierzero.metrics import Metrics
from tierzero.records import DiskRecord, HostRecord, StateRecord, pack
from tierzero.share import HostShare
from tierzero.state_format import StateFormat
from tierzero.store import Store
from tierzero.tiers.host import HostArena
from tierzero.unit import Unit

Planes = Callable[[int, int], Awaitable[list[torch.Tensor]]]  # the float32 parts of a chunk from its first element, end


class Homes:
    """Where the records of one model's units are made; all coroutines run on the engine's loop."""

    def __init__(self, store: Store | None, arena: HostArena, metrics: Metrics, chunk: int) -> None:
        self.store = store
        self.arena = arena
        self.share = HostShare(arena, metrics.host_budget)
        self.metrics = metrics
        self.chunk = chunk
        self.format: StateFormat | None = None  # of the model's optimizer states; None before there are any
        self._saved: dict[str, tuple[int, Extent]] = {}  # name -> version of the host record, where a snapshot has it

    async def write_first(self, unit: Unit, params: list[nn.Parameter]) -> None:
        """Give the unit's records their first bytes, from real parameters; those of a meta model stay blank."""
        for region in unit.layout.regions:
            nbytes = unit.layout.region_bytes(region)
            members = [(index, place) for index, place in enumerate(unit.layout.places) if place.region == region]
            unit.blank.update(index for index, _ in members if params[index].is_meta)
            record = unit.records.get(region)
            if record is None:
                assert self.store is not None
                record = unit.records[region] = DiskRecord(self.store, f"{unit.name}/{region}", nbytes, self.metrics)
                if len(members) == sum(params[index].is_meta for index, _ in members):
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

    async def create_state(self, unit: Unit) -> None:
        """Give the unit a state record: masters from the parameters, zero moments."""
        format = self.format_of(unit)

        async def planes(first: int, last: int) -> list[torch.Tensor]:
            moments = [torch.zeros(last - first) for _ in range(format.parts - 1)]
            return [await self._master(unit, first, last), *moments]

        unit.state = await self._fill(unit, format, planes)
        old = unit.records.get("fp32")
        if isinstance(old, DiskRecord):  # from here on a float32 parameter is its master
            del unit.records["fp32"]
            old.store.remove(old.name)

    def format_of(self, unit: Unit) -> StateFormat:
        """What the unit's state record is made of."""
        assert self.format is not None
        return self.format.of_unit(unit.layout, unit.host_flat is not None)

    async def _fill(self, unit: Unit, format: StateFormat, planes: Planes) -> StateRecord:
        """A new state record where the unit's state goes, from the parts of its chunks."""
        chunk, name = self.chunk, f"{unit.name}/state"
        elements = unit.layout.elements
        nbytes = format.record_bytes(elements, chunk)
        params = unit.records.get("param") if format.master == "split" else None
        if unit.state_host:
            host = self._host_record(unit, nbytes)
            at = 0
            for first in range(0, elements, chunk):
                raw, _ = pack(format, chunk, await planes(first, min(first + chunk, elements)))
                host.data[at : at + raw.numel()].copy_(raw)
                at += raw.numel()
            return StateRecord(host, elements, chunk, format, params)
        assert self.store is not None
        extent = self.store.allocate(nbytes, name)
        try:
            sums: Sums = (0, 0)
            at = 0
            for first in range(0, elements, chunk):
                raw, _ = pack(format, chunk, await planes(first, min(first + chunk, elements)))
                await self.store.file.write(extent.offset + at, raw)
                sums = combine(sums, checksum(raw, at // 4))
                at += raw.numel()
        except BaseException:
            self.store.discard(extent)
            raise
        self.metrics.add("nvme_written_expected", nbytes)
        self.store.publish(name, extent, sums)
        return StateRecord(DiskRecord(self.store, name, nbytes, self.metrics), elements, chunk, format, params)

    def _host_record(self, unit: Unit, nbytes: int) -> HostRecord:
        block = self.share.block(nbytes, f"optimizer state of unit {unit.name}")
        return HostRecord(block.tensor[:nbytes])

    async def _master(self, unit: Unit, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) of the unit's parameters in float32, zero where there is none."""
        out = torch.zeros(last - first, dtype=torch.float32)
        for index, place in enumerate(unit.layout.places):
            lo, hi = max(first, place.elem), min(last, place.elem + place.spec.numel)
            if place.elem < 0 or lo >= hi:
                continue
            part = torch.empty(hi - lo, dtype=unit.live[index].dtype)
            await unit.read_region(
                place.region, place.offset + (lo - place.elem) * place.spec.itemsize, part.view(torch.uint8)
            )
            out[lo - first : hi - first] = part
        return out

    async def reopen(self, unit: Unit, split: bool) -> None:
        """Take the unit's records from the snapshot to wherever they are placed now. `split`: its master is."""
        store = self.store
        assert store is not None
        name = f"{unit.name}/state"
        gone = []
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
                    self._note(stored, host)
                    gone.append(stored)
                else:
                    unit.records[region] = record_on_disk
            elif region == "fp32" and unit.state is not None:
                if host is not None:
                    assert isinstance(host, HostRecord)
                    await unit.state.read(StateRecord.MASTER, 0, host.data.view(torch.float32))
            else:
                raise StoreError(
                    f"the snapshot in {store.directory} lacks the record {stored!r}; it was not written by a whole "
                    "commit"
                )
        if unit.state is not None:
            unit.state = await self._resettle(unit, unit.state)
            if not unit.state.on_disk:
                gone.append(name)
        for stored in gone:
            store.remove(stored)

    async def _resettle(self, unit: Unit, old: StateRecord) -> StateRecord:
        """The snapshot's state record where the unit's state goes now, and with the master that goes there."""
        format = self.format_of(unit)
        if format != old.format:
            planes = lambda first, last: old.planes(first)
            return await self._fill(unit, format, planes)
        record = old.record
        if unit.state_host:
            record = self._host_record(unit, old.record.nbytes)
            await old.record.read(0, record.data)
            self._note(f"{unit.name}/state", record)
        params = unit.records["param"] if old.params is not None else None
        return StateRecord(record, old.elements, old.chunk, format, params)

    def _note(self, name: str, record: HostRecord) -> None:
        """The host record now equals the record `name` of the snapshot that was opened."""
        assert self.store is not None
        self._saved[name] = (record.version, self.store.current[name])

    def host_bytes(self, units: list[Unit], *, changed: bool = False) -> int:
        """Bytes of the records that lie in host memory; with `changed`, of those that `flush_host` would write."""
        return sum(record.nbytes for name, record in _in_host(units) if not (changed and self._unchanged(name, record)))

    def _unchanged(self, name: str, record: HostRecord) -> bool:
        return name in self._saved and self._saved[name][0] == record.version

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
    state is its master there.
    """
    for unit in units:
        for region, record in unit.records.items():
            if isinstance(record, HostRecord) and not (region == "fp32" and unit.state is not None):
                yield f"{unit.name}/{region}", record
        if unit.state is not None and isinstance(unit.state.record, HostRecord):
            yield f"{unit.name}/state", unit.state.record
