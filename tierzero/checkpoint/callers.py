"""The caller's own states (schedulers, scalers, modules, plain values): checked first, then put back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierzero.checkpoint.reader import Reader
from tierzero.errors import TierzeroError

log = logging.getLogger("tierzero")


class CallersStates:
    """`states`: by name, what load() was given. `differs` makes the error for what is not in the checkpoint so.

    Modules and mappings of tensors are filled tensor by tensor; what else has load_state_dict() gets its state dict,
    and a dict or a list gets the contents that were saved.
    """

    def __init__(self, reader: Reader, states: dict[str, Any], differs: Callable[[str], TierzeroError]) -> None:
        self.reader = reader
        self.states = states
        self._differs = differs
        self._loaded: dict[str, Any] = {}  # what is taken whole

    def check(self) -> None:
        """The error for the first state that cannot be put back. Nothing is changed."""
        for name, one in self.states.items():
            self._check(name, one)

    def restore(self) -> None:
        """Put all of them back."""
        for name, one in self.states.items():
            self._restore(name, one)

    def tell_unasked(self, where: Path) -> None:
        """A line about saved states that nobody has asked for."""
        saved = {str(path[1]) for path in self.reader.index.paths.values() if path[0] == "states"}
        unasked = sorted(saved - self.states.keys())
        if unasked:
            log.warning(
                "the checkpoint %s also has the states %s, which load() was not given: what they belong to begins anew",
                where,
                ", ".join(unasked),
            )

    def _check(self, name: str, one: Any) -> None:
        keys = self._of_state(name)
        if not keys and f"states.{name}" not in self.reader.index.objects:
            there = sorted({str(path[1]) for path in self.reader.index.paths.values() if path[0] == "states"})
            raise self._differs(f"it has no state {name!r}, only {', '.join(there) or 'none'}")
        if keys and isinstance(one, Mapping | nn.Module):  # filled tensor by tensor
            targets = one if isinstance(one, Mapping) else one.state_dict()
            for inner in keys.keys() | targets.keys():
                target = targets.get(inner)
                stored = self.reader.index.tensors.get(keys.get(inner, ""))
                if not isinstance(target, torch.Tensor) or stored is None or tuple(target.shape) != stored.shape:
                    raise self._differs(f"the state {name!r} has {inner} in one of both only, or in another shape")
        elif hasattr(one, "load_state_dict"):
            self._loaded[name] = self._value_of_state(name)
        elif isinstance(one, dict | list):
            self._loaded[name] = value = self._value_of_state(name)
            if type(value) is not type(one):
                raise self._differs(f"the state {name!r} is a {type(value).__name__} there, not a {type(one).__name__}")
        else:
            raise TypeError(
                f"the state {name!r} cannot be put into a {type(one).__name__}, which has no load_state_dict(): give a "
                "dict or a list, which is filled, or leave it out. Nothing was changed"
            )

    def _of_state(self, name: str) -> dict[str, str]:
        """The tensors of a state: their keys by their names in it."""
        return {
            str(path[2]): key
            for key, path in self.reader.index.paths.items()
            if path[:2] == ["states", name] and path[2:]
        }

    def _value_of_state(self, name: str) -> Any:
        keys = self._of_state(name)
        if keys:
            return {inner: self.reader.tensor(key) for inner, key in keys.items()}
        return self.reader.object(f"states.{name}")

    def _restore(self, name: str, one: Any) -> None:
        if name not in self._loaded:
            there = one if isinstance(one, Mapping) else one.state_dict()
            for inner, key in self._of_state(name).items():
                there[inner].copy_(self.reader.tensor(key))
        elif hasattr(one, "load_state_dict"):
            try:
                one.load_state_dict(self._loaded[name])
            except Exception as error:
                where = self.reader.path.parent
                raise TierzeroError(
                    f"the {type(one).__name__} does not take the state {name!r} of {where} ({type(error).__name__}: "
                    f"{error}), after the model was loaded: load again with the object that it is of"
                ) from error
        elif isinstance(one, dict):
            one.clear()
            one.update(self._loaded[name])
        else:
            one[:] = self._loaded[name]
