"""The live form of a parameter: a view of its unit's flat storage, whose bytes come and go."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class LiveParameter(nn.Parameter):
    """A parameter whose bytes may have left: tracebacks, debuggers and test runners print what they find, and reading
    freed bytes is a crash.
    """

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        storage = self.untyped_storage()
        if storage.nbytes() < (self.storage_offset() + self.numel()) * self.element_size():
            return f"LiveParameter(shape={tuple(self.shape)}, dtype={self.dtype}, paged out)"
        return str(super().__repr__())


def live_parameter(
    param: nn.Parameter, storage: torch.UntypedStorage, offset: int, device: torch.device
) -> LiveParameter:
    """The live form of `param`: contiguous at `offset` bytes of `storage`, with a version counter of its own."""
    view = torch.empty(0, dtype=param.dtype, device=device)
    first = offset // param.element_size() if param.numel() else 0
    view.set_(storage, first, param.shape, _strides(param.shape))
    return LiveParameter(view, requires_grad=param.requires_grad)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
