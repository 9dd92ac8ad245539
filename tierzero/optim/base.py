"""What all optimizers over an offloaded model share: their parameters' places, skipped steps, loss scaling."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from tierzero.errors import NonFiniteGradientError, TierzeroError
from tierzero.optim.clip import engine_time, place_of
from tierzero.optim.norms import is_finite, unit_norms
from tierzero.optim.overlap import Overlap
from tierzero.units.unit import Unit

log = logging.getLogger("tierzero")


class TieredOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer over parameters of an offloaded model.

    Note [loss scaling]
    torch.amp.GradScaler hands `grad_scale` and `found_inf` to optimizers that set `_step_supports_amp_scaling`, as
    torch's fused ones do, and calls `step()` even if something was infinite. Gradients of float32 parameters are then
    unscaled in place. Those of 16-bit parameters would lose what the scale had saved, so the inverse scale waits in
    `unit.unscaled` and is applied to the gradient in float32 as the parameter is stepped; a power of two can be applied
    in any order with clipping, and others are refused.
    """

    _step_supports_amp_scaling = True
    _divides_scale = True  # as torch's fused kernels do; others multiply by the inverse
    max_skipped_steps: int
    overlap: Overlap
    members: Any  # this optimizer's parameters, by unit
    _skipped_in_row = 0

    def _place(self, param: torch.Tensor, index: int) -> tuple[Unit, int]:
        place = place_of(param)
        if place is None:
            raise TierzeroError(
                f"parameter {index} of the group, {tuple(param.shape)} {param.dtype}, is not one of an offloaded "
                "model: call tierzero.offload(model) first and pass "
                "model.parameters() afterwards; parameters elsewhere need an optimizer of their own"
            )
        unit, k = place
        if param.requires_grad and unit.layout.places[k].elem < 0:
            raise TierzeroError(
                f"parameter {unit.names[k]} was frozen when offload() laid the model out and has no room for "
                "optimizer state: call requires_grad_(True) before offload()"
            )
        return unit, k

    def counted(self, name: str) -> AbstractContextManager[object]:
        """What happens inside is the engines' time; `name` shows it to whoever watches."""
        return engine_time((unit.owner for unit in self.members), name)

    def end_steps(self, owners: Iterable[Any], *, skipped: bool) -> None:
        """A step of these engines is over."""
        for owner in owners:
            owner.metrics.end_step(skipped)

    def work(self) -> dict[Unit, dict[int, int]]:
        """The parameters that have gradients, by unit and index there: the number of their group."""
        work: dict[Unit, dict[int, int]] = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    unit, index = home_of(param)
                    if unit.grad(index) is not None and unit.layout.places[index].elem >= 0:
                        work.setdefault(unit, {})[index] = number
        return work

    def _owners(self, work: Iterable[Unit]) -> list[Any]:
        """The engines of the units in `work`, or of all parameters if there are none."""
        return list(dict.fromkeys(unit.owner for unit in work)) or list(
            dict.fromkeys(home_of(param)[0].owner for group in self.param_groups for param in group["params"])
        )

    def _overflowed(self) -> bool:
        """Whether a GradScaler has found gradients that are not finite; it lowers its scale then."""
        found = getattr(self, "found_inf", None)
        return found is not None and float(found) > 0

    def _unscale(self, work: dict[Unit, dict[int, int]]) -> None:
        """Take a GradScaler's scale off the gradients. See Note [loss scaling]."""
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return
        inverse = None if self._divides_scale else float(scale.double().reciprocal().float())
        unscale(work, float(scale), inverse)

    def state_dict(self) -> dict[str, Any]:
        """As torch's: hyper-parameters, and states by number of the parameter. Large tensors are at rest; saving reads
        them one at a time.
        """
        found = super().state_dict()
        return {**found, "state": {key: _apart(state) for key, state in found["state"].items()}}

    def load(self, state_dict: dict[str, Any]) -> None:
        """What load_state_dict does between its hooks."""
        super().load_state_dict(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take hyper-parameters and states from a state dict of this class or of torch's own (same parameters in the
        same order).
        """
        self._load(state_dict, self.load)

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take hyper-parameters as a state dict's `param_groups` has them; the caller puts states and steps back."""
        self._load({"state": {}, "param_groups": groups}, self.take)

    def take(self, state_dict: dict[str, Any]) -> None:
        """The hyper-parameters of a state dict; what becomes of the states, the caller sees to."""
        self.load(state_dict)

    def _load(self, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def restored(self) -> None:
        """A snapshot has put the units' states back."""
        self.overlap.forget()
        self._skipped_in_row = 0

    def _note_skip(self, bad: str | None) -> None:
        if bad is None:
            self._skipped_in_row = 0
            return
        self._skipped_in_row += 1
        log.warning(
            "step skipped, nothing changed: the gradient of %s is not finite (%d in a row)", bad, self._skipped_in_row
        )
        if self._skipped_in_row >= self.max_skipped_steps:
            raise NonFiniteGradientError(
                f"{self._skipped_in_row} steps in a row had a gradient that is infinite or NaN, the last one first in "
                f"{bad}: lower the learning rate, check the data, "
                "or raise max_skipped_steps"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TierzeroError(
            f"{type(self).__name__} cannot be copied or pickled, its state lies in the tiers of one model: save "
            "optimizer.state_dict() and load_state_dict() it into an optimizer of the other model"
        )


def _apart(state: dict[str, Any]) -> dict[str, Any]:
    """Without the tensors that go on counting here; torch's optimizers take over what they are given."""
    return {key: value.clone() if type(value) is torch.Tensor else value for key, value in state.items()}


def unscale(work: dict[Unit, dict[int, int]], scale: float, inverse: float | None) -> None:
    """Divide gradients by a loss scale, or multiply them by its inverse, now or as they are stepped. See Note [loss
    scaling].
    """
    for unit, index in ((unit, index) for unit, indices in work.items() for index in indices):
        view = unit.grad_views[index]
        if view is None or scale == 1.0:
            continue
        unit.norms = None
        if view.dtype == torch.float32:
            unit.fold_clip(index)
            unit.own_grads()
            view.div_(scale) if inverse is None else view.mul_(inverse)
        elif math.frexp(scale)[0] == 0.5:
            unit.unscaled[index] /= scale
        else:
            raise TierzeroError(
                f"the loss scale {scale} of the GradScaler is not a power of two, so the {view.dtype} gradient of "
                f"{unit.names[index]} cannot be unscaled exactly: use powers of two for init_scale, growth_factor and "
                "backoff_factor, as torch does by default"
            )


def home_of(param: torch.Tensor) -> tuple[Unit, int]:
    """Where a parameter lies that add_param_group has let in."""
    place = place_of(param)
    assert place is not None
    return place


def first_bad(work: dict[Unit, dict[int, int]]) -> str | None:
    """The name of the first parameter in `work` whose gradient, clipped, has an element that is not finite. What its
    unit holds besides is another optimizer's business, or nobody's.
    """
    clipped = None
    for unit, indices in work.items():
        norms = unit_norms(unit)
        for index in sorted(indices):
            if not norms[index] < float("inf") and not is_finite(unit, index):
                return unit.names[index]
            if clipped is None and math.isnan(unit.coef[index]) and unit.layout.places[index].spec.numel:
                clipped = f"{unit.names[index]}, clipped by a norm that is NaN,"
    return clipped
