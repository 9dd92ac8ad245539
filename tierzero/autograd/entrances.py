"""Modules that are called without their unit's: forwards of the unit all the same.

Note [entrances]
Modules between a unit's module and the units inside it (an encoder, a projector, a head) may be called by themselves:
`generate` runs the encoder of a sequence-to-sequence model alone, an adapter library the model inside its own. Each
such module that needs parameters of the unit is a forward of the unit where none is running. Modules inside a unit that
contains no other have no hooks: they would cost more than the unit's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tierzero.autograd.backward import in_backward
from tierzero.units.partition import is_called
from tierzero.units.unit import Unit


class Forwards(Protocol):
    """The hooks of a model's units, as this file uses them."""

    frames: list[Any]
    pager: Any
    pre_forward: Callable[..., Any]
    post_forward: Callable[..., Any]

    def add(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Hook a module."""

    def to_device(self, value: Any) -> Any:
        """A tensor on the compute device."""


def hook_entrances(hooks: Forwards, units: Sequence[Unit]) -> None:
    """Hook every entrance of `units`; see Note [entrances]."""
    before, after = torch.compiler.disable(_enter), torch.compiler.disable(_leave)
    owners = [{id(owner) for slots in unit.slots for owner, _ in slots} for unit in units]
    for unit, modules in zip(units, entrances([unit.module for unit in units], owners), strict=True):
        for module in modules:
            _hook(hooks, unit, module, before, after)


def _hook(
    hooks: Forwards, unit: Unit, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    key = id(module)
    hooks.add(
        module,
        lambda args, kwargs: before(hooks, unit, key, args, kwargs),
        lambda output: after(hooks, unit, key, output),
    )


def _enter(hooks: Forwards, unit: Unit, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if unit.live_registered:
        for frame in hooks.frames:
            frame.again += frame.entrance == key
        return None
    if not in_backward() and not hooks.frames and hooks.pager.transfer.device.type != "cpu":
        args, kwargs = tree_map(hooks.to_device, (args, kwargs))
    hooks.pre_forward(unit, args, kwargs, key)
    return args, kwargs


def _leave(hooks: Forwards, unit: Unit, key: int, output: Any) -> Any:
    for frame in hooks.frames:
        if frame.entrance == key:
            if not frame.again:
                return hooks.post_forward(unit, output)
            frame.again -= 1
    return None


def entrances(modules: Sequence[nn.Module], owners: Sequence[set[int]]) -> list[list[nn.Module]]:
    """For each unit's module that contains other units: the modules in it that need its parameters, outermost last.

    owners: for each unit, the ids of the modules that hold its parameters. What lies inside another unit is left out.
    """
    chosen = {id(module) for module in modules}
    found: list[list[nn.Module]] = [[] for _ in modules]
    for index, module in enumerate(modules):
        if any(id(inner) in chosen for inner in module.modules() if inner is not module):
            seen: dict[int, bool] = {}
            for child in module.children():
                _needs(child, chosen, owners[index], seen, found[index])
    return found


def _needs(
    module: nn.Module, chosen: set[int], owners: set[int], seen: dict[int, bool], found: list[nn.Module]
) -> bool:
    """Whether something in `module`, outside the units in it, is one of `owners`; adds the called ones to `found`."""
    if id(module) in chosen:
        return False
    if id(module) not in seen:
        seen[id(module)] = id(module) in owners
        for child in module.children():
            seen[id(module)] |= _needs(child, chosen, owners, seen, found)
        if seen[id(module)] and is_called(module):
            found.append(module)
    return seen[id(module)]
