"""Engine: one offloaded model's units, tiers, pager and hooks, put together and taken apart."""

from __future__ import annotations

import os
import time
import uuid
import weakref
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from tierzero.activations.activation_pool import ActivationPool
from tierzero.activations.activations import Activations
from tierzero.autograd.hooks import Hooks
from tierzero.autograd.microbatch import MicroBatches, check_count
from tierzero.errors import ConfigError
from tierzero.hardware.tuning import engine_options, measured, numa_node
from tierzero.model.model import check_lazy, check_model, check_same_model, describe, give_back, move_buffers
from tierzero.model.references import References
from tierzero.monitoring.metrics import DriveTotals, Metrics
from tierzero.native import NATIVE
from tierzero.paging.loop import LoopThread
from tierzero.paging.malloc import keep_freed
from tierzero.paging.pager import Pager
from tierzero.paging.schedule import Trace
from tierzero.paging.transfer import Transfer, make_transfer
from tierzero.paging.updates import UpdateQueue
from tierzero.planning.placement import Placement, place, warn_of_memory
from tierzero.storage.room import Room
from tierzero.storage.spill import SpillFile
from tierzero.storage.store import Store
from tierzero.tiers.base import open_block_file
from tierzero.tiers.config import Tiers, memory_limit
from tierzero.tiers.host import HostArena
from tierzero.units.homes import Homes
from tierzero.units.partition import Part, Units, partition
from tierzero.units.records import HostRecord
from tierzero.units.refit import States
from tierzero.units.state_format import PLAIN, StateFormat
from tierzero.units.unit import Unit
from tierzero.units.unit_sizes import unit_sizes, units_in_pieces

T = TypeVar("T")
_COUNTED = ("bytes_read", "bytes_written", "read_ns", "write_ns")


