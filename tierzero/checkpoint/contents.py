"""What a checkpoint is made of: every tensor under torch's canonical key with a way to read it, and the small values.

Note [keys]
As torch.distributed.checkpoint.state_dict gives them: model.<name>; optimizer.state.<name>.<part>, with .master for the
float32 values of 16-bit parameters; optimizer.param_groups.<number>.<option>. Besides: gradients.<name>; states.<name>,
or states.<name>.<key> for a mapping of nothing but tensors (a module's); meta.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from tierzero.checkpoint.frozen import Frozen
from tierzero.checkpoint.frozen_unit import MOMENTS, FrozenUnit, Source
from tierzero.engine import Engine
from tierzero.errors import TierzeroError
from tierzero.optim.adamw import AdamW
from tierzero.optim.base import TieredOptimizer, home_of
from tierzero.optim.generic import WrappedOptimizer
from tierzero.units.paged import Paged

_SLOWEST = 1_000_000  # bytes per second, of the native engine
EXTRA = "_extra_state"  # how torch ends the names of what get_extra_state() gives
Path = tuple[str | int, ...]


class Readable(Protocol):
    """A tensor that can be read piece by piece, as Source."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    async def read(self, first: int, out: torch.Tensor) -> None: ...


class Plain:
    """A tensor in memory."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value.detach()
        self.shape = tuple(value.shape)
        self.dtype = value.dtype

    async def read(self, first: int, out: torch.Tensor) -> None:
        """As Source.read."""
        out.copy_(self.value.reshape(-1)[first : first + out.numel()])


@dataclass
class Contents:
    """`first`: tensors that the caller may change as soon as save() returns. `units`: the engine's, which stay as they
    are until they are read. `objects`: what torch.save made of small values.
    """

    first: dict[str, Readable] = field(default_factory=dict)
    units: dict[FrozenUnit, dict[str, Readable]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def add_object(self, path: Path, value: Any) -> None:
        """A value that torch.load(weights_only=True) gives back; TypeError otherwise."""
        key = self._key(path)
        out = io.BytesIO()
        try:
            torch.save(value, out)
            torch.load(io.BytesIO(out.getvalue()), weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{key} cannot be saved so that it can be loaded safely ({type(error).__name__}: {str(error)[:200]}): "
                "states must be made of tensors, numbers, strings, lists, tuples and dicts"
            ) from error
        self.objects[key] = out.getvalue()

    def add_tensor(self, path: Path, value: Readable, of: FrozenUnit | None = None) -> None:
        """A tensor of the unit `of`, or of somebody else."""
        into = self.first if of is None else self.units.setdefault(of, {})
        into[self._key(path)] = value

    def _key(self, path: Path) -> str:
        key = ".".join(map(str, path))
        if key in self.paths:
            raise TierzeroError(f"two things to be saved are both called {key}: rename one of them")
        self.paths[key] = path
        return key


def optimizers_of(engine: Engine, optimizer: Any) -> list[TieredOptimizer]:
    """One optimizer or several as a list. TypeError for what is no optimizer of an offloaded model, TierzeroError for
    one that steps parameters of another model than `engine`'s, and for one that is given twice.
    """
    several: list[Any] = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*(optimizer or [])]
    for one in several:
        if not isinstance(one, TieredOptimizer):
            raise TypeError(
                f"{type(one).__name__} is no optimizer of an offloaded model: give those of tierzero.AdamW or "
                "tierzero.wrap_optimizer as optimizer=, and others in states="
            )
    if len({id(one) for one in several}) != len(several):
        raise TierzeroError("an optimizer is given twice: list each of them once")
    for unit, index in (home_of(p) for one in several for group in one.param_groups for p in group["params"]):
        if unit.owner is not engine:
            raise TierzeroError(
                f"the optimizer steps {unit.names[index]} of another offloaded model: give the optimizers of this one"
            )
    return several


def made_by(optimizer: TieredOptimizer) -> str:
    """The name of the class whose states an optimizer keeps."""
    return optimizer.made_by if isinstance(optimizer, WrappedOptimizer) else type(optimizer).__name__


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def others_of(model: nn.Module) -> dict[str, Any]:
    """What the state dict holds besides parameters: persistent buffers and extra states."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if name not in params and not isinstance(value, Paged)}


