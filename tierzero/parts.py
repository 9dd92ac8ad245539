"""Parts of a parameter at rest: what streams through bounded memory on its way in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import torch

from tierzero.malloc import mapped
from tierzero.paged import Paged
from tierzero.records import StateRecord
from tierzero.tiers.base import aligned_empty
from tierzero.unit import ParamSource, Unit

PART = 4 << 20  # bytes of one part
_RUN = 1 << 20  # bytes of it that are read by one request


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


def read_in_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of a tensor, at rest or plain, as flat CPU tensors of at most PART bytes, in order. Each lasts until
    the next is taken.
    """
    found = unit_of(tensor)
    if found is not None:
        yield from _at_rest(*found)
        return
    if isinstance(tensor, Paged):
        tensor = tensor.read()
    flat = tensor.detach().contiguous().view(-1)
    for first, count in parts_of(tensor.numel(), tensor.element_size()):
        yield flat[first : first + count].cpu()


def _at_rest(unit: Unit, index: int) -> Iterator[torch.Tensor]:
    """A parameter in parts: each is read in runs, all of them at once."""
    place, dtype = unit.layout.places[index], unit.live[index].dtype
    with mapped():  # it goes back to the system when it is freed
        memory = aligned_empty(min(PART, place.spec.nbytes))

    async def fill(start: int, out: torch.Tensor) -> None:
        runs = [out[at : at + _RUN] for at in range(0, out.numel(), _RUN)]
        reads = [unit.read_region(place.region, start + at * _RUN, run) for at, run in enumerate(runs)]
        for error in await asyncio.gather(*reads, return_exceptions=True):  # none goes on after an error
            if error is not None:
                raise error

    for first, count in parts_of(place.spec.numel, place.spec.itemsize):
        out = memory[: count * place.spec.itemsize]
        unit.at_rest(fill(place.offset + first * place.spec.itemsize, out))
        yield out.view(dtype)
