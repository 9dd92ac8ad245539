"""Construction whose initial values are made later: what every parameter was filled with, to be done again.

Note [recording]
Inside `deferred_init`, parameters go to the meta device as they are registered. Whatever changes one afterwards, in
place, is noted with the state of torch's CPU generator before it, and done once on memory that is thrown away, so that
the generator goes on as in the plain model. A whole parameter filled anew forgets what was noted before. The notes are
played back one parameter at a time by `initialize`. Code that reads a parameter gets the value it would have had,
played back for the occasion. Values that a parameter had when it was registered are kept, unless
they were uninitialised memory (torch.empty).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tierzero.errors import TierzeroError
from tierzero.model.meta import replacing_parameters

_NAME = "_tierzero_recipe"  # the attribute of a parameter that has one
_HARMLESS = {"requires_grad_", "detach_", "share_memory_", "retain_grad", "__set__", "__delete__", "__repr__"}
_METADATA = {
    "dim",
    "ndimension",
    "size",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "element_size",
    "is_complex",
} | {
    *("is_floating_point", "is_contiguous", "data_ptr", "__len__", "__hash__", "get_device", "is_signed", "type"),
    *(
        "to",
        "float",
        "half",
        "bfloat16",
        "double",
        "cpu",
        "_has_compatible_shallow_copy_type",
    ),  # casts of a whole model
}
_VIEWS = {"__get__", "__getitem__", "detach", "view", "view_as", "reshape", "flatten", "narrow", "select", "t"} | {
    *("transpose", "permute", "squeeze", "unsqueeze", "chunk", "split", "unbind", "unflatten", "expand_as"),
}
_EXACT = {"zero_", "fill_", "zeros_", "ones_", "constant_", "copy_", "mul_", "add_", "sub_", "div_", "clamp_"} | {
    *("__setitem__", "__imul__", "__iadd__", "__isub__", "__itruediv__", "erfinv_", "masked_fill_", "sqrt_"),
}  # they draw no random numbers
_FILLS = {"zero_", "fill_", "zeros_", "ones_", "constant_", "copy_", "normal_", "uniform_", "exponential_"} | {
    *("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_", "random_"),
}  # nothing of what was there before is left
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided"}
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_Spec = tuple[torch.Size, tuple[int, ...], int]


class _Itself:
    """Stands for the tensor in the arguments of a noted call."""


@dataclass
class _Op:
    func: Any
    args: Any
    kwargs: Any
    spec: _Spec | None  # of a view; None for the whole parameter
    state: torch.Tensor | None  # of the generator before it, if it drew numbers

    def run(self, value: torch.Tensor) -> None:
        target = value if self.spec is None else value.as_strided(*self.spec)
        args, kwargs = tree_map(lambda one: target if one is _Itself else one, (self.args, self.kwargs))
        self.func(*args, **kwargs)


@dataclass
class Recipe:
    """How the initial value of one parameter is made."""

    shape: torch.Size
    dtype: torch.dtype
    start: torch.Tensor | None
    ops: list[_Op] = field(default_factory=list)

    def make(self) -> torch.Tensor:
        """The value, a new CPU tensor; changes the state of the generator."""
        value = torch.empty(self.shape, dtype=self.dtype) if self.start is None else self.start.clone()
        for op in self.ops:
            if op.state is not None:
                torch.set_rng_state(op.state)
            op.run(value)
        return value


def recipe_of(param: nn.Parameter) -> Recipe | None:
    """How to make the initial value of a parameter that was built inside `deferred_init`; None if nothing is noted."""
    found = param.__dict__.get(_NAME)
    return found if isinstance(found, Recipe) and (found.ops or found.start is not None) else None


def forget(param: nn.Parameter) -> None:
    """Drop what is noted of a parameter."""
    param.__dict__.pop(_NAME, None)


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Any, Recipe, _Spec | None]] = {}  # id -> (tensor or a reference, ...)
        self._empty: set[int] = set()  # addresses of uninitialised memory

    def registered(self, parameter: nn.Parameter, on_meta: nn.Parameter) -> None:
        blank = parameter.data_ptr() in self._empty or not parameter.numel()
        recipe = Recipe(parameter.shape, parameter.dtype, None if blank else parameter.detach().clone())
        on_meta.__dict__[_NAME] = recipe
        self._known[id(on_meta)] = on_meta, recipe, None
        self._known[id(parameter)] = weakref.ref(parameter), recipe, None

    def _find(self, tensor: Any) -> tuple[Recipe, _Spec | None] | None:
        known = self._known.get(id(tensor)) if isinstance(tensor, torch.Tensor) else None
        if known is None:
            return None
        there = known[0]() if isinstance(known[0], weakref.ref) else known[0]
        return known[1:] if there is tensor else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        found = self._find(first)
        in_place = name in ("__setitem__", *_EXACT) or (name.endswith("_") and not name.startswith("__"))
        if func == _IS_META and found is not None:
            return False  # some of torch's own initialisation does nothing on the meta device
        if name in _HARMLESS or not any(self._find(one) for one in tree_leaves((args, kwargs))):
            result = func(*args, **kwargs)
            self._note_memory(name, in_place and name not in _HARMLESS, (args, kwargs), result)
            return result
        if found is not None and in_place:
            self._note(func, name, args, kwargs, first, *found)
            return None if name == "__setitem__" else first
        picked = name == "__getitem__" and any(isinstance(one, torch.Tensor) for one in tree_leaves(args[1:]))
        if found is not None and (name in _METADATA or (name in _VIEWS and not picked)):
            result = func(*args, **kwargs)
            for one in tree_leaves(result) if name in _VIEWS and first.is_meta else ():
                if isinstance(one, torch.Tensor) and one.is_meta and one is not first:
                    self._known[id(one)] = one, found[0], (one.shape, one.stride(), int(one.storage_offset()))
            return result
        if name in _EMPTY or name.startswith("new_") or name.endswith("_like"):
            kwargs = {"device": "cpu", **kwargs}  # memory to compute in
        return func(*tree_map(self._value, args), **tree_map(self._value, kwargs))

    def _value(self, one: Any) -> Any:
        """What a parameter (or a view of one) holds now; anything else as it is."""
        found = self._find(one)
        if found is None or not one.is_meta:
            return one
        state = torch.get_rng_state()
        value = found[0].make()
        torch.set_rng_state(state)
        return value if found[1] is None else value.as_strided(*found[1])

    def _note_memory(self, name: str, in_place: bool, given: Any, result: Any) -> None:
        """Keep track of which memory is uninitialised."""
        before = {t.data_ptr() for t in tree_leaves(given) if isinstance(t, torch.Tensor) and not t.is_meta}
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and not one.is_meta and one.device.type == "cpu":
                if name in _EMPTY:
                    self._empty.add(one.data_ptr())
                elif in_place or one.data_ptr() not in before:
                    self._empty.discard(one.data_ptr())

    def _note(
        self, func: Any, name: str, args: Any, kwargs: Any, first: torch.Tensor, recipe: Recipe, spec: _Spec | None
    ) -> None:
        def kept(one: Any) -> Any:
            if one is first:
                return _Itself
            if isinstance(one, torch.Tensor):
                one = self._value(one)
                if one.is_meta:
                    raise TierzeroError(
                        f"{name} gives a parameter values from a tensor on the meta device, which deferred_init "
                        "cannot do again: build this model plainly, or under tierzero.parameters_on_meta() and pass "
                        "init= to tierzero.initialize()"
                    )
                return one.detach().clone()
            return one

        own_args, own_kwargs = tree_map(kept, (args, kwargs))
        op = _Op(func, own_args, own_kwargs, spec, None)
        if name not in _EXACT:
            before = torch.get_rng_state()
            op.run(torch.empty(recipe.shape, dtype=recipe.dtype))
            if not torch.equal(before, torch.get_rng_state()):
                op.state = before
        whole = spec is None or spec[0].numel() == recipe.shape.numel()
        if whole and name in _FILLS:
            recipe.ops.clear()
            recipe.start = None
        recipe.ops.append(op)


@contextmanager
def deferred_init() -> Iterator[None]:
    """Modules built inside get parameters on the meta device that know their initial values: after `offload`,
    `tierzero.initialize(model)` makes them, one parameter at a time, bit for bit those that the plain model built on
    the CPU under the same seed would have. torch's generator ends where that would leave it. Buffers have their values
    at once.

    It takes the time of initialising the model once, here, and once more in `initialize`. Casts of a whole model inside
    are followed. Raises TierzeroError for a parameter that is given values from a tensor on the meta device.
    """
    recorder = _Recorder()
    with replacing_parameters(recorder.registered), recorder, torch.no_grad():
        yield
