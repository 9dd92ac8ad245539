"""Rollback: a running engine goes back to its latest snapshot.

Note [going back]
What lies in the store is pointed at the extents that the snapshot pins; nothing is copied. What lies in host memory and
has changed is read from there, and its checksum compared. For each unit this is queued like an update (see updates.py),
so a read that fails leaves no mixture for anybody to see: whoever uses the unit next tries again first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tierzero.checkpoint.beside import Optimizers, check_groups, check_optimizers, put_back
from tierzero.checkpoint.frozen_unit import HeldRecord
from tierzero.checkpoint.snapshot import BUFFERS, OWN, put_buffers
from tierzero.engine import Engine
from tierzero.errors import StoreCorruptError, StoreError
from tierzero.model.model import check_same_model, describe
from tierzero.optim.generic import WrappedOptimizer
from tierzero.paging.updates import Update
from tierzero.storage.blocks import checksum_of
from tierzero.storage.manifest import Snapshot
from tierzero.storage.store import Store
from tierzero.units.borrowed import Borrowed, FrozenRecord
from tierzero.units.generic import GenericState, kept_from
from tierzero.units.records import DiskRecord, HostRecord, StateRecord
from tierzero.units.state_format import StateFormat
from tierzero.units.unit import Unit


class UnitBack:
    """The way back of one unit, as the queue runs it (updates.Work)."""

    def __init__(self, engine: Engine, unit: Unit, snapshot: Snapshot) -> None:
        assert engine.store is not None
        self.engine = engine
        self.store: Store = engine.store
        self.unit = unit
        self.snapshot = snapshot
        self.own = snapshot.meta[OWN]

    @property
    def changed(self) -> bool:
        """Whether there is anything to do, as far as anybody knows without reading."""
        unit = self.unit
        regions = {region: one for region, one in unit.records.items() if region != "fp32" or unit.state is None}
        same = all(self._same(region, record) for region, record in regions.items())
        same &= unit.state is None or self._same("state", unit.state.record)
        now: GenericState | None = unit.generic
        same &= self.own["generic"].get(unit.name) == (None if now is None else now.describe())
        return not (same and (now is None or now.record is None or self._same("optim", now.record)))

    def _name(self, part: str) -> str:
        return f"{self.unit.name}/{part}"

    def _same(self, part: str, record: HostRecord | DiskRecord) -> bool:
        """Whether the record has not changed since the snapshot."""
        there = self.snapshot.records.get(self._name(part))
        if there is None:
            borrowed = self._borrowed(record)
            return borrowed is not None and borrowed.describe() == self._described(part)
        if isinstance(record, HostRecord):
            return self.engine.homes.equals(self._name(part), record, there[0])
        return self.store.current.get(record.name) == there[0]

    def _borrowed(self, record: HostRecord | DiskRecord) -> Borrowed | None:
        """The bytes of files that the record has now."""
        if isinstance(record, FrozenRecord):
            return record.borrowed
        if not isinstance(record, HostRecord) or record.origin is None or record.origin[0] != record.version:
            return None
        found: Borrowed = record.origin[1]
        return found

    def _described(self, part: str) -> Any:
        """The bytes of files that the record had in the snapshot, described; None if it had none."""
        return self.own.get("borrowed", {}).get(self._name(part))

    # -- updates.Work --------------------------------------------------------------------------------------------------

    async def compute(self, due: int, ready: Callable[[], None]) -> None:
        unit, then = self.unit, self._state_then()
        for region, record in unit.records.items():
            if self._described(region) is not None and not self._same(region, record):
                await self._borrow(region, record)
            elif isinstance(record, HostRecord) and self._name(region) in self.snapshot.records:
                await self._read(region, record)
        await self._generic()
        if unit.state is not None and then is None:  # the optimizer is younger than the snapshot
            await self._begin_anew()
        elif unit.state is not None and then is not None:
            if then.format != unit.state.format:
                planes = lambda first, last: then.planes(first)
                await self.engine.homes.refill(unit, planes)
            elif isinstance(unit.state.record, HostRecord):
                await self._read("state", unit.state.record)
        cached = unit.records.get("fp32")
        if isinstance(cached, HostRecord) and then is not None:  # float32 parameters are their masters
            masters = then if unit.state is None or unit.state.on_disk else unit.state
            cached.version += 1
            await masters.read(StateRecord.MASTER, 0, cached.data.view(torch.float32))

    async def _begin_anew(self) -> None:
        """States as they are before the first step, from the snapshot's parameters."""
        self._point_back()
        name = self._name("fp32")
        if "fp32" not in self.unit.records and name in self.snapshot.records:
            extent = self.snapshot.records[name][0]
            self.store.recall(name, extent)
            self.unit.records["fp32"] = DiskRecord(self.store, name, extent.nbytes, self.engine.metrics)
        await self.engine.homes.create_state(self.unit)

    def publish(self, fresh: None) -> None:
        """Point what lies in the store at the snapshot's extents."""
        self._point_back()
        self.unit.master_edited = True

    def discard(self, fresh: None) -> None:
        """Nothing is left of an attempt."""

    async def restore(self) -> None:
        """It is no guess."""

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _there(self, part: str) -> HeldRecord | None:
        found = self.snapshot.records.get(self._name(part))
        return None if found is None else HeldRecord(self.store, found[0], self.engine.metrics)

    async def _read(self, part: str, record: HostRecord) -> None:
        """Fill a record in host memory from the snapshot, unless it is the same."""
        name = self._name(part)
        extent, sums = self.snapshot.records[name]
        if self.engine.homes.equals(name, record, extent):
            return
        record.version += 1
        await HeldRecord(self.store, extent, self.engine.metrics).read(0, record.data)
        if await checksum_of(record.data) != sums:
            raise StoreCorruptError(
                f"the record {name!r} ({extent.nbytes} bytes at offset {extent.offset} of {self.store.path}) does not "
                "match its checksum: the drive or another program changed it. Start again from another checkpoint"
            )
        self.engine.homes.note(name, record, extent)

    async def _borrow(self, region: str, record: HostRecord | DiskRecord) -> None:
        """Take a frozen region from the files that the snapshot names."""
        there = self.engine.homes.files.reopened(self._described(region))
        if isinstance(record, FrozenRecord):
            record.borrow(there)
        elif isinstance(record, HostRecord):
            record.version += 1
            self.engine.metrics.add("nvme_read_expected", record.nbytes)
            await there.read(0, record.data)
            record.origin = (record.version, there)

    def _state_then(self) -> StateRecord | None:
        """AdamW's state as the snapshot has it."""
        record = self._there("state")
        if record is None:
            return None
        saved = self.own["state"]
        split = self.unit.name in saved["split"]
        format = replace(StateFormat(**saved["format"]), master="split" if split else "f32")
        high: Any = self._there("param") if split else None
        on_disk: Any = record
        return StateRecord(on_disk, self.unit.layout.elements, self.engine.placement.chunk, format, high)

    async def _generic(self) -> None:
        """The state of other optimizers: its bytes where it lies in host memory, and what they are."""
        unit, homes = self.unit, self.engine.homes
        described = self.own["generic"].get(unit.name)
        if described is None:
            if unit.generic is not None:
                homes.publish_generic(unit, GenericState(None, None, {}))
            unit.generic = None
            return
        before = unit.generic.record if unit.generic is not None else None
        record, block = homes.generic_place(unit, described["nbytes"])
        if isinstance(record, HostRecord):
            record.version += record is not before  # so nobody takes it for what it was
            await self._read("optim", record)
        kept = kept_from(described)
        for index, one in kept.items():
            one.resumed = not any(index in optimizer.members.get(unit, ()) for optimizer in self.engine.optimizers)
        homes.publish_generic(unit, GenericState(record, block, kept))

    def _point_back(self) -> None:
        unit, store = self.unit, self.store
        now = [*unit.records.values(), *([unit.state.record] if unit.state is not None else [])]
        now += [unit.generic.record] if unit.generic is not None and unit.generic.record is not None else []
        for record in now:
            if isinstance(record, DiskRecord) and record.name in self.snapshot.records:
                store.recall(record.name, self.snapshot.records[record.name][0])
                if isinstance(record, FrozenRecord):
                    record.owned_again()


