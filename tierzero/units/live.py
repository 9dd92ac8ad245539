"""The live form of a parameter: a view of its unit's flat storage, whose bytes come and go.

Note [shut]
Reading freed bytes is a crash, not an exception, and user code may keep a weight that it saw in forward. So the live
parameter is shut while it is not registered: its class becomes one whose every operation raises a sentence with its
name. Open, it is a plain parameter and costs nothing. Views of it that were made while it was open (`weight.t()`) are
plain tensors that nobody can shut: those must not be kept.

Note [changed values]
Code that runs while a parameter is open may change its values: in place, which its version counter tells, or through
`.data`, which nothing tells. So a parameter notes that its `.data` was taken, and its bytes are compared afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tierzero.errors import PagedOutError


class LiveParameter(nn.Parameter):
    """A parameter that is resident while its class is this one. `param_name` is its name in the model."""

    __slots__ = ("exposed", "param_name")
    param_name: str
    exposed: set[str]  # the names of those in its unit whose `.data` somebody has had

    @property
    def data(self) -> torch.Tensor:
        """As torch's; see Note [changed values]. Assigning a tensor of the same kind copies its values; others are
        refused.
        """
        self.exposed.add(self.param_name)
        value: torch.Tensor = super().data
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise PagedOutError(
                f"{self.param_name} is {self.dtype} {tuple(self.shape)} on {self.device} in an offloaded model and "
                f"cannot become {value.dtype} {tuple(value.shape)} on {value.device}: cast, move and resize models "
                "before offload()"
            )
        self.data.copy_(value)

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
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = sorted({value.param_name for value in leaves(args, kwargs) if isinstance(value, ShutParameter)})
        raise PagedOutError(
            f"{getattr(func, '__name__', func)} needs the values of {', '.join(names) or 'a parameter'}, kept from an "
            "earlier forward and paged out since: live weights may be used only while their module runs forward or "
            "backward. Keep a copy (weight.detach().clone()), or take the parameter from the module inside "
            "`with tierzero.unsharded(module):`"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LiveParameter({self.param_name}, shape={tuple(self.shape)}, dtype={self.dtype}, paged out)"


HARMLESS = {  # what needs no bytes
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_leaf", "grad", "grad_fn", "is_sparse", "is_meta")),
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "stride", "element_size")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex", "requires_grad_", "__hash__")),
    *(getattr(torch.Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")),
}


def leaves(*trees: Any) -> list[Any]:
    """What is in tuples, lists and dicts, and in those inside them."""
    found: list[Any] = []
    for tree in trees:
        if isinstance(tree, list | tuple):
            found.extend(leaves(*tree))
        elif isinstance(tree, dict):
            found.extend(leaves(*tree.values()))
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
    live.param_name, live.exposed = name, set()
    return live


class Values:
    """Whether live parameters still have the values that lie in the tiers; see Note [changed values]."""

    def __init__(self, live: list[LiveParameter]) -> None:
        self.live = live
        self._versions: list[int] = []
        self._exposed: set[str] = set()

    def at_rest(self) -> None:
        """The bytes in the tiers are those of the live parameters."""
        self._versions = [live._version for live in self.live]
        self._exposed.clear()

    def changed(self) -> list[int]:
        """The positions of those that have changed since, or may have."""
        now = [live._version for live in self.live]
        if not self._versions or (now == self._versions and not self._exposed):
            return []
        return [
            index
            for index, live in enumerate(self.live)
            if now[index] != self._versions[index] or live.param_name in self._exposed
        ]

    def add(self, live: LiveParameter) -> None:
        """Watch one more."""
        live.exposed = self._exposed
        self.live.append(live)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
