"""States from a state dict into a unit's generic record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tierzero.optim.generic_recipe import Named, Recipe, Values
from tierzero.optim.generic_trial import tiny
from tierzero.optim.generic_update import replace_states
from tierzero.units.generic import Kept
from tierzero.units.paged import Paged
from tierzero.units.unit import Unit


def load_unit(
    unit: Unit,
    recipe: Recipe,
    now: Sequence[Values],
    numbers: dict[int, int],
    names: dict[int, str | None],
    states: dict[int, dict[str, Any]],
) -> None:
    """Replace the states of the parameters `numbers` (index: group) of `unit`; "master" among them is the float32 value
    of a 16-bit parameter. The class itself casts them, as it would for float32 parameters.
    """
    read = {
        index: {name: value.read() if isinstance(value, Paged) else value for name, value in state.items()}
        for index, state in states.items()
    }
    masters: dict[int, Any] = {}
    for index, state in read.items():
        if unit.layout.places[index].region == "param" and "master" in state:
            masters[index] = state.pop("master").detach().cpu().float()
    groups: list[list[Named]] = [[] for _ in now]
    keys: list[list[int]] = [[] for _ in now]
    for index, number in numbers.items():
        groups[number].append((names.get(index), tiny(unit.rest[index])))
        keys[number].append(index)
    inner = recipe.build(groups)
    inner.load_state_dict(
        {
            "state": {index: state for index, state in read.items() if state},
            "param_groups": [{**values, "params": mine} for values, mine in zip(now, keys, strict=True)],
        }
    )
    loaded = {
        index: dict(inner.state.get(param, {}))
        for mine, one in zip(keys, groups, strict=True)
        for index, (_, param) in zip(mine, one, strict=True)
    }
    fresh = {
        index: Kept(recipe.name, masters.get(index), _on_host(values) if states[index] else {})
        for index, values in loaded.items()
    }
    unit.at_rest(
        replace_states(unit.owner.homes, unit, fresh, f"loading a state of {recipe.cls.__name__}"), writes=True
    )


def _on_host(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().cpu() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
