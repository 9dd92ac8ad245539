"""Parts of a parameter at rest: what streams through bounded memory on its way in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tierzero.units.paged import Paged
from tierzero.units.records import StateRecord
from tierzero.units.unit import ParamSource, Unit

PART = 4 << 20  # bytes of one part


def unit_of(tensor: torch.Tensor) -> tuple[Unit, int] | None:
    """(unit, position in it) of a parameter at rest, None for every other tensor."""
    source = tensor.source if isinstance(tensor, Paged) else None
    return (source.unit, source.index) if isinstance(source, ParamSource) else None


async def write_part(unit: Unit, index: int, first: int, value: torch.Tensor) -> None:
    """Replace the elements from `first` on by flat `value` on the CPU, cast, in the parameter and its master. Not for
    units whose states another optimizer keeps: their masters change as a whole.
    """
    place = unit.layout.places[index]
    flat = value.to(unit.live[index].dtype).contiguous()
    record = unit.records.get(place.region)
    if record is not None:
        await record.write(place.offset + first * place.spec.itemsize, flat.view(torch.uint8))
    if unit.state is not None and place.elem >= 0:
        await unit.state.write(StateRecord.MASTER, place.elem + first, flat.float())


def parts_of(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(first, count) of the parts of a tensor, in elements."""
    step = max(1, PART // itemsize)
    for first in range(0, numel, step):
        yield first, min(step, numel - first)
