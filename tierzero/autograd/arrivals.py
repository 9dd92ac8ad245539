"""Parameters that come into a model after offload(): the engine would not move, step or save them, and says so.

torch's own hooks on registering modules and parameters count, from the first offload() on; only after one of them does
a forward look through its model.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tierzero.errors import TierzeroError
from tierzero.units.live import LiveParameter
from tierzero.units.paged import Paged
from tierzero.units.unit import Unit

_HANDLES: list[Any] = []
_COUNT = itertools.count(1)
_LAST = [0]


def _count(*_: Any) -> None:
    _LAST[0] = next(_COUNT)


class Arrivals:
    """Finds parameters of one model that belong to none of its `units`."""

    def __init__(self, units: list[Unit]) -> None:
        if not _HANDLES:
            _HANDLES.append(register_module_module_registration_hook(_count))
            _HANDLES.append(register_module_parameter_registration_hook(_count))
        self._ours = {(id(module), name) for unit in units for slots in unit.slots for module, name in slots}
        self._start = self._seen = _LAST[0]

    def check(self, model: nn.Module, *, trained: bool) -> None:
        """TierzeroError naming parameters that came after offload(); with `trained`, those alone that get gradients."""
        if _LAST[0] == (self._seen if trained else self._start):
            return
        seen = _LAST[0]
        found = []
        for prefix, module in model.named_modules():
            for name, param in module._parameters.items():
                new = isinstance(param, nn.Parameter) and (id(module), name) not in self._ours
                if new and not isinstance(param, Paged | LiveParameter) and (param.requires_grad or not trained):
                    found.append(f"{prefix}.{name}" if prefix else name)
        if found:
            names = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
            raise TierzeroError(
                f"{names} came into the {type(model).__name__} after offload(), which would not be moved, stepped or "
                "saved with it: build the model first (new heads, resized embeddings, adapters) and offload() it then, "
                "or keep the new module outside, in a module around the offloaded one"
            )
        if trained:
            self._seen = seen
