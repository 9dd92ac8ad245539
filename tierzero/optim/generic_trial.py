"""Whether an optimizer class can be run over one unit's parameters at a time: a trial on tiny tensors.

Note [trial]
Three steps of a few parameters together must equal, bit by bit, three steps of each of them alone by an optimizer that
is built anew for each step. So everything that a class remembers must be in the state of its parameters, and nothing
that it computes may look across them or depend on their order.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tierzero.errors import TierzeroError
from tierzero.optim.generic_recipe import Named, Recipe, Values

_PLAIN = (bool, int, float, str, type(None))
_STEPS = 3


def tiny(param: torch.Tensor) -> nn.Parameter:
    """A float32 parameter with as many dimensions, none of them large."""
    return nn.Parameter(torch.zeros([min(size, 4) for size in param.shape]))


def check_class(cls: Any) -> None:
    """TierzeroError or TypeError for what is no class of optimizers that can be wrapped."""
    if isinstance(cls, torch.optim.Optimizer):
        raise TypeError(
            f"wrap_optimizer takes the class of an optimizer and its arguments, not an optimizer: "
            f"tierzero.wrap_optimizer({type(cls).__module__}.{type(cls).__name__}, model.parameters(), ...)"
        )
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"wrap_optimizer takes a subclass of torch.optim.Optimizer, got {cls!r}")
    if issubclass(cls, torch.optim.SparseAdam):
        raise TierzeroError("SparseAdam cannot be wrapped: it needs sparse gradients, and tierzero moves dense ones")
    closure = inspect.signature(cls.step).parameters.get("closure")
    if issubclass(cls, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise TierzeroError(
            f"{cls.__name__} cannot be wrapped: its step evaluates the model several times over all parameters at once"
        )


def check_behaviour(recipe: Recipe, shadows: Sequence[Sequence[Named]], now: Sequence[Values]) -> None:
    """TierzeroError if the class cannot be run over a part of its parameters. See Note [trial]."""
    groups = [list(one[:2]) for one in shadows]
    if sum(map(len, groups)) == 1:
        (only,) = (one for one in groups if one)
        only.append((only[0][0] and f"{only[0][0]}.twin", nn.Parameter(torch.zeros_like(only[0][1]))))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        starts = [[torch.randn(param.shape) for _, param in one] for one in groups]
        grads = [[[torch.randn(param.shape) for _, param in one] for one in groups] for _ in range(_STEPS)]
        try:
            together = _together(recipe, groups, now, starts, grads)
            apart = [
                [_alone(recipe, groups, now, starts, grads, g, i) for i in range(len(one))]
                for g, one in enumerate(groups)
            ]
        except TierzeroError:
            raise
        except Exception as error:
            raise TierzeroError(
                f"{recipe.cls.__name__} cannot be wrapped: it does not step plain float32 tensors on the CPU "
                f"({type(error).__name__}: {error})"
            ) from error
    if not _equal(together, apart):
        raise TierzeroError(
            f"{recipe.cls.__name__} cannot be wrapped: it computes something else for each parameter alone than for "
            "all of them together (it looks across parameters, draws random numbers or remembers more than "
            "optimizer.state[parameter]), and tierzero steps one unit's parameters at a time"
        )


def _start(groups: list[list[Named]], starts: list[list[torch.Tensor]]) -> list[list[Named]]:
    return [
        [(name, nn.Parameter(start.clone())) for (name, _), start in zip(one, values, strict=True)]
        for one, values in zip(groups, starts, strict=True)
    ]


def _together(recipe: Recipe, groups: Any, now: Any, starts: Any, grads: Any) -> list[list[tuple[Any, Any]]]:
    """(values, state) of every parameter, stepped by one optimizer as a plain loop would."""
    fresh = _start(groups, starts)
    inner = recipe.build(fresh)
    for group, values in zip(inner.param_groups, now, strict=True):
        group.update(values)
    for step in grads:
        for one, values in zip(fresh, step, strict=True):
            for (_, param), grad in zip(one, values, strict=True):
                param.grad = grad.clone()
        inner.step()
    for group, values in zip(inner.param_groups, now, strict=True):
        changed = [key for key, value in values.items() if not _equal(group[key], value)]
        if changed:
            raise TierzeroError(
                f"{recipe.cls.__name__} cannot be wrapped: its step changes param_groups[...][{changed[0]!r}], which "
                "must stay the same while the units are stepped one after another"
            )
    known = {id(param) for one in fresh for _, param in one}
    for key, state in inner.state.items():
        if id(key) not in known or not isinstance(state, dict):
            raise TierzeroError(
                f"{recipe.cls.__name__} cannot be wrapped: it keeps state that belongs to no parameter ({key!r})"
            )
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, (torch.Tensor, *_PLAIN)):
                raise TierzeroError(
                    f"{recipe.cls.__name__} cannot be wrapped: its state {name!r} is a {type(value).__name__}, and "
                    "tierzero keeps tensors, numbers and strings"
                )
    return [[(param.detach(), dict(inner.state.get(param, {}))) for _, param in one] for one in fresh]


def _alone(recipe: Recipe, groups: Any, now: Any, starts: Any, grads: Any, g: int, i: int) -> tuple[Any, Any]:
    """(values, state) of one parameter, stepped as an update does."""
    name, param = _start(groups, starts)[g][i]
    state: dict[str, Any] = {}
    for step in grads:
        param = nn.Parameter(param.detach())
        param.grad = step[g][i].clone()
        mine = [[(name, param)] if number == g else [] for number in range(len(groups))]
        states = [[state] if number == g else [] for number in range(len(groups))]
        state = recipe.step(mine, now, states)[g][0]
    return param.detach(), state


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and a.layout == b.layout
        return same and torch.equal(
            a.detach().contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b or a != a)
