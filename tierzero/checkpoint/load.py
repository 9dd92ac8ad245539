"""load: what `save` has written, into a model that is offloaded anywhere, one tensor at a time."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tierzero.api import check_outside, open_engine
from tierzero.checkpoint.callers import CallersStates
from tierzero.checkpoint.contents import EXTRA, made_by, optimizers_of, others_of
from tierzero.checkpoint.frozen_unit import MOMENTS
from tierzero.checkpoint.given import path_of
from tierzero.checkpoint.index import INDEX, StoredTensor, read_head
from tierzero.checkpoint.place import check_not_above
from tierzero.checkpoint.randomness import random_state, set_random_state
from tierzero.checkpoint.reader import Reader
from tierzero.checkpoint.refill import MASTER
from tierzero.checkpoint.take import Units
from tierzero.checkpoint.weights import load_weights
from tierzero.engine import Engine
from tierzero.errors import ConfigError, StoreCorruptError, TierzeroError
from tierzero.monitoring.clock import SAVE
from tierzero.optim.adamw import AdamW
from tierzero.optim.base import TieredOptimizer, home_of

log = logging.getLogger("tierzero")


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    states: Mapping[str, Any] | None = None,
    random: bool = True,
    verify: bool = True,
    strict: bool = True,
    in_place: bool = False,
) -> dict[str, Any]:
    """Put what `save` has written into the directory `path` back into an offloaded `model`, under whatever placement
    and budgets it has now; some MiB are in memory at a time. Returns the `meta` that was saved.

    With `optimizer` (built over the same parameters in the same groups) the run goes on from there bit for bit:
    states, hyper-parameters, accumulated gradients and, with `random`, the random generators come back too. Without it
    only the weights and buffers do, cast to the model's dtypes; optimizer states that are there stay. states: objects
    by the names that they were saved under; those that can (modules) are filled tensor by tensor, others get
    load_state_dict().

    Everything is checked before anything is changed: names, shapes and dtypes against the model, and all bytes that are
    loaded against their checksums: those that go to the drive on their way into new versions of what is there, and
    those that go to host memory on their way where what is there can be brought back (parameters while there are no
    gradients, states before their first step); the rest with `verify` in a pass of its own.
    A path that holds no such checkpoint goes to `load_weights`, with `strict` and `in_place`: safetensors, or what
    torch.distributed.checkpoint has written. Then {"missing": [...], "unexpected": [...]} is returned.

    Raises TierzeroError naming the first parameter, group or state that differs, StoreCorruptError naming the file and
    tensor that is damaged, FileNotFoundError if nothing is there. After an OSError in the middle the model holds part
    of both: load again.
    """
    engine = open_engine(model)
    check_outside(engine, engine.model() or model, "load")
    directory = path_of(path, "a checkpoint or weights")
    if not directory.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no checkpoint and no weights to load", str(path))
    if read_head(directory) is None:
        check_not_above(directory)
        if optimizer is not None or states:
            raise TierzeroError(
                f"{directory} is no checkpoint that tierzero.save has written, so it has no optimizer states to go on "
                "from: load the weights alone, tierzero.load(model, path)"
            )
        with engine.metrics.inside(SAVE, "save", f"load {path}"):
            return load_weights(model, path, strict=strict, in_place=in_place)._asdict()
    if in_place or not strict:
        raise TierzeroError(
            f"{directory} is a checkpoint that tierzero.save has written: it is loaded whole and copied, so leave "
            "strict= and in_place= out"
        )
    with engine.metrics.inside(SAVE, "save", f"load {path}"), Reader(directory) as reader, torch.no_grad():
        return Loading(engine, model, reader, optimizers_of(engine, optimizer), dict(states or {})).run(random, verify)


class Loading:
    """One load."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        reader: Reader,
        optimizers: list[TieredOptimizer],
        states: dict[str, Any],
    ) -> None:
        self.engine = engine
        self.model = model
        self.reader = reader
        self.index = reader.index
        self.optimizers = optimizers
        self.units = Units(engine, reader, optimizers)
        self.states = CallersStates(reader, states, self._differs)
        self.where = reader.path.parent

    def run(self, random: bool, verify: bool) -> dict[str, Any]:
        """See load."""
        self.engine.pager.check_idle(self.engine.units, "load outside the model and `unsharded`")
        self._check_model()
        groups = self._groups()
        self._check_states()
        random = random and bool(self.optimizers) and "random" in self.index.extra
        if random:
            self._check_random()
        try:
            self._stage(verify)
            self._take(groups)
        finally:
            self.units.discard()
        gradients = self._gradients() if self.optimizers else 0
        self.states.restore()
        if random:
            set_random_state(self.index.extra["random"])
        if self.optimizers:
            self.engine.lineage = str(self.index.head.get("run", self.engine.lineage))
            self.states.tell_unasked(self.where)
        log.info(
            "loaded %s: %d tensors of the model%s%s%s",
            self.where,
            sum(key.startswith("model.") for key in self.index.tensors),
            f", {len(self.optimizers)} optimizer(s)" if self.optimizers else ", no optimizer",
            f", {gradients} accumulated gradients" if gradients else "",
            f", states {', '.join(states)}" if (states := self.states.states) else "",
        )
        return self.index.meta

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_model(self) -> None:
        wanted: dict[str, torch.Tensor] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if name.split(".")[-1] != EXTRA and isinstance(value, torch.Tensor):
                wanted[f"model.{name}"] = value
        saved = [key for key in (*self.index.tensors, *self.index.aliases) if key.startswith("model.")]
        for key, value in wanted.items():
            stored = self.index.stored(key)
            if stored is None:
                raise self._differs(f"the model has {key.removeprefix('model.')}, which is not in it")
            self._check(key.removeprefix("model."), stored, value)
        for key in saved:
            if key not in wanted:
                raise self._differs(f"it has {key.removeprefix('model.')}, which is not in the model")

    def _check(self, name: str, stored: StoredTensor, value: torch.Tensor) -> None:
        if stored.shape != tuple(value.shape):
            raise self._differs(f"{name} has the shape {stored.shape} there and {tuple(value.shape)} in the model")
        if self.optimizers and stored.dtype != value.dtype:
            raise self._differs(
                f"{name} is {stored.dtype} there and {value.dtype} in the model (weights alone are cast, without "
                "optimizer=)"
            )

    def _differs(self, what: str) -> TierzeroError:
        return TierzeroError(
            f"the checkpoint {self.where} is not of this model: {what}. Nothing was changed; build the model and the "
            "optimizer as they were when it was saved"
        )

    def _groups(self) -> list[dict[str, Any]]:
        """The saved parameter groups, as the optimizers' state dicts have them."""
        if not self.optimizers:
            return []
        saved: dict[int, dict[str, Any]] = {}
        for key, path in self.index.paths.items():
            if path[:2] == ["optimizer", "param_groups"]:
                is_object = key in self.index.objects
                value = self.reader.object(key) if is_object else self.reader.tensor(key)
                saved.setdefault(int(path[2]), {})[str(path[3])] = value
        mine = [(one, group) for one in self.optimizers for group in one.param_groups]
        if len(saved) != len(mine):
            raise self._differs(f"it has {len(saved)} parameter groups and the optimizer has {len(mine)}")
        found = []
        for number, (one, group) in enumerate(mine):
            theirs_by = self.index.extra["made_by"][number]
            if theirs_by != made_by(one):
                raise self._differs(f"its parameter group {number} was stepped by {theirs_by}, not by {made_by(one)}")
            names = [unit.names[index] for unit, index in map(home_of, group["params"])]
            theirs = saved.get(number, {}).pop("params", None)
            if not isinstance(theirs, list):
                raise self._differs(f"its parameter group {number} names no parameters")
            for name, other in zip(names, theirs, strict=False):
                if name != other and self.index.aliases.get(f"model.{name}") != f"model.{other}":
                    raise self._differs(f"parameter group {number} has {other} where the optimizer has {name}")
            if len(names) != len(theirs):
                raise self._differs(
                    f"parameter group {number} has {len(theirs)} parameters and the optimizer's {len(names)}"
                )
            first = sum(len(before["params"]) for before in one.param_groups[: one.param_groups.index(group)])
            found.append({**saved[number], "params": list(range(first, first + len(names)))})
        return found

    def _check_states(self) -> None:
        adam = all(isinstance(one, AdamW) for one in self.optimizers)
        for name, parts in self.units.of_optimizer.items() if self.optimizers else ():
            param = self.index.tensors.get(f"model.{name}")
            for part in (MASTER, *MOMENTS):
                stored = self.index.tensors.get(parts.get(part, ""))
                if stored is not None and (param is None or stored.shape != param.shape):
                    raise self._differs(f"{part} of {name} has the shape {stored.shape}")
            step = self.index.tensors.get(parts.get("step", ""))
            if adam and step is not None and step.shape:
                raise self._differs(f"the step count of {name} has the shape {step.shape}")
        for key, stored in self.index.tensors.items() if self.optimizers else ():
            kind, _, name = key.partition(".")
            param = self.index.tensors.get(f"model.{name}")
            fits = param is not None and stored.shape == param.shape and name in self.index.extra["scales"]
            if kind == "gradients" and not fits:
                raise self._differs(f"it has a gradient of {name} that is not one")
        self.states.check()

    def _check_random(self) -> None:
        """StoreCorruptError for what is no state of random generators; those of this process stay."""
        before = random_state()
        try:
            set_random_state({key: one for key, one in self.index.extra["random"].items() if key != "cuda"})
        except Exception as error:  # of values that mean nothing: many kinds
            raise StoreCorruptError(
                f"{self.where / INDEX} holds no state of random generators ({type(error).__name__}: {error}): copy it "
                "again, or load it with random=False"
            ) from error
        finally:
            set_random_state(before)

    def _stage(self, verify: bool) -> None:
        """Compare what is loaded with its checksums before anything is changed for good: on the way into new versions
        of records in the store, and into host memory whose bytes can be brought back; else with `verify` in a pass of
        its own.
        """
        staged = self.units.keys(on_drive=True)
        passing = staged | self.units.keys(on_drive=False)
        if verify:
            wanted = [*self.index.objects, *self.index.tensors]
            wanted = [key for key in wanted if self.optimizers or self._is_loaded(key)]
            self._verify(set(wanted) - passing, passing)
        self.units.fill()
        if not self.units.stage() and verify:
            self._verify(staged)

    def _is_loaded(self, key: str) -> bool:
        """Whether it is loaded without an optimizer."""
        path = self.index.paths.get(key, [])
        return key.startswith("model.") or (path[:1] == ["states"] and path[1] in self.states.states)

    def _verify(self, keys: set[str], framed: set[str] | None = None) -> None:
        for _ in self.reader.verify(keys, framed or ()):
            pass

    # -- putting back --------------------------------------------------------------------------------------------------

    def _take(self, groups: list[dict[str, Any]]) -> None:
        """Everything of the model and the optimizers, unit by unit."""
        before = [(group, dict(group)) for one in self.optimizers for group in one.param_groups]
        for one in self.optimizers:
            count = len(one.param_groups)
            try:
                take_groups(one, groups[:count])
            except BaseException as error:
                for group, values in before:  # of optimizers before this one too
                    group.clear()
                    group.update(values)
                if not isinstance(error, (TypeError, ValueError, KeyError)):
                    raise
                what = self._differs(f"its hyper-parameters do not fit {made_by(one)} ({error})")
                raise ConfigError(str(what)) from error
            groups = groups[count:]
        for unit in self.engine.units:
            self.units.take(unit)
        for one in self.optimizers:
            one.restored()
        modules = dict(self.model.named_modules())
        for name, value in others_of(self.model).items():
            key = f"model.{name}"
            if key in self.index.objects:
                modules[name.rpartition(".")[0]].set_extra_state(self.reader.object(key))
            elif isinstance(value, torch.Tensor) and name.split(".")[-1] != EXTRA:
                value.copy_(self.reader.tensor(key))

    def _gradients(self) -> int:
        """The accumulated gradients; how many there are."""
        count = 0
        for unit in self.engine.units:
            self.engine.pager.settle(unit)
            for index in range(len(unit.rest)):
                name = self.units.canonical(unit, index)
                if f"gradients.{name}" not in self.index.tensors:
                    unit.rest[index].grad = None
                    unit.unscaled[index] = unit.coef[index] = 1.0
                    unit.norms = None
                    continue
                unit.publish_grad(index).copy_(self.reader.tensor(f"gradients.{name}"))
                unit.unscaled[index], unit.coef[index] = self.index.extra["scales"][name]
                unit.norms = None
                count += 1
        return count


def take_groups(optimizer: TieredOptimizer, groups: list[dict[str, Any]]) -> None:
    """The hyper-parameters of `groups`, checked and cast by the optimizer itself, and no states."""
    optimizer.load_groups(groups)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            group.setdefault(key, value)  # what a scheduler has added
