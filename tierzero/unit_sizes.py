"""What placement needs to know of a model's units: their layouts, what is around them, which run in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tierzero.errors import TierzeroError
from tierzero.layout import unit_layout
from tierzero.partition import Part, enclosing, repeated
from tierzero.placement import UnitSize
from tierzero.unit import spec_of


def unit_sizes(model: nn.Module, parts: Sequence[Part], micro_batches: int = 1) -> list[UnitSize]:
    """What placement needs to know of `parts`, the units of `model`."""
    sizes = []
    enclosed, cut = enclosing([part.module for part in parts]), repeated(model, parts)
    for part, around, pieces in zip(parts, enclosed, cut, strict=True):
        layout = unit_layout([spec_of(name, param) for name, param in zip(part.names, part.params, strict=True)])
        inside = part.module.parameters() if pieces and micro_batches > 1 else ()
        gathers = sum(param.numel() * param.element_size() for param in inside if param.requires_grad)
        sizes.append(UnitSize(part.name, layout, tuple(sorted(around)), gathers))
    return sizes


def units_in_pieces(model: nn.Module, parts: Sequence[Part], micro_batches: int) -> list[int]:
    """The indices of the units that cut their batch. TierzeroError if there is none to do what was asked."""
    if micro_batches == 1:
        return []
    cut = [index for index, yes in enumerate(repeated(model, parts)) if yes]
    if not cut:
        raise TierzeroError(
            f"micro_batches={micro_batches} has no unit to cut the batch in: {type(model).__name__} has no element "
            "of a ModuleList or Sequential among its units; leave micro_batches at 1"
        )
    return cut
