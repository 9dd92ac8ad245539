"""Parameters that modules refer to outside of their registered places: in an attribute, a list, a tuple or a dict.

nn.Module knows nothing of these, and whoever replaces parameters leaves the old ones there, with values that nobody
trains any more. `offload` puts the parameter at rest there too; used in forward, it is lent (see lending.py).

Private torch names used here, and why:
- Parameter._backward_hooks, _post_accumulate_grad_hooks: hooks that users put on a parameter go over to its successor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

DEPTH = 4  # of containers in containers
_REGISTERED = frozenset(nn.Module().__dict__)


class References:
    """All of them in `model`, to `params`."""

    def __init__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        wanted = {id(param) for param in params}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, found in referred(module, wanted):
                self._places.setdefault(found, []).append((module, name))

    def replace(self, old: Iterable[nn.Parameter], new: Iterable[nn.Parameter]) -> None:
        """Put each of `new` wherever its predecessor in `old` is referred to, with the hooks on its gradient."""
        both = list(zip(old, new, strict=True))
        with torch._C.DisableTorchFunctionSubclass():  # the old ones may refuse every use
            for before, after in both:
                for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                    if getattr(before, hooks, None):
                        setattr(after, hooks, getattr(before, hooks))
        both = [(before, after) for before, after in both if id(before) in self._places]
        successors = {id(before): after for before, after in both}
        for before, after in both:
            places = self._places.pop(id(before))
            for module, name in places:
                module.__dict__[name] = _replaced(module.__dict__.get(name), successors, DEPTH)
            self._places[id(after)] = places


def referred(module: nn.Module, wanted: set[int]) -> Iterator[tuple[str, int]]:
    """(attribute, id) of those of `wanted`, ids of objects, that the module itself refers to outside of its registered
    places.
    """
    for name, value in module.__dict__.items():
        if name not in _REGISTERED:
            for found in _inside(value, wanted, DEPTH):
                yield name, found


def _inside(value: Any, wanted: set[int], depth: int) -> Iterator[int]:
    if id(value) in wanted:
        yield id(value)
    elif depth and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(item, wanted, depth - 1)


def _replaced(value: Any, successors: Mapping[int, nn.Parameter], depth: int) -> Any:
    if id(value) in successors:
        return successors[id(value)]
    if depth and isinstance(value, list):
        value[:] = [_replaced(item, successors, depth - 1) for item in value]
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            value[key] = _replaced(item, successors, depth - 1)
    elif depth and type(value) is tuple:
        return tuple(_replaced(item, successors, depth - 1) for item in value)
    return value
