"""What placement needs to know of a model's units: their layouts, what is around them, which run in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tierzero.errors import TierzeroError
from tierzero.model.references import referred
from tierzero.planning.placement import UnitSize
from tierzero.units.layout import unit_layout
from tierzero.units.partition import Part, enclosing, repeated
from tierzero.units.unit import spec_of


def unit_sizes(model: nn.Module, parts: Sequence[Part], micro_batches: int = 1) -> list[UnitSize]:
    """What placement needs to know of `parts`, the units of `model`."""
    sizes = []
    enclosed, cut = enclosing([part.module for part in parts]), repeated(model, parts)
    borrowed = borrows(model, parts)
    for part, around, pieces, lent in zip(parts, enclosed, cut, borrowed, strict=True):
        layout = unit_layout([spec_of(name, param) for name, param in zip(part.names, part.params, strict=True)])
        inside = part.module.parameters() if pieces and micro_batches > 1 else ()
        gathers = sum(param.numel() * param.element_size() for param in inside if param.requires_grad)
        sizes.append(UnitSize(part.name, layout, tuple(sorted(around)), gathers, tuple(sorted(lent - around))))
    return sizes


def borrows(model: nn.Module, parts: Sequence[Part]) -> list[set[int]]:
    """For each of `parts`, the others that are lent to it while it runs, as far as can be seen before: its modules
    refer to their parameters, or to modules with such, in attributes and containers that nn.Module does not know. Of a
    module that is spread over several units, the largest.
    """
    owner = {id(param): index for index, part in enumerate(parts) for param in part.params}
    sizes = [sum(param.numel() * param.element_size() for param in part.params) for part in parts]
    modules = {id(module): module for module in model.modules()}
    inner: dict[int, int] = {}  # of each module, the innermost unit around it
    for index in sorted(range(len(parts)), key=lambda index: -sum(1 for _ in parts[index].module.modules())):
        inner.update((id(module), index) for module in parts[index].module.modules())
    found: list[set[int]] = [set() for _ in parts]
    wanted = owner.keys() | modules.keys()
    for key, module in modules.items():
        for _, other in referred(module, wanted) if key in inner else ():
            there = {owner[other]} if other in owner else set()
            if other in modules and module not in set(modules[other].modules()):  # what is around it refers back to it
                there = {owner[id(param)] for param in modules[other].parameters()}
            found[inner[key]].update(sorted(there, key=lambda index: -sizes[index])[:1])
    return [others - {index} for index, others in enumerate(found)]


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
