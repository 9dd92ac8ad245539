"""What autograd saves while a unit runs: its weights by name, everything else as it is. This is the page-fault net.

Note [saved weights]
A saved weight is kept as "this view of that unit": unpacking it makes the unit resident first, whatever was evicted
since. Everything else goes to the hooks that were active outside (activation checkpointing's, a user's): pushing our
own over them would switch non-reentrant checkpointing off. Tensors that nobody else packs are kept by `Kept`, or by
what stands in for it and moves them (see activations.py), and are checked for in-place changes here, because autograd
leaves that to whoever packs.

Note [version without bytes]
A moved tensor must still be known to have been changed in place, and must not be kept for it. A detached tensor shares
the version counter; given other data it keeps the counter and lets go of the bytes.

Private torch names used here, and why:
- torch._C._autograd._{top,push,pop}_saved_tensors_default_hooks: the only way to reach the hooks that were active
outside, and to push without Python code in between.
- Tensor._version: what autograd itself compares.
- UntypedStorage._cdata, _new_with_weak_ptr: whether a storage is the one that was saved, and the storage again, without
keeping it alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tierzero.units.live import LiveParameter
from tierzero.units.unit import Unit

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

    __slots__ = ("tensor", "then", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.tensor = tensor.detach()
        self.version = unit.version
        self.then = tensor._version

    def check(self) -> None:
        """RuntimeError, as autograd's own, if the weight was changed since it was saved."""
        for now, then in ((self.unit.version, self.version), (self.tensor._version, self.then)):
            if now != then:
                raise RuntimeError(_CHANGED.format(what=f"a weight of unit {self.unit.name}", now=now, then=then))


class Kept:
    """Any other saved tensor; checks, as autograd does for tensors without hooks, that nobody changed it in place."""

    __slots__ = ("shape", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output kept by its own node would keep the graph alive for ever
        self.version = tensor._version if not tensor.is_inference() else -1
        self.shape = tensor.shape

    def let_go(self) -> None:
        """Keep the version counter alone; see Note [version without bytes]."""
        self.tensor.data = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)

    def check(self) -> None:
        """RuntimeError, as autograd's own, if the tensor was changed in place since it was saved."""
        if self.version >= 0 and self.tensor._version != self.version:
            what = f"[{self.tensor.type()} {list(self.shape)}]"
            raise RuntimeError(_CHANGED.format(what=what, now=self.tensor._version, then=self.version))

    def unpack(self) -> torch.Tensor:
        """The tensor."""
        self.check()
        return self.tensor


class WeakStorage(StorageWeakRef):
    """A storage that is not kept alive. While this lives, no other storage has its `cdata`."""

    def get(self) -> torch.UntypedStorage | None:
        """The storage, or None if it is gone."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.cdata)
        return found


def storage_id(tensor: torch.Tensor) -> int:
    """What `tensor`'s storage is known by as long as somebody refers to it, weakly or not."""
    return int(tensor.untyped_storage()._cdata)


def values_id(tensor: torch.Tensor) -> tuple[int, int]:
    """What the values in `tensor`'s storage are known by until somebody changes them in place."""
    return storage_id(tensor), int(tensor._version)


Keep = Callable[[torch.Tensor], Kept]


def unit_of(tensor: torch.Tensor, by_storage: Mapping[int, Unit]) -> Unit | None:
    """The unit whose storage `tensor` views, if any; `by_storage` maps storages' addresses to units."""
    if tensor.layout is torch.strided and type(tensor) in _PLAIN:
        return by_storage.get(tensor.untyped_storage()._cdata)
    return None


class _Pack:
    """What autograd calls with a tensor that it saves; `outer` is the pair that was active before."""

    __slots__ = ("by_storage", "keep", "outer")

    def __init__(self, by_storage: Mapping[int, Unit], keep: Keep, outer: tuple[Pack, Unpack] | None) -> None:
        self.by_storage = by_storage
        self.keep = keep
        self.outer = outer

    def __call__(self, tensor: torch.Tensor) -> Any:
        unit = unit_of(tensor, self.by_storage)
        if unit is not None:
            return _Weight(unit, tensor)
        return self.outer[0](tensor) if self.outer is not None else self.keep(tensor)


class Net:
    """Saved-tensor hooks; see Note [saved weights]. `fault(unit)` must leave the unit resident; it is called when a
    weight is unpacked. `keep(tensor)` takes a tensor that nobody else packs. Where the innermost pair is that of the
    same model already, there is nothing to enter.

    Signal handlers run after a call or at the start of a function, never between an assignment and the C function that
    follows it: `_entered` tells at every moment whether a pair is on autograd's stack for this.
    """

    __slots__ = ("_by_storage", "_entered", "_fault", "_keep")

    def __init__(self, by_storage: Mapping[int, Unit], fault: Callable[[Unit], None], keep: Keep = Kept) -> None:
        self._by_storage, self._fault, self._keep = by_storage, fault, keep
        self._entered = False

    def enter(self) -> None:
        """Push them onto autograd's stack."""
        outer = _top()
        if outer is not None and isinstance(outer[0], _Pack) and outer[0].by_storage is self._by_storage:
            return
        pack, push = _Pack(self._by_storage, self._keep, outer), torch._C._autograd._push_saved_tensors_default_hooks
        unpack = _unpack(self._fault, outer)
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

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *failure: object) -> None:
        self.leave()


def _top() -> tuple[Pack, Unpack] | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _unpack(fault: Callable[[Unit], None], outer: tuple[Pack, Unpack] | None) -> Unpack:
    def unpack(packed: Any) -> torch.Tensor:
        if type(packed) is _Weight:
            packed.check()
            fault(packed.unit)
            return packed.tensor
        if isinstance(packed, Kept):
            return packed.unpack()
        assert outer is not None
        return outer[1](packed)

    return unpack
