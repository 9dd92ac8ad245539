"""The first bytes of a unit's state record, from its parameters or from a snapshot, in the model's format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import torch

from tierzero.errors import BudgetError
from tierzero.monitoring.metrics import Metrics
from tierzero.storage.blocks import fill_extent, in_window
from tierzero.storage.checksum import Sums
from tierzero.storage.extents import Extent
from tierzero.storage.store import Store
from tierzero.tiers.host import Block, HostArena
from tierzero.units.borrowed import BorrowedFiles
from tierzero.units.records import DiskRecord, HostRecord, StateRecord, pack
from tierzero.units.share import HostShare, LooseBlock
from tierzero.units.state_format import StateFormat
from tierzero.units.unit import Unit

# the float32 parts of a chunk from its first element, end; their memory may serve again blocks.WINDOW calls later, and
# may be that of a record in host memory itself
Planes = Callable[[int, int], Awaitable[list[torch.Tensor]]]
Make = Callable[[int], Awaitable[torch.Tensor]]


class StateHomes:
    """Where the state records of one model's units are made; all coroutines run on the engine's loop."""

    def __init__(self, store: Store | None, arena: HostArena, metrics: Metrics, chunk: int) -> None:
        self.store = store
        self.arena = arena
        self.share = HostShare(arena, metrics.host_budget)
        self.metrics = metrics
        self.chunk = chunk
        self.files = BorrowedFiles()
        self.format: StateFormat | None = None  # of the model's optimizer states; None before there are any
        self._saved: dict[str, tuple[int, Extent]] = {}  # name -> version of the host record, where a snapshot has it

    async def create_state(self, unit: Unit) -> None:
        """Give the unit a state record, or the one that it has its first bytes again: masters from the parameters, zero
        moments.
        """
        format = self.format_of(unit) if unit.state is None else unit.state.format

        async def planes(first: int, last: int) -> list[torch.Tensor]:
            moments = [torch.zeros(last - first) for _ in range(format.parts - 1)]
            return [await self._master(unit, first, last), *moments]

        if unit.state is None:
            unit.state = await self._fill(unit, format, planes)
        else:
            await self.refill(unit, planes)
        if isinstance(unit.state.record, HostRecord):
            unit.state.untouched = unit.state.record.version
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
        block = self.state_block(unit, nbytes)
        if block is not None:
            host = HostRecord(block.tensor[:nbytes])
            await self._fill_memory(host, elements, format, planes)
            return StateRecord(host, elements, chunk, format, params)
        await self._fill_extent(name, elements, format, planes)
        assert self.store is not None
        return StateRecord(DiskRecord(self.store, name, nbytes, self.metrics), elements, chunk, format, params)

    async def refill(self, unit: Unit, planes: Planes) -> None:
        """Replace the unit's whole state, on NVMe all or nothing. With a split master the parameters must be those that
        go with it.
        """
        state = unit.state
        assert state is not None
        if isinstance(state.record, HostRecord):
            await self._fill_memory(state.record, state.elements, state.format, planes)
        else:
            await self._fill_extent(state.record.name, state.elements, state.format, planes)

    async def _fill_memory(self, host: HostRecord, elements: int, format: StateFormat, planes: Planes) -> None:
        host.version += 1
        size, chunk = format.chunk_bytes(self.chunk), self.chunk

        async def one(number: int) -> None:
            first = number * chunk
            raw, _ = pack(format, chunk, await planes(first, min(first + chunk, elements)))
            there = host.data[number * size : number * size + raw.numel()]
            if there.data_ptr() != raw.data_ptr():
                there.copy_(raw)

        await in_window(-(-elements // chunk), one)

    async def _fill_extent(self, name: str, elements: int, format: StateFormat, planes: Planes) -> None:
        """A new version of a record in the store, published."""
        extent, sums = await self.new_state(name, elements, format, planes)
        assert self.store is not None
        self.store.publish(name, extent, sums)

    async def new_state(self, name: str, elements: int, format: StateFormat, planes: Planes) -> tuple[Extent, Sums]:
        """A new version of a state record in the store, not published; on failure nothing is left. Some chunks are
        made and written at a time.
        """
        assert self.store is not None
        nbytes, size, chunk = format.record_bytes(elements, self.chunk), format.chunk_bytes(self.chunk), self.chunk

        async def make(number: int) -> torch.Tensor:
            first = number * chunk
            return pack(format, chunk, await planes(first, min(first + chunk, elements)))[0]

        return await self.new_version(name, nbytes, range(0, -(-elements // chunk) * size, size), make)

    async def new_version(self, name: str, nbytes: int, cuts: Sequence[int], make: Make) -> tuple[Extent, Sums]:
        """A new version of any record in the store, not published, from its parts; see blocks.fill_extent. On failure
        nothing is left.
        """
        assert self.store is not None
        extent = self.store.allocate(nbytes, name)
        try:
            sums = await fill_extent(self.store.file, extent, cuts, make)
        except BaseException:
            self.store.discard(extent)
            raise
        self.metrics.add("nvme_written_expected", nbytes)
        return extent, sums

    async def resettle(self, unit: Unit, old: StateRecord) -> StateRecord:
        """The snapshot's state record where the unit's state goes now, and with the master that goes there."""
        format = self.format_of(unit)
        if format != old.format:
            planes = lambda first, last: old.planes(first)
            return await self._fill(unit, format, planes)
        record = old.record
        block = self.state_block(unit, record.nbytes)
        if block is not None:
            record = HostRecord(block.tensor[: record.nbytes])
            await old.record.read(0, record.data)
            self.note(f"{unit.name}/state", record)
        params = unit.records["param"] if old.params is not None else None
        return StateRecord(record, old.elements, old.chunk, format, params)

    def state_block(self, unit: Unit, nbytes: int) -> Block | LooseBlock | None:
        """Host memory for optimizer state of the unit, or None for NVMe: what was meant for it may be taken by an
        optimizer that was not known then.
        """
        if not unit.state_host:
            return None
        try:
            return self.share.block(nbytes, f"optimizer state of unit {unit.name}")
        except BudgetError:
            if self.store is None:
                raise
            return None

    async def _master(self, unit: Unit, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) of the unit's parameters in float32, zero where there is none."""
        out = torch.zeros(last - first, dtype=torch.float32)
        generic = unit.generic
        for index, place in enumerate(unit.layout.places):
            lo, hi = max(first, place.elem), min(last, place.elem + place.spec.numel)
            if place.elem < 0 or lo >= hi:
                continue
            if generic is not None and index in generic.kept and generic.kept[index].master is not None:
                master = (await generic.read(generic.kept[index].master)).view(-1)
                out[lo - first : hi - first] = master[lo - place.elem : hi - place.elem]
                continue
            part = torch.empty(hi - lo, dtype=unit.live[index].dtype)
            await unit.read_region(
                place.region, place.offset + (lo - place.elem) * place.spec.itemsize, part.view(torch.uint8)
            )
            out[lo - first : hi - first] = part
        return out

    def note(self, name: str, record: HostRecord, extent: Extent | None = None) -> None:
        """The host record now equals `extent` of a snapshot, by default the current record `name` of the one that was
        opened.
        """
        assert self.store is not None
        self._saved[name] = (record.version, self.store.current[name] if extent is None else extent)