def checked_values(states: Any, meta: Any, keep: Any, limit: Any) -> dict[str, Any]:
    """The meta values as they come back, whatever the caller does with them later. TypeError or ValueError for what
    cannot be saved.
    """
    if keep is not None and not isinstance(keep, int):
        raise TypeError(f"keep is a number of checkpoints or None, got {keep!r}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be 1 or more, got {keep}: it counts the checkpoint that is being saved")
    if type(limit) is not int or (limit != 0 and limit < _SLOWEST):
        raise ValueError(f"limit is bytes per second, {_SLOWEST} or more, or 0 for none; got {limit!r}")
    if not isinstance(states, Mapping | None) or not all(isinstance(name, str) for name in states or ()):
        raise TypeError('states are objects by name: states={"scheduler": scheduler}')
    if not isinstance(meta, Mapping | None):
        raise TypeError(f"the meta values of a checkpoint are a dict, not {type(meta).__name__}")
    try:
        given: dict[str, Any] = json.loads(json.dumps(dict(meta or {})))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"the meta values of a checkpoint must be JSON (numbers, strings, lists, dicts): {error}. Give other "
            "things as states="
        ) from error
    return given


def gather(
    frozen: Frozen,
    model: nn.Module,
    optimizer: Any,
    states: Mapping[str, Any],
    meta: Mapping[str, Any],
    *,
    gradients: bool,
) -> Contents:
    """See Contents."""
    found, optimizers = Contents(), optimizers_of(frozen.engine, optimizer)
    _groups(found, optimizers)
    for name, value in others_of(model).items():
        if name.split(".")[-1] == EXTRA or not isinstance(value, torch.Tensor):
            found.add_object(("model", name), value)
        else:
            found.add_tensor(("model", name), Plain(value))
    for name, one in states.items():
        _state(found, name, one)
    found.add_object(("meta",), dict(meta))
    stepped = {home_of(param): one for one in optimizers for group in one.param_groups for param in group["params"]}
    scales: dict[str, tuple[float, float]] = {}
    for unit in frozen.units:
        found.units[unit] = {}
        for source in unit.sources:
            chosen = stepped.get((unit.unit, source.index))
            if source.part == "param":
                found.add_tensor(("model", source.name), source, unit)
                _values(found, unit, source, chosen)
            elif source.part == "grad" and gradients:
                found.add_tensor(("gradients", source.name), source, unit)
                scales[source.name] = unit.scales[source.index]
            elif source.part in MOMENTS and source.index in unit.adam and not isinstance(chosen, AdamW):
                continue  # they belong to no optimizer that is saved
            elif source.part != "grad" and chosen is not None:
                found.add_tensor(("optimizer", "state", source.name, source.part), source, unit)
    names = names_of(model)
    for unit in frozen.units:
        for index, name in enumerate(unit.unit.names):
            for other in names.get(id(unit.unit.rest[index]), []):
                if other != name:
                    found.aliases[f"model.{other}"] = f"model.{name}"
                    found.paths[f"model.{other}"] = ("model", other)
    found.extra["scales"] = scales
    return found


def _groups(found: Contents, optimizers: Sequence[TieredOptimizer]) -> None:
    number = 0
    found.extra["made_by"] = [made_by(one) for one in optimizers for _ in one.param_groups]
    for one in optimizers:
        for group in one.param_groups:
            for option, value in group.items():
                path: Path = ("optimizer", "param_groups", number, option)
                if option == "params":
                    places = [home_of(param) for param in value]
                    found.add_object(path, [unit.names[index] for unit, index in places])
                elif isinstance(value, torch.Tensor):
                    found.add_tensor(path, Plain(value))
                else:
                    found.add_object(path, value)
            number += 1


def _values(found: Contents, unit: FrozenUnit, source: Source, optimizer: TieredOptimizer | None) -> None:
    """What an optimizer keeps of one parameter besides large tensors."""
    place = unit.unit.layout.places[source.index]
    if optimizer is None or place.elem < 0:
        return
    values = {key: value for key, value in unit.values.get(source.index, {}).items() if key != "made_by"}
    if isinstance(optimizer, AdamW):
        values = {"step": torch.tensor(float(unit.steps[source.index]))}
    for key, value in values.items():
        path: Path = ("optimizer", "state", source.name, key)
        if isinstance(value, torch.Tensor):
            found.add_tensor(path, Plain(value.clone()), unit)
        else:
            found.add_object(path, value)


def _state(found: Contents, name: str, one: Any) -> None:
    value = one.state_dict() if hasattr(one, "state_dict") else one
    if (
        isinstance(value, Mapping)
        and value
        and all(isinstance(key, str) and isinstance(inner, torch.Tensor) for key, inner in value.items())
    ):
        for key, tensor in value.items():
            found.add_tensor(("states", name, key), Plain(tensor))
    else:
        found.add_object(("states", name), value)
