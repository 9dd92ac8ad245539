"""wrap_optimizer: any torch optimizer that keeps its state per parameter, over the parameters of an offloaded model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from tierzero.errors import TierzeroError
from tierzero.optim.base import TieredOptimizer, first_bad, home_of
from tierzero.optim.generic_load import load_unit
from tierzero.optim.generic_recipe import Named, Recipe, Values, expected_bytes, values_of
from tierzero.optim.generic_trial import check_behaviour, check_class, tiny
from tierzero.optim.generic_update import GenericUpdate, work_bytes
from tierzero.optim.norms import begin_norms, without_grad
from tierzero.optim.overlap import Overlap
from tierzero.optim.resting import MasterSource, Resting, SlotSource
from tierzero.paging.updates import Update
from tierzero.units.generic import Kept, Slot
from tierzero.units.unit import Unit


def wrap_optimizer(
    cls: type[torch.optim.Optimizer], params: Iterable[Any], *, max_skipped_steps: int = 10, **hyper: Any
) -> WrappedOptimizer:
    """`cls(params, **hyper)` for parameters of an offloaded model: a torch.optim.Optimizer whose steps are those of
    `cls` on float32 masters, bit by bit, one unit at a time.

        opt = tierzero.wrap_optimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)

    Masters (of 16-bit parameters) and states lie in the tiers, where AdamW's would. Schedulers, groups, state dicts,
    clipping and GradScaler work as with tierzero.AdamW, and so do non-finite gradients and `max_skipped_steps`.

    Raises TypeError for what is no optimizer class, TierzeroError for one that looks across parameters or keeps more
    than tensors, numbers and strings per parameter (a trial on tiny tensors finds out), and BudgetError if the host
    budget cannot hold the working memory of the largest unit's step.
    """
    check_class(cls)
    return WrappedOptimizer(cls, params, hyper, max_skipped_steps)


def check_alone(owners: set[Any]) -> None:
    """TierzeroError for models whose masters are split: nobody else can write those."""
    if any(owner.homes.format is not None and owner.homes.format.master == "split" for owner in owners):
        raise TierzeroError(
            'the masters of this model are split (tierzero.AdamW(master="split")), which only tierzero.AdamW can step: '
            'use master="float32" beside wrapped optimizers'
        )


class WrappedOptimizer(TieredOptimizer):
    """What wrap_optimizer returns. `state` is read from the tiers whenever it is asked for."""

    def __init__(
        self, cls: type[torch.optim.Optimizer], params: Iterable[Any], hyper: dict[str, Any], max_skipped_steps: int
    ) -> None:
        items = [params] if isinstance(params, torch.Tensor) else list(params)
        if not items:
            raise ValueError("optimizer got an empty parameter list")
        flat = not isinstance(items[0], dict)
        groups = [{"params": items}] if flat else [dict(group) for group in items]
        self.max_skipped_steps = max_skipped_steps
        self.overlap = Overlap("deferred")  # knows which backward is the last one
        self.members: dict[Unit, dict[int, str | None]] = {}  # this optimizer's parameters by unit: their given names
        self._shadows: list[list[Named]] = []
        self._recipe = Recipe(cls, hyper, (), flat)
        self._divides_scale = bool(hyper.get("fused"))
        self._inner = self._try(groups)
        super().__init__([self._filled(n, group) for n, group in enumerate(groups)], self._inner.defaults)
        self._grown = True
        self._make_room()
        self._claim(self.param_groups)

    _grown = False  # past the constructor

    def _try(self, more: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The class over tiny parameters, with groups added that are as `more`; TierzeroError if it does not fit."""
        shadows, given = list(self._shadows), list(self._recipe.given)
        for group in more:
            one = group["params"]
            one = group["params"] = [one] if isinstance(one, torch.Tensor) else list(one)
            named = [item if isinstance(item, tuple) else (None, item) for item in one]
            for index, (_, param) in enumerate(named):
                self._place(param, index)
            shadows.append([(name, tiny(param)) for name, param in named])
            given.append({key: value for key, value in group.items() if key != "params"})
        recipe = replace(self._recipe, given=tuple(given), flat=self._recipe.flat and len(given) == 1)
        inner = recipe.build(shadows)
        if [len(group["params"]) for group in inner.param_groups] != [len(one) for one in shadows]:
            raise TierzeroError(
                f"{recipe.cls.__name__} cannot be wrapped: it makes parameter groups of its own from those it gets"
            )
        check_behaviour(recipe, shadows, [values_of(group) for group in inner.param_groups])
        self._shadows, self._recipe = shadows, recipe
        return inner

    def _filled(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        """A group with all that the class has made of it."""
        return {**group, **values_of(self._inner.param_groups[number]), "params": group["params"]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Raises as wrap_optimizer does."""
        before = self._shadows, self._recipe, self._inner
        if self._grown:
            param_group = dict(param_group)
            self._inner = self._try([param_group])
            param_group = self._filled(len(self.param_groups), param_group)
        try:
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            names = group.get("param_names", [None] * len(group["params"]))
            places = [self._place(param, index) for index, param in enumerate(group["params"])]
            self._check_kept(places)
            check_alone({unit.owner for unit, _ in places})
        except BaseException:
            if self._grown:
                self._shadows, self._recipe, self._inner = before
                del self.param_groups[len(self._shadows) :]
            raise
        for (unit, index), name in zip(places, names, strict=True):
            if unit.layout.places[index].elem >= 0:
                self.members.setdefault(unit, {})[index] = name
                unit.owner.optimizers.add(self)
        if self._grown:
            self._make_room()
            self._claim([group])

    def _claim(self, groups: list[dict[str, Any]]) -> None:
        """Take over the states that a snapshot has of this optimizer's parameters; those that another optimizer left
        are forgotten, because a new one starts anew.
        """
        for unit, index in (home_of(param) for group in groups for param in group["params"]):
            unit.owner.pager.settle(unit, keep_guess=True)
            kept = unit.generic.kept.get(index) if unit.generic is not None else None
            if kept is not None and not kept.resumed:
                kept.values.clear()
            elif kept is not None:
                kept.resumed = False

    def _check_kept(self, places: list[tuple[Unit, int]]) -> None:
        for unit, index in places:
            kept = unit.generic.kept.get(index) if unit.generic is not None else None
            if kept is not None and kept.resumed and kept.values and kept.made_by != self._recipe.name:
                raise TierzeroError(
                    f"the state of {unit.names[index]} was made by {kept.made_by} and this is {self._recipe.name}: "
                    "resume with the optimizer that wrote the snapshot"
                )

    def _make_room(self) -> None:
        """Set the working memory of the largest unit's step aside, as far as it is known before the first one."""
        now = [values_of(group) for group in self.param_groups]
        numbers: dict[Unit, dict[int, int]] = {}
        for number, group in enumerate(self.param_groups):
            for unit, index in map(home_of, group["params"]):
                if unit.layout.places[index].elem >= 0:
                    numbers.setdefault(unit, {})[index] = number
        kept: dict[Any, int] = {}
        for unit, mine in numbers.items():
            state = expected_bytes(self._recipe, unit.layout, mine, now)
            unit.owner.make_room(work_bytes(unit, state), f"a step by {self._recipe.cls.__name__} of unit {unit.name}")
            kept[unit.owner] = kept.get(unit.owner, 0) + (0 if unit.generic is not None else state)
        for owner, nbytes in kept.items():
            if owner.store is None:
                owner.homes.share.check(nbytes, f"the states and masters of {self._recipe.cls.__name__}")

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, f"wrap_optimizer({self._recipe.cls.__name__})", 1)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @without_grad
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue one update of every parameter that has a gradient. Returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.counted("optimizer step"):
            owners, bad = self._queue()
        self.end_steps(owners, skipped=bad is not None or self._overflowed())
        self.overlap.stepped(None, as_is=False)
        if not self._overflowed():  # else the GradScaler deals with it
            self._note_skip(bad)
        return loss

    def _queue(self) -> tuple[list[Any], str | None]:
        """(the engines stepped, the first parameter with a bad gradient)."""
        work = self.work()
        owners = self._owners(work)
        for owner in owners:
            mine = [unit for unit in work if unit.owner is owner]
            owner.pager.check_idle(mine, "call optimizer.step() after backward, outside the model and `unsharded`")
        for unit in work:
            unit.owner.pager.settle(unit)
        bad = first_bad(work)
        skipped = bad is not None or self._overflowed()
        if not skipped:
            self._unscale(work)
        now = [values_of(group) for group in self.param_groups]
        for owner in owners:
            jobs = [
                Update(unit, GenericUpdate(owner.homes, unit, self._recipe, now, numbers, self.members[unit]))
                for unit, numbers in work.items()
                if unit.owner is owner and not skipped
            ]
            owner.pager.step(jobs, [unit for unit in self.members if unit.owner is owner])
        return owners, bad

    def gradients_final(self, unit: Unit, *, certain: bool) -> None:
        """The engine says that a backward adds nothing more to the unit's gradients (`certain`), or probably not."""
        if certain and unit in self.members and unit.pending is None and unit.guess is None and self.overlap.last:
            begin_norms(unit)

    def backward_over(self) -> None:
        """The engine says that a backward has ended."""
        self.overlap.backward_over(None)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def made_by(self) -> str:
        """How its states name the optimizer class that made them."""
        return self._recipe.name

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """What the class keeps for each parameter that has been stepped, after the queued updates: numbers, scalars and
        tensors at rest; "master" is the float32 value of a 16-bit parameter. A new dict each time.
        """
        found: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for group in self.param_groups:
            for param in group["params"]:
                unit, index = home_of(param)
                unit.owner.pager.settle(unit, keep_guess=True)
                kept = unit.generic.kept.get(index) if unit.generic is not None else None
                if kept is not None and kept.values:
                    found[param] = _at_rest(unit, index, kept)
        return found

    @state.setter
    def state(self, value: Any) -> None:
        if value or self._grown:
            raise TierzeroError(
                "the state of a wrapped optimizer lies in the tiers and cannot be assigned: use load_state_dict()"
            )

    @torch.no_grad()
    def load(self, state_dict: dict[str, Any]) -> None:
        """Hyper-parameters and states, from a state dict of this class or of the wrapped one."""
        inner = self._recipe.build(self._shadows)
        inner.load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, loaded in zip(self.param_groups, inner.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        work: dict[Unit, dict[int, dict[str, Any]]] = {}
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                unit, index = home_of(param)
                if index in self.members.get(unit, {}):
                    work.setdefault(unit, {})[index] = dict(state_dict["state"].get(key, {}))
        numbers = {id(param): n for n, group in enumerate(self.param_groups) for param in group["params"]}
        now: list[Values] = [values_of(group) for group in self.param_groups]
        for unit, states in work.items():
            places = {index: numbers[id(unit.rest[index])] for index in states}
            load_unit(unit, self._recipe, now, places, self.members[unit], states)


def _at_rest(unit: Unit, index: int, kept: Kept) -> dict[str, Any]:
    state = {
        name: Resting(SlotSource(unit, index, name), value.shape, value.dtype) if isinstance(value, Slot) else value
        for name, value in kept.values.items()
    }
    if kept.master is not None or (unit.state is not None and unit.layout.places[index].region == "param"):
        state["master"] = Resting(MasterSource(unit, index), unit.rest[index].shape, torch.float32)
    return state
