"""What a load has overwritten in host memory, and how it comes back if the load fails.

Note [undo]
Host memory holds one copy of everything, and nobody has granted a second. Still a load may read straight into it, and
compare what it reads in passing, wherever the old bytes can be had again:
- of parameters whose gradient buffer is empty, since that has their size and layout: they wait there;
- of parameters of a meta model that were never given a value: there is nothing to lose;
- of states that are as they were made, masters from the parameters and moments zero: they are made again.
Of states that were trained they cannot, so what replaces those is compared before, in a pass of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import torch

from tierzero.units.homes import Homes
from tierzero.units.records import HostRecord, StateRecord
from tierzero.units.unit import Unit


@dataclass
class _Kept:
    """Of one unit: (record, its count of changes, its bytes or None for nothing to lose), the same of its state, whose
    bytes are the masters that are parameters nowhere else. `version`: of the unit's parameters, as graphs know it.
    """

    version: int
    regions: list[tuple[HostRecord, int, torch.Tensor | None]] = field(default_factory=list)
    state: tuple[HostRecord, int, torch.Tensor | None] | None = None


class Undo:
    """See Note [undo]. Coroutines run on the engine's loop, on units at rest."""

    def __init__(self, homes: Homes) -> None:
        self.homes = homes
        self._kept: dict[Unit, _Kept] = {}

    # -- what can be overwritten ---------------------------------------------------------------------------------------

    def can_keep(self, unit: Unit, region: str) -> bool:
        """Whether a region of parameters in host memory can."""
        members = {index for index, place in enumerate(unit.layout.places) if place.region == region}
        return members <= unit.blank or (region != "frozen" and _spare(unit))

    def can_remake(self, unit: Unit) -> bool:
        """Whether the unit's state in host memory can."""
        state = unit.state
        if state is None or not isinstance(state.record, HostRecord) or unit.generic is not None:
            return False
        alone = "fp32" in unit.layout.regions and "fp32" not in unit.records
        return state.record.version == state.untouched and (not alone or self.can_keep(unit, "fp32"))

    # -- before --------------------------------------------------------------------------------------------------------

    def keep(self, unit: Unit, region: str) -> None:
        """The region is about to be overwritten."""
        record = unit.records[region]
        assert isinstance(record, HostRecord)
        there = None
        if any(place.region == region and index not in unit.blank for index, place in enumerate(unit.layout.places)):
            there = _gradients(unit, region)
            there.copy_(record.data)
        self._of(unit).regions.append((record, record.version, there))

    async def keep_state(self, unit: Unit) -> None:
        """The state is about to be overwritten."""
        state = unit.state
        assert state is not None
        assert isinstance(state.record, HostRecord)
        there = None
        if "fp32" in unit.layout.regions and "fp32" not in unit.records:
            there = _gradients(unit, "fp32") if not self._blank(unit, "fp32") else None
            if there is not None:
                await state.read(StateRecord.MASTER, 0, there.view(torch.float32))
        self._of(unit).state = (state.record, state.record.version, there)

    def _blank(self, unit: Unit, region: str) -> bool:
        return all(index in unit.blank for index, place in enumerate(unit.layout.places) if place.region == region)

    def _of(self, unit: Unit) -> _Kept:
        return self._kept.setdefault(unit, _Kept(unit.version))

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The load will not fail any more."""
        self._kept.clear()

    @property
    def units(self) -> list[Unit]:
        """Those of which something was overwritten."""
        return list(self._kept)

    async def put_back(self, unit: Unit) -> None:
        """Everything of the unit is as it was, and a graph that was made before can be walked."""
        kept = self._kept.pop(unit)
        for record, version, there in kept.regions:
            if there is not None:
                record.data.copy_(there)
            record.version = version  # whatever knows these bytes by it is right again
        if kept.state is not None:
            record, version, there = kept.state
            state = unit.state
            assert state is not None
            if there is not None:
                await state.write(StateRecord.MASTER, 0, there.view(torch.float32))
            await self.homes.create_state(unit)
            record.version = state.untouched = version
        unit.owner.pager.residency.stale(unit)
        if unit.arrival is not None:  # a fetch that has read some of both would take them for what they were
            await asyncio.wait([unit.arrival])
        unit.version = kept.version


def _spare(unit: Unit) -> bool:
    """Whether nobody has a gradient in the unit's buffer."""
    held = any(rest.grad is not None for rest in unit.rest)
    held |= any(ref is not None and ref() is not None for ref in unit.published)
    return unit.grad_block is not None and not held


def _gradients(unit: Unit, region: str) -> torch.Tensor:
    """The part of the gradient buffer that is laid out as `region`."""
    assert unit.grad_block is not None
    start = 4 * unit.layout.low_first if region == "param" else 0
    return unit.grad_block.tensor[start : start + unit.layout.region_bytes(region)]
