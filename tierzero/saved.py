"""What autograd saves while a unit runs: its weights by name, everything else as it is. This is the page-fault net.

Note [saved weights]
A saved weight is kept as "this view of that unit": unpacking it makes the unit resident first, whatever was evicted
since. Everything else goes to the hooks that were active outside (activation checkpointing's, a user's): pushing our
own over them would switch non-reentrant checkpointing off. Tensors that nobody else packs are checked for in-place
changes here, because autograd leaves that to whoever packs.

`torch._C._autograd._{top,push,pop}_saved_tensors_default_hooks` are private: the only way to reach the hooks that were
active outside, and to push without Python code in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tierzero.live import LiveParameter
from tierzero.unit import Unit

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
    "version {now}; "
    "expected version {then} instead"
)
Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
_PLAIN = (torch.Tensor, nn.Parameter, LiveParameter)


class _Weight:
    """A saved view of a unit's storage."""

    __slots__ = ("tensor", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.tensor = tensor.detach()
        self.version = unit.version


class _Kept:
    """Any other saved tensor; checks, as autograd does for tensors without hooks, that nobody changed it in place."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output kept by its own node would keep the graph alive for ever
        self.version = tensor._version if not tensor.is_inference() else -1

    def unpack(self) -> torch.Tensor:
        if self.version >= 0 and self.tensor._version != self.version:
            what = f"[{self.tensor.type()} {list(self.tensor.shape)}]"
            raise RuntimeError(_CHANGED.format(what=what, now=self.tensor._version, then=self.version))
        return self.tensor


def unit_of(tensor: torch.Tensor, by_storage: Mapping[int, Unit]) -> Unit | None:
    """The unit whose storage `tensor` views, if any; `by_storage` maps storages' addresses to units."""
    if tensor.layout is torch.strided and type(tensor) in _PLAIN:
        return by_storage.get(tensor.untyped_storage()._cdata)
    return None


class Net:
    """Saved-tensor hooks; see Note [saved weights]. `fault(unit)` must leave the unit resident; it is called when a
    weight is unpacked.

    Signal handlers run after a call or at the start of a function, never between an assignment and the C function that
    follows it: `_entered` tells at every moment whether a pair is on autograd's stack for this.
    """

    __slots__ = ("_entered", "_pack", "_unpack")

    def __init__(self, by_storage: Mapping[int, Unit], fault: Callable[[Unit], None]) -> None:
        self._pack, self._unpack = _hooks(by_storage, fault)
        self._entered = False

    def enter(self) -> None:
        """Push them onto autograd's stack."""
        pack, unpack, push = self._pack, self._unpack, torch._C._autograd._push_saved_tensors_default_hooks
        try:
            self._entered = True
            push(pack, unpack)
        except BaseException:
            top = _top()
            self._entered = top is not None and top[0] is pack
            raise

    def leave(self) -> None:
        """Take one pair off, once: these; or, after an exception that passed module hooks by, those of a context
        outside, which has taken these for its own.
        """
        pop = torch._C._autograd._pop_saved_tensors_default_hooks
        if self._entered:
            self._entered = False
            pop()


def _top() -> tuple[Pack, Unpack] | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _hooks(by_storage: Mapping[int, Unit], fault: Callable[[Unit], None]) -> tuple[Pack, Unpack]:
    outer = _top()

    def pack(tensor: torch.Tensor) -> Any:
        unit = unit_of(tensor, by_storage)
        if unit is not None:
            return _Weight(unit, tensor)
        return outer[0](tensor) if outer is not None else _Kept(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if type(packed) is _Weight:
            unit = packed.unit
            if packed.version != unit.version:
                raise RuntimeError(
                    _CHANGED.format(what=f"a weight of unit {unit.name}", now=unit.version, then=packed.version)
                )
            fault(unit)
            return packed.tensor
        if type(packed) is _Kept:
            return packed.unpack()
        assert outer is not None
        return outer[1](packed)

    return pack, unpack
