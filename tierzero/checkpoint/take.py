"""Units out of a checkpoint: what can be is staged beside what is there or can be undone, the rest comes afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tierzero.checkpoint.frozen_unit import MOMENTS
from tierzero.checkpoint.reader import Parts, Reader
from tierzero.checkpoint.refill import (
    MASTER,
    InMemory,
    Source,
    Staged,
    States,
    new_region,
    refill_masters,
    refill_region,
)
from tierzero.checkpoint.undo import Undo
from tierzero.engine import Engine
from tierzero.errors import NO_ROOM
from tierzero.optim.adamw import AdamW
from tierzero.optim.base import TieredOptimizer, home_of
from tierzero.optim.generic import WrappedOptimizer
from tierzero.optim.generic_update import replace_states
from tierzero.units.generic import Kept
from tierzero.units.records import DiskRecord, HostRecord
from tierzero.units.unit import Unit


@dataclass
class _Plan:
    """Of one unit: regions, and whether its state, that are staged on the drive; and that are filled where they are."""

    staged: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    state_staged: bool = False
    state_filled: bool = False


class Units:
    """The units of `engine`, whose parameters `optimizers` step, and what `reader` has for them. See refill's Note
    [staged] and undo's Note [undo].
    """

    def __init__(self, engine: Engine, reader: Reader, optimizers: list[TieredOptimizer]) -> None:
        self.engine = engine
        self.reader = reader
        self.index = reader.index
        self.members: dict[Unit, dict[int, TieredOptimizer]] = {}
        for one in optimizers:
            for unit, index in (home_of(param) for group in one.param_groups for param in group["params"]):
                self.members.setdefault(unit, {})[index] = one
        self.staged = Staged(engine.store) if engine.store is not None else None
        self.undo = Undo(engine.homes)
        self._there: set[tuple[Unit, str]] = set()  # regions in host memory that have their new bytes

    # -- what goes where -----------------------------------------------------------------------------------------------

    def _adam(self, unit: Unit) -> tuple[set[int], set[int]]:
        """(the parameters that are trained, those of them that AdamW steps)."""
        members = self.members.get(unit, {})
        trained = {index for index, place in enumerate(unit.layout.places) if place.elem >= 0}
        return trained, {index for index in trained if isinstance(members.get(index), AdamW)}

    def _regions(self, unit: Unit) -> dict[str, dict[int, str]]:
        """The keys of the parameters whose bytes the unit's records have, by region and parameter."""
        found: dict[str, dict[int, str]] = {region: {} for region in unit.records}
        for index, place in enumerate(unit.layout.places):
            if place.region in found:
                found[place.region][index] = f"model.{unit.names[index]}"
        return found

    @cached_property
    def plans(self) -> dict[Unit, _Plan]:
        """What is compared as it is read, by unit."""
        return {unit: self._plan(unit) for unit in self.engine.units}

    def _plan(self, unit: Unit) -> _Plan:
        plan, records = _Plan(), unit.records.items()
        in_host = any(isinstance(record, HostRecord) for _, record in records)
        in_host |= unit.state is not None and not unit.state.on_disk
        if unit.grad_block is not None and in_host:
            self.engine.pager.settle(unit, changes=True)  # its gradient buffer may be used
        if unit.generic is None:
            if self.staged is not None:
                plan.staged = [region for region, record in records if isinstance(record, DiskRecord)]
            host = [region for region, record in records if isinstance(record, HostRecord)]
            plan.filled = [region for region in host if self.undo.can_keep(unit, region)]
        trained, adam = self._adam(unit)
        if unit.state is not None and adam and adam == trained:  # all of it changes
            plan.state_staged = self.staged is not None and unit.state.on_disk
            plan.state_filled = self.undo.can_remake(unit)
        return plan

    def _state_keys(self, unit: Unit) -> dict[int, dict[str, str]]:
        """The keys of AdamW's states, by parameter and part; float32 parameters are their own masters."""
        adam = self._adam(unit)[1]
        return {index: {MASTER: f"model.{unit.names[index]}", **self.parts(unit, index)} for index in adam}

    def keys(self, *, on_drive: bool) -> set[str]:
        """The tensors that are compared as they are staged on the drive, or as they fill host memory, and used for
        nothing else before that.
        """
        found: set[str] = set()
        for unit, plan in self.plans.items():
            regions = self._regions(unit)
            for region in plan.staged if on_drive else plan.filled:
                found.update(self.index.aliases.get(key, key) for key in regions[region].values())
            if plan.state_staged if on_drive else plan.state_filled:
                assert unit.state is not None
                parts = (MASTER, *MOMENTS)[: unit.state.format.parts]
                for own in self._state_keys(unit).values():
                    found.update(self.index.aliases.get(own[part], own[part]) for part in parts if part in own)
        return found & self.index.tensors.keys()

    # -- where it is ---------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Overwrite in host memory what can be brought back. Errors as `stage`."""
        for unit, plan in self.plans.items():
            if plan.filled or plan.state_filled:
                unit.at_rest(self._fill(unit, plan), changes=True)

    async def _fill(self, unit: Unit, plan: _Plan) -> None:
        regions = self._regions(unit)
        for region in plan.filled:
            self.undo.keep(unit, region)
            await self._refill(unit, region, regions[region])
        if plan.state_filled:
            await self.undo.keep_state(unit)
            await unit.owner.homes.refill(unit, self._states(unit, set()).planes)

    # -- staging -------------------------------------------------------------------------------------------------------

    def stage(self) -> bool:
        """Write what can be beside what is there; False if the drive has no room for that, and nothing is left then.

        StoreCorruptError for bytes that are not what was written, OSError for a drive that fails.
        """
        try:
            for unit in self.engine.units if self.staged is not None else ():
                unit.at_rest(self._stage(unit))
        except OSError as error:
            self._drop_staged()
            if error.errno not in NO_ROOM:
                raise
            return False
        return True

    def discard(self) -> None:
        """Give up what was staged and not taken, and bring back what was overwritten, if nothing was taken."""
        self._drop_staged()
        for unit in self.engine.loop.do(lambda: self.undo.units):  # behind what an interrupted wait has left running
            unit.at_rest(self.undo.put_back(unit), writes=True)

    def _drop_staged(self) -> None:
        if self.staged is not None:
            self.engine.loop.do(self.staged.discard)

    async def _stage(self, unit: Unit) -> None:
        staged, regions, plan = self.staged, self._regions(unit), self.plans[unit]
        if staged is None:
            return
        for region in plan.staged:
            record = unit.records[region]
            assert isinstance(record, DiskRecord)
            staged.add(unit, record, await new_region(unit, region, self._sources(regions[region])))
        if plan.state_staged:
            state = unit.state
            assert state is not None
            assert isinstance(state.record, DiskRecord)
            made = unit.owner.homes.new_state(
                state.record.name, state.elements, state.format, self._states(unit, set()).planes
            )
            staged.add(unit, state.record, await made)

    def _sources(self, keys: dict[int, str]) -> dict[int, Source]:
        return {index: Parts(self.reader, key) for index, key in keys.items()}

    def _states(self, unit: Unit, others: set[int]) -> States:
        """`others`: see States."""
        sources: dict[int, dict[str, Source]] = {}
        for index, own in self._state_keys(unit).items():
            there = {key: Parts(self.reader, key) for key in own.values() if self.index.stored(key) is not None}
            sources[index] = {part: there[key] for part, key in own.items() if key in there}
            if own[MASTER] == f"model.{unit.names[index]}" and (unit, unit.layout.places[index].region) in self._there:
                sources[index][MASTER] = InMemory(unit, index)
        return States(unit, sources, others)

    async def _refill(self, unit: Unit, region: str, keys: dict[int, str]) -> None:
        await refill_region(unit, region, self._sources(keys))
        if isinstance(unit.records[region], HostRecord):
            self._there.add((unit, region))

    # -- putting back --------------------------------------------------------------------------------------------------

    def take(self, unit: Unit) -> None:
        """Make what was staged current, and put the rest in its place. There is no way back from here on."""
        self.undo.forget()
        trained, adam = self._adam(unit)
        members = self.members.get(unit, {})
        if unit.generic is not None:  # its masters change as a whole
            for index, name in enumerate(unit.names):
                unit.rest[index].copy_(self.reader.tensor(f"model.{name}"))
        unit.at_rest(self._take(unit), changes=True)
        unit.version += 1
        parts = {index: self.parts(unit, index) for index in trained & members.keys()}
        for index in adam:
            step = parts[index].get("step")
            unit.steps[index] = int(self.reader.tensor(step)) if step is not None else 0
        generic = {index: parts[index] for index in parts.keys() - adam}
        if generic:
            take_generic(
                unit, {i: {part: self.value(k) for part, k in own.items()} for i, own in generic.items()}, members
            )

    async def _take(self, unit: Unit) -> None:
        trained, adam = self._adam(unit)
        whole, plan = unit.state is not None and bool(adam), self.plans[unit]
        staged = {region for region, record in unit.records.items() if self._is_staged(record)}
        state_staged = unit.state is not None and self._is_staged(unit.state.record)
        if self.staged is not None:
            self.staged.publish(unit)
        if unit.generic is None:
            for region, keys in self._regions(unit).items():
                if region not in staged and region not in plan.filled:
                    await self._refill(unit, region, keys)
            if unit.state is not None and (not whole or adam != trained):
                await refill_masters(unit, self._sources({i: f"model.{unit.names[i]}" for i in trained}))
        unit.blank.clear()
        if whole and not state_staged and not plan.state_filled:
            await unit.owner.homes.refill(unit, self._states(unit, trained - adam).planes)
        unit.master_edited = True

    def _is_staged(self, record: Any) -> bool:
        return self.staged is not None and self.staged.has(record)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def parts(self, unit: Unit, index: int) -> dict[str, str]:
        """The keys of a parameter's states, by what they are."""
        return self.of_optimizer.get(self.canonical(unit, index), {})

    @cached_property
    def of_optimizer(self) -> dict[str, dict[str, str]]:
        """The keys of all states, by parameter and what they are."""
        found: dict[str, dict[str, str]] = {}
        for key, path in self.index.paths.items():
            if path[:2] == ["optimizer", "state"]:
                found.setdefault(str(path[2]), {})[str(path[3])] = key
        return found

    def canonical(self, unit: Unit, index: int) -> str:
        """The name under which the checkpoint has a parameter."""
        key = f"model.{unit.names[index]}"
        return self.index.aliases.get(key, key).removeprefix("model.")

    def value(self, key: str) -> Any:
        """The tensor or object of that key."""
        if key in self.index.objects:
            return self.reader.object(key)
        return self.reader.tensor(key)


def take_generic(unit: Unit, states: dict[int, dict[str, Any]], members: dict[int, TieredOptimizer]) -> None:
    """The states of wrapped optimizers, exactly as they were: torch's load_state_dict would cast them."""
    fresh = {}
    for index, values in states.items():
        one = members[index]
        assert isinstance(one, WrappedOptimizer)
        master = values.pop(MASTER, None)
        fresh[index] = Kept(one.made_by, master, values)
    unit.at_rest(replace_states(unit.owner.homes, unit, fresh, "loading the states"), changes=True)
