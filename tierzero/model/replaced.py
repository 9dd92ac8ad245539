"""Parameters that offload() took out of their models. An optimizer built before still has them and would train nothing:
its step says so. A function that has kept one would compute with values that nobody trains: using one is an error.

torch's own registry of hooks before every optimizer's step is used, from the first offload() on. A parameter that
nobody keeps is forgotten.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierzero.errors import PagedOutError, TierzeroError
from tierzero.units.live import HARMLESS, leaves

_REPLACED: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
_HOOKS: list[Any] = []


class ReplacedParameter(nn.Parameter):
    """What a parameter becomes that is no longer part of its model; metadata and `.grad` are as before."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = [value for value in leaves(args, kwargs) if isinstance(value, ReplacedParameter)]
        names = sorted({_REPLACED[id(value)][1] for value in found if id(value) in _REPLACED})
        raise PagedOutError(
            f"{getattr(func, '__name__', func)} uses {', '.join(names) or 'a parameter'} as it was before offload(), "
            "which nobody trains any more: something has kept it from before. Take the parameter from its module, at "
            "the time it is used"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReplacedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"


def note_replaced(param: nn.Parameter, name: str) -> None:
    """`param`, called `name`, is no longer part of its model."""
    if type(param) is nn.Parameter:
        param.__class__ = ReplacedParameter
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
