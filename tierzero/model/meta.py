"""Models without values: parameters on the meta device, buffers as their code computes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside get parameters on the meta device, and buffers (rotary tables, say) with real values, in the
    dtype that their code asks for.

    Under `torch.device("meta")` the buffers would have no values either, and those that no checkpoint holds would be
    lost. One parameter's memory is taken at a time, and not touched. See `deferred_init` for models whose initial
    values are wanted.
    """
    with replacing_parameters(lambda parameter, on_meta: None):
        yield


@contextmanager
def replacing_parameters(note: Callable[[nn.Parameter, nn.Parameter], None]) -> Iterator[None]:
    """Put a parameter on the meta device in the place of each one that is registered; `note(parameter, on_meta)`."""
    made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
    ours: dict[int, nn.Parameter] = {}

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or id(parameter) in ours or parameter.is_meta:
            return None
        before = made.get(id(parameter))
        if before is not None and before[0]() is parameter:
            return before[1]  # one parameter in two places stays one
        on_meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        on_meta.__dict__.update(parameter.__dict__)
        made[id(parameter)] = weakref.ref(parameter), on_meta
        ours[id(on_meta)] = on_meta
        note(parameter, on_meta)
        return on_meta

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
