"""Models without values: parameters on the meta device, buffers as their code computes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside get parameters on the meta device, and buffers (rotary tables, say) with real values, in the
    dtype that their code asks for.

    Under `torch.device("meta")` the buffers would have no values either, and those that no checkpoint holds would be
    lost. One parameter's memory is taken at a time, and not touched.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
