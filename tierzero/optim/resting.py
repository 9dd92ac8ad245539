"""Optimizer state at rest, as `optimizer.state[param]` gives it."""

from __future__ import annotations

from typing import Any

import torch

from tierzero.units.generic import GenericState, Slot
from tierzero.units.paged import Paged
from tierzero.units.records import StateRecord
from tierzero.units.unit import Unit


class Resting(Paged):
    """A Paged tensor that is no parameter: `to` always gives a plain tensor, which is how torch's optimizers take
    over a state dict.
    """

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The value as a new plain tensor."""
        return self.read().to(*args, **kwargs)


class SlotSource:
    """One tensor of a wrapped optimizer's state, as Paged reads and writes it."""

    def __init__(self, unit: Unit, index: int, key: str) -> None:
        self.unit = unit
        self.index = index
        self.key = key
        self.name = f"{unit.names[index]} ({key})"

    def _slot(self) -> tuple[GenericState, Slot]:
        state: GenericState = self.unit.generic
        slot: Slot = state.kept[self.index].values[self.key]
        return state, slot

    def read(self) -> torch.Tensor:
        async def read() -> torch.Tensor:
            state, slot = self._slot()
            return await state.read(slot)

        value: torch.Tensor = self.unit.at_rest(read())
        return value

    def write(self, value: torch.Tensor) -> None:
        async def write() -> None:
            state, slot = self._slot()
            await state.write(slot, value)

        self.unit.at_rest(write(), writes=True)


class MasterSource:
    """The float32 master of a 16-bit parameter that a wrapped optimizer has stepped."""

    def __init__(self, unit: Unit, index: int) -> None:
        self.unit = unit
        self.index = index
        self.name = f"{unit.names[index]} (master)"

    def read(self) -> torch.Tensor:
        async def read() -> torch.Tensor:
            place = self.unit.layout.places[self.index]
            if self.unit.state is None:
                state: GenericState = self.unit.generic
                return await state.read(state.kept[self.index].master)
            out = torch.empty(place.spec.numel, dtype=torch.float32)
            await self.unit.state.read(StateRecord.MASTER, place.elem, out)
            return out.view(place.spec.shape)

        value: torch.Tensor = self.unit.at_rest(read())
        return value

    def write(self, value: torch.Tensor) -> None:
        async def write() -> None:
            flat = value.detach().cpu().float().reshape(-1)
            self.unit.master_edited = True
            if self.unit.state is None:
                await self.unit.generic.write_master(self.index, flat)
            else:
                await self.unit.state.write(StateRecord.MASTER, self.unit.layout.places[self.index].elem, flat)

        self.unit.at_rest(write(), changes=True)
