"""Paged: the tensor at rest, with metadata in memory and bytes in a tier.

Note [what a tensor at rest can do]
`.shape`, `.dtype`, `.numel()` and `.device` (cpu) are true. Copying out (`clone`, `contiguous`, `to`, `float`, `cpu`,
pickling, `copy_` from it, `data_ptr`) reads the bytes; `copy_` into it writes them. These are the operations that
`state_dict`, `load_state_dict`, `torch.save`, `torch.distributed.checkpoint` and safetensors use. Every other operation
raises PagedOutError naming the tensor: a silent stand-in would broadcast into wrong results.

Note [borrowing]
While the model runs, a module may use a parameter of another: before autograd sees the operation, the live parameter
takes the place of the one at rest (see lending.py). What needs no bytes, and what writes, goes on with the one at rest.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from tierzero.errors import PagedOutError
from tierzero.units.live import HARMLESS

aten = torch.ops.aten


class Source(Protocol):
    """What a Paged tensor reads from and writes to."""

    @property
    def name(self) -> str:
        """How errors call it."""
        ...

    def read(self) -> torch.Tensor:
        """The bytes as a new plain CPU tensor."""
        ...

    def write(self, value: torch.Tensor) -> None:
        """Replace the bytes by `value` (same shape, cast to the dtype at rest)."""
        ...


class NoStorage:
    """An identity and a size in bytes, and no memory."""

    def __init__(self, identity: int, nbytes: int) -> None:
        self._identity = identity
        self._nbytes = nbytes

    def data_ptr(self) -> int:
        """Another number than that of any tensor alive; there is nothing at this address to be read."""
        return self._identity

    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self._nbytes


class Paged(torch.Tensor):
    """A tensor whose bytes lie in a tier; see Note [what a tensor at rest can do]."""

    source: Source
    held: torch.Tensor | None  # what `data_ptr` has given the address of

    @staticmethod
    def __new__(cls, source: Source, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Paged:
        size, device = torch.Size(shape), torch.device("cpu")
        paged: Paged = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        paged.source, paged.held = source, None
        return paged

    def __init__(self, source: Source, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Paged({self.source.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        value = memo[id(self)] = self._plain()
        return value

    def _plain(self) -> torch.Tensor:
        """The value as what this stands for: a plain parameter or a plain tensor."""
        value = self.source.read()
        return nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value

    def read(self) -> torch.Tensor:
        """The value as a new plain CPU tensor."""
        return self.source.read()

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """The value as a new plain CPU tensor: what is about to be written to a file is made contiguous first."""
        return self.source.read().contiguous(memory_format=memory_format)

    def untyped_storage(self) -> Any:
        """Stands for storage that this tensor does not have: libraries that save tensors ask which of them share it.
        Names of one tensor do not; each is saved.
        """
        return NoStorage(id(self) if self.held is None else self.held.data_ptr(), self.nbytes)

    def data_ptr(self) -> int:
        """The address of a copy of the value, as of this call, that lives as long as this tensor: for libraries that
        write files from memory. PagedOutError for a parameter, which lives as long as the model.
        """
        if isinstance(self, nn.Parameter):
            raise PagedOutError(
                f"data_ptr: {self.source.name} has no memory while it is at rest; to write a file, take the tensors of "
                "model.state_dict(), or use tierzero.export(model, path), which holds a few MiB at a time"
            )
        value = self.source.read()
        if self.held is None:
            self.held = value
        else:
            self.held.copy_(value)  # whoever has the address already keeps a valid one
        return self.held.data_ptr()

    @property
    def data(self) -> torch.Tensor:
        """As torch's, still paged. Assigning a tensor of the same shape and dtype writes its values; others are
        refused.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, Paged) and value.source is self.source:
            return
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise PagedOutError(
                f"{self.source.name} is {self.dtype} {tuple(self.shape)} in the tiers and cannot become {value.dtype} "
                f"{tuple(value.shape)} on {value.device}: "
                "cast, move and resize models before offload()"
            )
        self.source.write(value.detach())

    def numpy(self, *, force: bool = False) -> Any:
        """The values need `unsharded`, or `read()`."""
        raise _paged_out("numpy", [self])

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise _paged_out("__dlpack__", [self])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _needs_no_bytes(func) and not _writes(func, args, kwargs):
            for paged in _tensors(args, kwargs):
                lending = getattr(paged.source, "lending", None)
                if lending is not None:
                    return lending.call(func, args, kwargs)  # see Note [borrowing]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is aten.detach.default and isinstance(first, Paged):
            return Paged(first.source, first.shape, first.dtype)
        if func is aten.is_pinned.default:
            return False
        if func is aten.copy_.default and isinstance(first, Paged):
            value = args[1].source.read() if isinstance(args[1], Paged) else args[1]
            first.source.write(value.detach().expand(first.shape))
            return first
        if func is aten.copy_.default:
            return func(first, args[1].source.read(), *args[2:], **kwargs)
        if func in (aten._to_copy.default, aten.clone.default) and isinstance(first, Paged):
            return func(first.source.read(), *args[1:], **kwargs)
        raise _paged_out(func.name() if hasattr(func, "name") else str(func), _tensors(args, kwargs))


