"""Parameters that offload() took out of their models. An optimizer built before still has them and would train nothing:
its step says so.

torch's own registry of hooks before every optimizer's step is used, from the first offload() on. A parameter that
nobody keeps is forgotten.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierzero.errors import TierzeroError

_REPLACED: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
_HOOKS: list[Any] = []


def note_replaced(param: nn.Parameter, name: str) -> None:
    """`param`, called `name`, is no longer part of its model."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_check))
    key = id(param)

    def forget(ref: weakref.ref[nn.Parameter]) -> None:
        if key in _REPLACED and _REPLACED[key][0] is ref:
            del _REPLACED[key]

    _REPLACED[key] = weakref.ref(param, forget), name


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """TierzeroError if `optimizer` holds replaced parameters that get no gradients any more."""
    if not _REPLACED:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            found = _REPLACED.get(id(param)) if param.grad is None else None
            if found is not None and found[0]() is param:
                raise TierzeroError(
                    f"this {type(optimizer).__name__} was built before offload() and would train nothing: offload() "
                    f"has replaced {found[1]} and the model's other parameters. Build the optimizer after it: "
                    "tierzero.AdamW(model.parameters(), ...)"
                )
