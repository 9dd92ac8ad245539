"""Parts of a parameter at rest: what streams through bounded memory on its way in and out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tierzero.paging.malloc import mapped
from tierzero.units.paged import Paged
from tierzero.units.records import StateRecord
from tierzero.units.unit import ParamSource, Unit

PART = 4 << 20  # bytes of one part


def unit_of(tensor: torch.Tensor) -> tuple[Unit, int] | None:
    """(unit, position in it) of a parameter at rest, None for every other tensor."""
    source = tensor.source if isinstance(tensor, Paged) else None
    return (source.unit, source.index) if isinstance(source, ParamSource) else None


async def read_part(unit: Unit, index: int, first: int, count: int) -> torch.Tensor:
    """Elements [first, first + count) of a parameter, flat, in its dtype, on the CPU."""
    place = unit.layout.places[index]
    with mapped():  # it goes back to the system when it is freed
        out = torch.empty(count, dtype=unit.live[index].dtype)
    if count:
        await unit.read_region(place.region, place.offset + first * place.spec.itemsize, out.view(torch.uint8))
    return out


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


def read_in_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of a tensor, at rest or plain, as flat CPU tensors of at most PART bytes, in order."""
    found = unit_of(tensor)
    if found is None and isinstance(tensor, Paged):
        tensor = tensor.read()
    flat = tensor.detach().contiguous().view(-1) if found is None else None
    for first, count in parts_of(tensor.numel(), tensor.element_size()):
        if found is not None:
            yield found[0].at_rest(read_part(*found, first, count))
        else:
            assert flat is not None
            yield flat[first : first + count].cpu()
