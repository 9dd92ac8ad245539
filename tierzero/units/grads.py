"""HostGrad: a published gradient in host memory, which waits for the engine before anybody reads or edits it.

Note [gradients belong to the step until it is done]
`step()` only queues the update, and the update reads the gradient later. Code that edits `.grad` in between
(`model.zero_grad(set_to_none=False)`, say) would change a step that has already been taken. So a published gradient is
a view of the unit's gradient buffer whose every operation first settles the unit: copies into it have landed and no
queued update still needs it. One that writes also has a clip before it applied, which otherwise waits for the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class HostGrad(torch.Tensor):
    """A plain strided CPU tensor over a unit's gradient buffer; see Note [gradients belong to the step until it is
    done].
    """

    use: Callable[[bool], None]

    @classmethod
    def over(cls, view: torch.Tensor, use: Callable[[bool], None]) -> HostGrad:
        """`view` itself, calling `use(changes)` before each operation: whether it writes to it."""
        grad = view.as_subclass(cls)
        grad.use = use
        return grad

    def part(self) -> None:
        """Move to memory of its own, because the buffer is about to hold another gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            copy = self.as_subclass(torch.Tensor).clone()
            self.set_(copy.untyped_storage(), 0, copy.shape, copy.stride())
        self.use = _no_more

    @property
    def plain(self) -> torch.Tensor:
        """The same memory as a plain tensor; reading it waits for nothing."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self.use(False)
        return repr(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.use(False)
        return self.plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        self.use(False)
        value = memo[id(self)] = self.plain.clone()
        return value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _use(args, _writes(func.__name__))
        _use(tuple(kwargs.values()), "out" in kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            first = args[0] if args else None
            if type(result) is torch.Tensor and isinstance(first, HostGrad) and result.numel():
                if result.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                    return result
                return cls.over(result, first.use)  # a view: the same bytes, the same care
            return result


def _no_more(changes: bool) -> None:
    pass


def _writes(name: str) -> bool:
    """Whether a torch function of this name writes to its arguments: add_, __iadd__, __setitem__."""
    return name == "__setitem__" or (name.startswith("__i") if name.endswith("__") else name.endswith("_"))


def _use(args: Any, changes: bool) -> None:
    for value in args:
        if isinstance(value, HostGrad):
            value.use(changes)
        elif isinstance(value, list | tuple):
            _use(value, changes)
