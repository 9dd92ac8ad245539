"""The live form of a parameter: a view of its unit's flat storage, whose bytes come and go.

Note [shut]
Reading freed bytes is a crash, not an exception, and user code may keep a weight that it saw in forward. So the live
parameter is shut while it is not registered: its class becomes one whose every operation raises a sentence with its
name. Open, it is a plain parameter and costs nothing. Views of it that were made while it was open (`weight.t()`) are
plain tensors that nobody can shut: those must not be kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tierzero.errors import PagedOutError


class LiveParameter(nn.Parameter):
    """A parameter that is resident while its class is this one. `param_name` is its name in the model."""

    __slots__ = ("param_name",)
    param_name: str

    def open(self) -> None:
        """Let it be used: the unit is resident and stays so until `shut`."""
        self.__class__ = LiveParameter

    def shut(self) -> None:
        """Refuse every use. See Note [shut]."""
        self.__class__ = ShutParameter


class ShutParameter(LiveParameter):
    """A live parameter whose bytes may have left. Tracebacks, debuggers and test runners may still print it."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = sorted({value.param_name for value in _leaves(args, kwargs) if isinstance(value, ShutParameter)})
        raise PagedOutError(
            f"{getattr(func, '__name__', func)} needs the values of {', '.join(names) or 'a parameter'}, kept from an "
            "earlier forward and paged out since: live weights may be used only while their module runs forward or "
            "backward. Keep a copy (weight.detach().clone()), or take the parameter from the module inside "
            "`with tierzero.unsharded(module):`"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LiveParameter({self.param_name}, shape={tuple(self.shape)}, dtype={self.dtype}, paged out)"


_HARMLESS = {  # what needs no bytes
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_leaf", "grad", "grad_fn", "is_sparse", "is_meta")),
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "stride", "element_size")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex", "requires_grad_", "__hash__")),
    *(getattr(torch.Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")),
}


def _leaves(*trees: Any) -> list[Any]:
    found: list[Any] = []
    for tree in trees:
        if isinstance(tree, list | tuple):
            found.extend(_leaves(*tree))
        elif isinstance(tree, dict):
            found.extend(_leaves(*tree.values()))
        else:
            found.append(tree)
    return found


def live_parameter(
    param: nn.Parameter, name: str, storage: torch.UntypedStorage, offset: int, device: torch.device
) -> LiveParameter:
    """The live form of `param`: contiguous at `offset` bytes of `storage`, with a version counter of its own."""
    view = torch.empty(0, dtype=param.dtype, device=device)
    first = offset // param.element_size() if param.numel() else 0
    view.set_(storage, first, param.shape, _strides(param.shape))
    live = LiveParameter(view, requires_grad=param.requires_grad)
    live.param_name = name
    return live


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
