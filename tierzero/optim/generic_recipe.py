"""How one step of a torch optimizer class is run over a few parameters at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tierzero.errors import TierzeroError
from tierzero.units.generic import ALIGN
from tierzero.units.layout import UnitLayout, round_up

Named = tuple[str | None, nn.Parameter]
Values = dict[str, Any]  # of a group, without its parameters


def values_of(group: dict[str, Any]) -> Values:
    """A group's hyper-parameters as they are now; tensors are copied, since schedulers change them in place."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


@dataclass(frozen=True)
class Recipe:
    """An optimizer class with the arguments and groups that the user gave; `flat`: a plain list of parameters. Queued
    updates keep the one they were made with.
    """

    cls: type[torch.optim.Optimizer]
    hyper: dict[str, Any]
    given: tuple[Values, ...]
    flat: bool

    @property
    def name(self) -> str:
        """Of the class, as snapshots note it."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def build(self, groups: Sequence[Sequence[Named]]) -> torch.optim.Optimizer:
        """The optimizer over these parameters; a group may be empty."""
        lists: list[list[Any]] = [[param if name is None else (name, param) for name, param in one] for one in groups]
        if self.flat:
            return self.cls(lists[0], **self.hyper)
        return self.cls(
            [{**values, "params": params} for values, params in zip(self.given, lists, strict=True)], **self.hyper
        )

    def step(
        self, groups: Sequence[Sequence[Named]], now: Sequence[Values], states: Sequence[Sequence[dict[str, Any]]]
    ) -> list[list[dict[str, Any]]]:
        """One step of the parameters, which have their gradients, with the hyper-parameters `now`. Returns the new
        states, in the same order.
        """
        inner = self.build(groups)
        if [len(group["params"]) for group in inner.param_groups] != [len(one) for one in groups]:
            raise TierzeroError(
                f"{self.cls.__name__} cannot be wrapped: it makes parameter groups of its own from the parameters that "
                "it gets. Give it one group of each kind, if it takes that"
            )
        for group, values in zip(inner.param_groups, now, strict=True):
            group.update(values)
        for one, kept in zip(groups, states, strict=True):
            for (_, param), state in zip(one, kept, strict=True):
                if state:
                    inner.state[param] = dict(state)
        inner.step()
        return [[dict(inner.state.get(param, {})) for _, param in one] for one in groups]


def expected_bytes(recipe: Recipe, layout: UnitLayout, numbers: dict[int, int], now: Sequence[Values]) -> int:
    """Bytes that the class will keep for the parameters `numbers` of a unit, float32 masters of 16-bit ones among them:
    it steps tensors that have no values. Where it cannot do that, two moments are taken for granted.
    """
    specs = {index: layout.places[index].spec for index in numbers}
    masters = sum(round_up(4 * spec.numel, ALIGN) for spec in specs.values() if spec.dtype != "f32")
    plain = replace(recipe, hyper={key: value for key, value in recipe.hyper.items() if key != "fused"})
    now = [{key: None if key == "fused" else value for key, value in values.items()} for values in now]
    groups: list[list[Named]] = [[] for _ in now]
    for index, number in numbers.items():
        param = nn.Parameter(torch.empty(specs[index].shape, device="meta"))
        param.grad = torch.empty_like(param)
        groups[number].append((None, param))
    try:
        states = plain.step(groups, now, [[{} for _ in one] for one in groups])
    except Exception:
        return masters + sum(2 * round_up(4 * spec.numel, ALIGN) for spec in specs.values())
    return masters + sum(
        round_up(value.numel() * value.element_size(), ALIGN)
        for one in states
        for state in one
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
