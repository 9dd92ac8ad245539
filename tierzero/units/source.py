"""A parameter of a unit, as Paged reads, writes and borrows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tierzero.units.unit import Unit


class ParamSource:
    """See tierzero.units.paged.Source."""

    def __init__(self, unit: Unit, index: int) -> None:
        self.unit = unit
        self.index = index

    @property
    def name(self) -> str:
        return self.unit.names[self.index]

    @property
    def closed(self) -> bool:
        return bool(self.unit.owner.closed)

    @property
    def lending(self) -> Any:
        """Who gives the parameter to an operation outside its unit, if a forward or backward of the model runs."""
        lending = self.unit.lending
        return lending if lending is not None and lending.is_open() else None

    def read(self) -> torch.Tensor:
        value: torch.Tensor = self.unit.at_rest(self.unit.read_param(self.index))
        return value

    def write(self, value: torch.Tensor) -> None:
        self.unit.at_rest(self.unit.write_param(self.index, value), changes=True)