def rollback(engine: Engine, optimizer: Optimizers = None) -> dict[str, Any]:
    """Go back to the latest snapshot: parameters, buffers, optimizer states and step counts, and the hyper-parameters
    of `optimizer` (or of several), to the last bit; returns the `meta` given to snapshot. Gradients are dropped, and
    so are updates that are queued or have failed, and a forward or backward that was cut short.

    Reads the bytes of records in host memory that changed since; writes nothing. Random generators, schedulers and the
    position in the data are the caller's.

    StoreError if there is no snapshot, ValueError or StoreError if it does not fit: nothing has changed then. OSError
    and StoreCorruptError for a drive that fails; rollback may be called again.
    """
    check_optimizers(optimizer)
    store = engine.store
    if store is None or store.latest is None:
        raise StoreError(
            "there is no snapshot to go back to: make one first, with snapshot(model, optimizer), on a model that has "
            "Tiers(nvme=DIRECTORY)"
        )
    snapshot = store.latest
    meta = copy.deepcopy(snapshot.meta)
    own = meta.pop(OWN)
    check_same_model(snapshot.meta, describe(engine.units, engine.placement.chunk))
    check_groups(optimizer, own["groups"])
    engine.hooks.reset()
    engine.pager.check_idle(engine.units, "go back outside of it")
    _check_wrapped(engine, own["generic"])
    if BUFFERS in snapshot.records:
        extent = snapshot.records[BUFFERS][0]
        raw = torch.empty(extent.nbytes, dtype=torch.uint8)
        engine.run(HeldRecord(store, extent, engine.metrics).read(0, raw))
        put_buffers(engine, raw)
    engine.run(_back(engine, snapshot))
    for unit in engine.units:
        _drop_gradients(unit)
    put_back(engine, optimizer, own)
    engine.pager.synchronize()
    return meta


async def _back(engine: Engine, snapshot: Snapshot) -> None:
    updates = engine.updates
    for unit in engine.units:
        await updates.drop(unit)
        back = UnitBack(engine, unit, snapshot)
        if back.changed:
            updates.replace(Update(unit, back))
            engine.pager.residency.stale(unit)
    engine.pager.trace.begin_step()


def _drop_gradients(unit: Unit) -> None:
    unit.finish_grads()
    for index, rest in enumerate(unit.rest):
        rest.grad = None
        unit.coef[index] = unit.unscaled[index] = 1.0
    unit.norms, unit.touched, unit.has_grads = None, False, False


def _check_wrapped(engine: Engine, generic: dict[str, Any]) -> None:
    """StoreError if an optimizer could not go on with the states that the snapshot has for it."""
    for optimizer in engine.optimizers:
        if not isinstance(optimizer, WrappedOptimizer):
            continue
        made_by = optimizer.made_by
        for unit, members in optimizer.members.items():
            kept = kept_from(generic[unit.name]) if unit.name in generic else {}
            for index in members:
                if index in kept and kept[index].values and kept[index].made_by != made_by:
                    raise StoreError(
                        f"the snapshot has the state of {unit.names[index]} as {kept[index].made_by} keeps it and the "
                        f"optimizer is {made_by} now: nothing was changed. Resume it with the optimizer that wrote it"
                    )
