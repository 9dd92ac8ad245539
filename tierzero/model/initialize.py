"""First values for a model that was built on the meta device, computed on the CPU, one unit in memory at a time.

Note [values while they are made]
While a module is initialised, the parameters of its units stand in the modules as plain CPU tensors: random numbers
come from torch's CPU generator whatever the compute device is, so they are those of the plain model. A parameter that
was never given a value holds a pattern meanwhile; if the pattern is still there afterwards, nobody has set it, and it
stays without a value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tierzero.errors import TierzeroError
from tierzero.model.deferred import forget, recipe_of
from tierzero.units.parts import unit_of
from tierzero.units.unit import Unit

_PATTERN = 0xA5  # of every byte that was not set
Init = Callable[[nn.Module], Any]


class Drafts:
    """Units whose parameters are plain CPU tensors for now."""

    def __init__(self) -> None:
        self._held: dict[Unit, list[tuple[nn.Parameter, torch.Tensor | None]]] = {}

    def unit_of(self, param: nn.Parameter) -> Unit | None:
        """The unit of a parameter that is a plain tensor for now."""
        return next((unit for unit, drafts in self._held.items() if any(one is param for one, _ in drafts)), None)

    def hold(self, units: list[Unit]) -> None:
        """Have `units` as plain tensors; if one of them is not yet, others are written back first."""
        if all(unit in self._held for unit in units):
            return
        self.give_back([unit for unit in self._held if unit not in units])
        for unit in units:
            if unit not in self._held:
                self._take(unit)

    def _take(self, unit: Unit) -> None:
        if unit.pins or unit.live_registered:
            raise TierzeroError(f"unit {unit.name} is running forward or unsharded; initialize after it")
        drafts: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        for index, rest in enumerate(unit.rest):
            before = None
            if index in unit.blank:
                value = torch.empty(rest.shape, dtype=rest.dtype)
                value.view(-1).view(torch.uint8).fill_(_PATTERN)
            else:
                value = unit.at_rest(unit.read_param(index))
                before = value.clone()
            draft = nn.Parameter(value, requires_grad=rest.requires_grad)
            draft.__dict__.update({name: own for name, own in rest.__dict__.items() if name != "source"})
            drafts.append((draft, before))
        self._held[unit] = drafts
        for (draft, _), rest, slots in zip(drafts, unit.rest, unit.slots, strict=True):
            for module, name in slots:
                if module._parameters.get(name) is rest:
                    module._parameters[name] = draft

    def give_back(self, units: list[Unit] | None = None, *, write: bool = True) -> None:
        """Write what was changed in `units` (all of them by default), and have their rest parameters back."""
        for unit in list(self._held) if units is None else units:
            drafts = self._held.pop(unit)
            for (draft, _), rest, slots in zip(drafts, unit.rest, unit.slots, strict=True):
                for module, name in slots:
                    if module._parameters.get(name) is draft:
                        module._parameters[name] = rest
            for index, (draft, before) in enumerate(drafts if write else []):
                raw = draft.detach().contiguous().view(-1).view(torch.uint8)
                if before is None and raw.numel() and bool((raw == _PATTERN).all()):
                    continue
                if before is None or not torch.equal(raw, before.view(-1).view(torch.uint8)):
                    unit.at_rest(unit.write_param(index, draft), changes=True)


def initialize(model: nn.Module, init: Init | None = None) -> None:
    """Give an offloaded meta model its initial values, unit by unit.

    Of a model that was built inside `deferred_init`, those that the plain model would have had.

    Otherwise, without `init`: `reset_parameters()` of every module that has parameters of its own, in module order.
    Under the same torch seed the values equal those of the plain model reset in the same order on the CPU.

    With `init`: it is called with every module, children before their parents, as `model.apply(init)` would, and may
    set the module's own parameters and those of its direct children. Under the same seed the values equal those of
    `plain.apply(init)`. Of a bound method, such as `model._init_weights` of Hugging Face models, inner modules that
    have it themselves get their own. Buffers that it sets are set.

    Raises TierzeroError naming a parameter that was given no value.
    """
    rest = [param for param in model.parameters() if unit_of(param) is not None]
    if not rest:
        raise TierzeroError(
            f"{type(model).__name__} is not an offloaded model; call tierzero.offload(model, tierzero.Tiers(...)) first"
        )
    if init is None and _play_back(rest):
        return
    if init is None:
        for name, module in model.named_modules():
            if module._parameters and not callable(getattr(module, "reset_parameters", None)) and _own(module):
                raise TierzeroError(
                    f"module {name or type(model).__name__} ({type(module).__name__}) has parameters and no "
                    "reset_parameters() to give them values: pass init=, a function of one module, such as "
                    "model._init_weights of Hugging Face models"
                )
    drafts = Drafts()
    done = False
    try:
        with torch.no_grad():
            if init is None:
                for module in model.modules():
                    if _own(module):
                        drafts.hold(_units([module], drafts))
                        module.reset_parameters()  # type: ignore[operator]
            else:
                for module, call in _children_first(model, init, set()):
                    drafts.hold(_units([module, *module.children()], drafts))
                    call(module)
        done = True
    finally:
        drafts.give_back(write=done)
    for param in rest:
        found = unit_of(param)
        if found is not None and found[1] in found[0].blank:
            raise TierzeroError(
                f"parameter {found[0].names[found[1]]} was given no value by "
                f"{'reset_parameters()' if init is None else getattr(init, '__qualname__', repr(init))}: initialise it "
                "there, or load it with tierzero.load(model, path, strict=False)"
            )


def _play_back(rest: list[nn.Parameter]) -> bool:
    """Make the values that were deferred. False if some parameter without a value has none of those."""
    blank = [(param, found) for param in rest if (found := unit_of(param)) is not None and found[1] in found[0].blank]
    if not blank or any(recipe_of(param) is None for param, _ in blank):
        return False
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            for param, (unit, index) in blank:
                recipe = recipe_of(param)
                assert recipe is not None
                unit.at_rest(unit.write_param(index, recipe.make()), changes=True)
                forget(param)
                forget(unit.live[index])
    finally:
        torch.set_rng_state(state)
    return True


def _own(module: nn.Module) -> bool:
    return any(param is not None for param in module._parameters.values())


def _children_first(module: nn.Module, init: Init, seen: set[nn.Module]) -> Iterator[tuple[nn.Module, Init]]:
    """Every module and what initialises it, in the order of nn.Module.apply; each module once."""
    own = getattr(module, init.__name__, None) if inspect.ismethod(init) else None
    init = own if inspect.ismethod(own) else init
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, init, seen)
    seen.add(module)
    yield module, init


def _units(modules: list[nn.Module], drafts: Drafts) -> list[Unit]:
    """The units of the modules' own parameters, in order."""
    found: dict[Unit, None] = {}
    for module in modules:
        for param in module._parameters.values():
            if param is None:
                continue
            place = unit_of(param)
            unit = place[0] if place is not None else drafts.unit_of(param)
            if unit is not None:
                found[unit] = None
    return list(found)
