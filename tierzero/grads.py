"""HostGrad: a published gradient in host memory, which waits for the engine before anybody reads or edits it.

Note [gradients belong to the step until it is done]
`step()` only queues the update, and the update reads the gradient later. Code that edits `.grad` in between (`model.zero_grad(set_to_none=False)`,
say) would change a step that has already been taken. So a published gradient is a view of the unit's gradient buffer whose every operation
first settles the unit: copies into it have landed and no queued update still needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class HostGrad(torch.Tensor):
    """A plain strided CPU tensor over a unit's gradient buffer; see Note [gradients belong to the step until it is done]."""

    settle: Callable[[], None]

    @classmethod
    def over(cls, view: torch.Tensor, settle: Callable[[], None]) -> HostGrad:
        """`view` itself, calling `settle` before each operation."""
        grad = view.as_subclass(cls)
        grad.settle = settle
        return grad

    @property
    def plain(self) -> torch.Tensor:
        """The same memory as a plain tensor; reading it waits for nothing."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.settle()
        return self.plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _settle(args)
        _settle(tuple((kwargs or {}).values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _settle(args: Any) -> None:
    for value in args:
        if isinstance(value, HostGrad):
            value.settle()
        elif isinstance(value, list | tuple):
            _settle(value)
