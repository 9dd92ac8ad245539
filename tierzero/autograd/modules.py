"""Hooks on modules: of one module and not of its copies; and whether a module is running already.

Private torch names used here, and why:
- nn.Module._call_impl: its code object, to see whether a module is running further up the stack.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn


class ModuleHook:
    """A hook of `module` alone: deep copies of it take the hook along, and it does nothing there. Pickled, it is a hook
    that does nothing.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self.module = weakref.ref(module)
        self.call = call

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        return self.call(*args) if module is self.module() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return self

    def __reduce__(self) -> Any:
        return _left_behind, ()


def _left_behind() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any) -> None:
    """The hook of a module that was pickled while it was offloaded."""


_CALL = nn.Module._call_impl.__code__


def is_running(module: nn.Module) -> bool:
    """Whether a call of `module` is on the Python stack of the caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def is_nested() -> bool:
    """Whether the module whose hook runs is running further up the Python stack too."""
    frame: FrameType | None = sys._getframe(1)
    module = None
    while frame is not None:
        if frame.f_code is _CALL:
            here = frame.f_locals.get("self")
            if module is not None and here is module:
                return True
            module = module if module is not None else here
        frame = frame.f_back
    return False