def _needs_no_bytes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _VALUES
    return func in HARMLESS or name in _HARMLESS or (name.startswith("is_") and name != "is_nonzero")


def _writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    first = args[0] if args else next((kwargs[key] for key in ("tensor", "self", "input") if key in kwargs), None)
    changes = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return (changes and bool(_tensors(first))) or bool(_tensors(kwargs.get("out")))


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_IN_PLACE |= {"__setitem__", "__ilshift__", "__irshift__", "__imatmul__"}
_VALUES = ("T", "mT", "H", "mH", "real", "imag")  # properties that view the bytes
_HARMLESS = ("__set__", "detach", "is_contiguous", "storage_offset", "__len__", "backward", "retain_grad")


def _paged_out(what: str, tensors: list[Paged]) -> PagedOutError:
    names = sorted({value.source.name for value in tensors})
    if any(getattr(value.source, "closed", False) for value in tensors):
        return PagedOutError(
            f"{what} needs the values of {', '.join(names)}, whose engine was closed by tierzero.close(); "
            "build the model anew"
        )
    optimizer = _stepping(tensors)
    if optimizer is not None:
        return PagedOutError(
            f"{type(optimizer).__name__} cannot step {', '.join(names)}, which the tiers hold. Build "
            "tierzero.AdamW(model.parameters(), ...) instead, or for other classes "
            f"tierzero.wrap_optimizer({type(optimizer).__name__}, model.parameters(), ...)"
        )
    return PagedOutError(
        f"{what} needs the values of {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} paged out: "
        "parameters are resident only while the module that owns them runs forward or backward. "
        "Wrap the code in `with tierzero.unsharded(module):` (write=True to change values), or register the method "
        "that uses it with "
        "tierzero.register_forward_method(module, name)"
    )


def _stepping(tensors: list[Paged]) -> torch.optim.Optimizer | None:
    """An optimizer of others in whose step this happens to parameters that it was given, if there is one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, torch.optim.Optimizer):
            given = {id(param) for group in found.param_groups for param in group["params"]}
            ours = type(found).__module__.startswith("tierzero.")
            return None if ours or given.isdisjoint(map(id, tensors)) else found
        frame = frame.f_back
    return None


def _tensors(*trees: Any) -> list[Paged]:
    found: list[Paged] = []
    for tree in trees:
        if isinstance(tree, Paged):
            found.append(tree)
        elif isinstance(tree, list | tuple):
            found.extend(_tensors(*tree))
        elif isinstance(tree, dict):
            found.extend(_tensors(*tree.values()))
    return found