class Engine:
    """Built by `offload`. `model` keeps its modules; its parameters become rest parameters over the tiers."""

    def __init__(
        self,
        model: nn.Module,
        tiers: Tiers,
        units: Units | None,
        micro_batches: int,
        resume: str | bool,
        overwrite: bool,
    ) -> None:
        tiers.check()
        check_lazy(model)
        parts = partition(model, units)
        check_model(model, parts)
        check_count(micro_batches)
        self.model = weakref.ref(model)
        self.tiers = tiers
        self.device = tiers.compute_device()
        self.metrics = Metrics()
        self._pid = os.getpid()
        self.closed = False
        self.room: Room  # with a store
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.closing: list[Any] = []  # what close() calls first, the last one added before the others
        self.more_backwards = False  # no_sync: the backward that goes on is not the step's last one
        sizes = unit_sizes(model, parts, micro_batches)
        cut = units_in_pieces(model, parts, micro_batches)
        directories = tiers.directories()
        self.metrics.host_budget, self.metrics.device_budget = tiers.host_bytes(), tiers.device_bytes()
        self.placement: Placement = place(
            sizes,
            host=self.metrics.host_budget,
            device=self.metrics.device_budget,
            drives=len(directories),
            native=NATIVE is not None,
            cuda=self.device.type == "cuda",
            activations=tiers.activation_bytes(),
        )
        warn_of_memory(self.placement, memory_limit())
        self.metrics.device_needed = self.placement.device_min
        self.last_save: Any = None  # a Saving
        self.at_end: list[Any] = []  # what takes it apart, last first
        try:
            self._build(model, parts, directories, resume, overwrite)
            self.micro_batches = MicroBatches(self.hooks, [self.units[index] for index in cut], micro_batches)
        except BaseException:
            _take_apart(self.at_end, self._pid)
            raise
        self.started = time.monotonic()
        self.lineage = uuid.uuid4().hex  # what the checkpoints of one run have in common, over its continuations
        ENGINES.add(self)
        self._finalizer = weakref.finalize(self, _take_apart, self.at_end, self._pid)

    # -- building ------------------------------------------------------------------------------------------------------

    def _build(
        self, model: nn.Module, parts: list[Part], directories: list[Path], resume: str | bool, overwrite: bool
    ) -> None:
        placement = self.placement
        self.loop = LoopThread()
        self.at_end.append(self.loop.close)
        self.arena = HostArena(placement.host_needed, node=numa_node(directories))
        self.at_end.append(self.arena.close)
        self.io: Any = None
        if NATIVE is not None:
            from tierzero.tiers.nvme import NativeEngine

            options = engine_options(measured(directories), self.tiers.block_bytes())
            self.io = NativeEngine(**options, limit=self.tiers.drive_limit())
            self.at_end.append(self.io.close)
        self.metrics.drives = self._drives
        self.store: Store | None = None
        if directories:
            opener = partial(open_block_file, limit=self.tiers.drive_limit())
            self.store = Store(directories, engine=self.io, resume=resume, overwrite=overwrite, opener=opener)
            self.at_end.append(self.store.close)
        elif resume:
            raise ConfigError("resume= needs Tiers(nvme=DIRECTORY): snapshots lie in its store")
        self.homes = Homes(self.store, self.arena, self.metrics, placement.chunk)
        self.at_end.append(self.homes.files.close)
        self.units = [Unit(index, part.name, part.module, part.params, part.names) for index, part in enumerate(parts)]
        self.states = States(self, [unit.layout for unit in self.units])
        self.streamed = self.states.streamed()
        order = [unit.uid for unit in self.units]
        trace = Trace(order + order[::-1])
        trace.begin_step()
        self.updates = UpdateQueue(self.metrics, self.streamed.width, trace)
        staging = [
            self.arena.allocate(placement.staging_block, "staging for fetches") for _ in range(placement.staging_blocks)
        ]
        if self.device.type == "cpu":
            keep_freed()
        transfer = make_transfer(self.device, self.metrics, staging, self.tiers.device_limit())
        budget = self.metrics.device_budget - placement.grad_reserve
        self.activations = self._activations(transfer)
        self.pager = Pager(self.units, self.loop, transfer, self.updates, self.metrics, budget, self.tiers.depth())
        split: list[str] = []
        if self.store is not None:
            self.updates.may_exceed = lambda: self.streamed.stepper is not None and self.room.shadows
            self.states.make_room()
            if self.store.resumed is not None:
                self.loop.run(self.store.verify())
                check_same_model(self.store.resumed.meta, describe(self.units, placement.chunk))
                split = self.states.take(self.store.resumed.meta["engine"]["state"])
        moved: list[Unit] = []
        references = References(model, [param for part in parts for param in part.params])
        try:
            for unit, part in zip(self.units, parts, strict=True):
                self._move(unit, part, split)
                moved.append(unit)
                references.replace(part.params, unit.rest)
                part.params.clear()  # their memory is free now
            for unit in self.units if self.store is not None and self.store.resumed is not None else []:
                self.loop.run(self.homes.reopen_generic(unit))
        except BaseException:
            for unit in moved:  # a failure leaves the model as it was
                give_back(unit, self.loop, references)
            raise
        if self.device.type != "cpu":
            move_buffers(model, self.device)
        self.hooks = Hooks(model, self.units, self.pager, self.activations)

    def _activations(self, transfer: Transfer) -> Activations | None:
        if not self.placement.activations:
            return None
        block = self.arena.allocate(self.placement.activations, "activations")
        spill = SpillFile(self.store, self.io) if self.store is not None else None
        pool = ActivationPool(block, spill, transfer, self.metrics)
        made = Activations(pool, self.loop, transfer, self.metrics)
        self.at_end.append(made.close)
        return made

    def _move(self, unit: Unit, part: Part, split: list[str]) -> None:
        """Take one unit's parameters out of the model and into the tiers."""
        unit.slots = part.slots
        unit.owner = self
        unit.master_edited = bool(self.store is not None and self.store.resumed is not None)
        unit.state_host = self.states.fit.state_host[unit.uid]
        self._place(unit)
        unit.build(
            part.params, self.device, partial(self.pager.settle, unit, changes=True), partial(self.pager.at_rest, unit)
        )
        if self.store is None or self.store.resumed is None:
            self.loop.run(self.homes.write_first(unit, part.params))
        else:
            self.loop.run(self.homes.reopen(unit, unit.name in split))
        unit.register_rest()

    def reserve_for_snapshot(self) -> None:
        """Have the space that a snapshot and the steps after it need, so that a full disk shows before anything is
        pinned.
        """
        assert self.store is not None
        store = self.store
        live = sum(extent.capacity for extent in store.space.live())
        current = sum(extent.capacity for extent in store.current.values())
        flushed, changed = self.homes.host_bytes(self.units), self.homes.host_bytes(self.units, changed=True)
        self.room.reserve(max(live + changed, 2 * current + flushed + self.room.working), 2 * current + flushed)

    def disk_records(self) -> list[tuple[str, int]]:
        """(name, bytes) of every record that lies in the store when all state records exist."""
        records = []
        for index, unit in enumerate(self.units):
            if not self.placement.param_host[index]:
                records += [
                    (f"{unit.name}/{region}", unit.layout.region_bytes(region))
                    for region in ("param", "frozen")
                    if region in unit.layout.regions
                ]
            if not self.states.fit.state_host[index] and unit.layout.elements:
                records.append((f"{unit.name}/state", self.states.fit.state_bytes[index]))
        return records

    def _place(self, unit: Unit) -> None:
        """Take the unit's host memory."""
        layout = unit.layout
        if layout.grad_bytes:
            unit.grad_block = self.arena.allocate(layout.grad_bytes, f"gradients of unit {unit.name}")
        if self.placement.param_host[unit.uid] and layout.flat_bytes:
            unit.host_flat = self.arena.allocate(layout.flat_bytes, f"parameters of unit {unit.name}")
            for region, (offset, nbytes) in layout.regions.items():
                unit.records[region] = HostRecord(unit.host_flat.tensor[offset : offset + nbytes])

    # -- optimizer state -----------------------------------------------------------------------------------------------

    def ensure_state(self, format: StateFormat = PLAIN) -> None:
        """Create the state records that do not exist yet: master from the parameters, zero moments. TierzeroError if
        others have another format, BudgetError if `format` does not fit.
        """
        self.states.use(format, [unit.host_flat is not None for unit in self.units])
        for unit in self.units:
            if unit.state is None and unit.layout.elements:
                self.pager.settle(unit)  # another optimizer may be changing its masters
                self.loop.run(self.homes.create_state(unit))
        self.make_room(0, "optimizer states")

    def make_room(self, nbytes: int, what: str) -> None:
        """Set `nbytes` of the host budget aside for `what`, one step at a time by an optimizer that was not known when
        the budget was divided. Parameters cached in host memory go to NVMe for it. BudgetError if that does not help.
        """
        share = self.homes.share
        cached = [unit for unit in self.units if unit.host_flat is not None and self.store is not None]
        cached = [unit for unit in cached if unit.state is None or unit.state.format.master != "split"]
        share.check(nbytes - share.work, what, sum(unit.host_flat.nbytes for unit in cached if unit.host_flat))
        while share.left < nbytes - share.work:
            self.pager.at_rest(cached[-1], self.homes.move_out(cached.pop()), writes=True)
        share.set_aside(nbytes, what)

    # -- steps that begin in backward ----------------------------------------------------------------------------------

    def gradients_final(self, unit: Unit) -> None:
        """No more gradients come to `unit` in this backward, as far as its inputs tell."""
        if not self.more_backwards:
            for optimizer in self.optimizers:
                optimizer.gradients_final(unit, certain=False)

    def backward_over(self) -> None:
        """A backward has ended."""
        if self.more_backwards:
            return
        for optimizer in self.optimizers:
            for unit in self.units:
                if unit.has_grads:
                    optimizer.gradients_final(unit, certain=True)
            optimizer.backward_over()

    def can_guess(self, unit: Unit) -> bool:
        """Whether an update of `unit` may be begun without knowing that it is right: its state's old version stays on
        the drive beside the new one, and its parameters can be made again from it.
        """
        return (
            self.store is not None
            and self.room.shadows
            and self.streamed.stepper is not None
            and unit.state is not None
            and unit.state.on_disk
            and unit.state.format.master != "split"
            and not unit.master_edited
            and sum(unit in optimizer.members for optimizer in self.optimizers) == 1
        )

    # -- the rest ------------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop."""
        return self.loop.run(work)

    def moved(self) -> tuple[int, int]:
        """(bytes read, bytes written) on NVMe since `offload`."""
        return (totals := self._drives()).read, totals.written

    def _drives(self) -> DriveTotals:
        if os.getpid() != self._pid:
            return DriveTotals()  # they are the parent's
        borrowed = self.homes.files.bytes_read
        if self.io is not None:
            read, written, *busy = map(self.io.counters().__getitem__, _COUNTED)
            return DriveTotals(read + borrowed, written, *busy)
        files = [self.store.file] if self.store is not None else []
        spill = self.activations.pool.spill if self.activations is not None else None
        files += [spill.file] if spill is not None and spill.file is not None else []
        read, written = (sum(getattr(file, name) for file in files) for name in _COUNTED[:2])
        return DriveTotals(read + borrowed, written, *(sum(file.busy_ns[kind] for file in files) for kind in (0, 1)))

    def close(self) -> None:
        """Finish what is queued, free everything, release the store. The model's parameters stay at rest and
        unreadable.
        """
        if self.closed:
            return
        self.closed = True
        try:
            while self.closing:
                self.closing.pop()()
            self.pager.synchronize()
        finally:
            self.hooks.reset()
            self.pager.close()
            self.micro_batches.remove()
            self.hooks.remove()
            self._finalizer()


# An engine lives as long as its model: it is reached through the model's parameters; this set holds it only weakly.
ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _take_apart(undo: list[Any], pid: int) -> None:
    """Close what an engine had opened, last first. Also runs when a model is dropped without close(), and at exit; a
    forked child leaves everything to its parent.
    """
    if os.getpid() != pid:
        return
    while undo:
        undo.pop()()
