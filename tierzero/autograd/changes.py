"""Live parameters whose values user code has changed: their way back into the tiers.

Note [changes in forward]
A forward may change its own parameters without gradients (a codebook's moving average, clamped weights). They go to the
tiers when it ends, before anything can drop the bytes. What a backward still needs of the old values is autograd's
error, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tierzero.paging.pager import Pager
from tierzero.units.unit import Unit


def write_back(pager: Pager, unit: Unit, indices: Iterable[int], *, compare: bool = True) -> list[int]:
    """Write the live values of the parameters at `indices`, or with `compare` of those that differ; returns which.

    The unit must be pinned.
    """
    pager.settle(unit)  # its parameters came before its masters were written
    pager.free_records(unit)
    written = []
    for index in indices:
        value = unit.live[index].detach().to("cpu")
        if not value.numel():
            unit.blank.discard(index)
        elif not compare or index in unit.blank or differs(pager, unit, index):
            pager.loop.run(unit.write_param(index, value))
            written.append(index)
    return written


def differs(pager: Pager, unit: Unit, index: int) -> bool:
    """Whether a live parameter has not the bytes that it has at rest."""
    value = unit.live[index].detach().to("cpu").reshape(-1).view(torch.uint8)
    return not torch.equal(pager.loop.run(unit.read_param(index)).view(-1).view(torch.uint8), value)


def keep_changes(pager: Pager, unit: Unit) -> None:
    """A forward of the unit ends: see Note [changes in forward]."""
    changed = unit.values.changed()
    if changed:
        write_back(pager, unit, changed)
        unit.values.at_rest()
