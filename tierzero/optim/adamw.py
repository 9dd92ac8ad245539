"""AdamW: a torch.optim.Optimizer whose master weights and moments live in the tiers of an offloaded model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tierzero.errors import NonFiniteGradientError, TierzeroError
from tierzero.optim.clip import place_of
from tierzero.optim.norms import is_finite, unit_norms, without_grad
from tierzero.optim.streamed import Hyper
from tierzero.paged import Paged
from tierzero.records import StateRecord
from tierzero.unit import Unit
from tierzero.updates import Update

log = logging.getLogger("tierzero")


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay Adam (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101), bit-equal to
    torch.optim.AdamW(fused=True) on float32 masters.

    `step()` queues the updates and returns; each unit's next use waits for its own. Master (for 16-bit parameters),
    exp_avg and exp_avg_sq are float32 and stream through the tiers. A step with a gradient that is infinite or NaN is
    skipped whole and logged; after `max_skipped_steps` in a row NonFiniteGradientError is raised.

    `params`: parameters of an offloaded model, or groups of them. Frozen ones may be among them.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_skipped_steps: int = 10,
    ) -> None:
        self._skipped_in_row = 0
        self.max_skipped_steps = max_skipped_steps
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; state records are created for the units that hold them."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            places = [self._place(param, index) for index, param in enumerate(group["params"])]
        except BaseException:
            self.param_groups.pop()
            raise
        for unit in dict.fromkeys(unit for unit, _ in places):
            unit.owner.ensure_state()
        for param, (unit, index) in zip(group["params"], places, strict=True):
            if unit.layout.places[index].elem >= 0:
                self.state[param] = _state(unit, index)

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

    @without_grad
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue one update of every parameter that has a gradient. Returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work: dict[Unit, dict[int, dict[str, Any]]] = {}
        for group in self.param_groups:
            _check_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    unit, index = _home(param)
                    if unit.grad(index) is not None and unit.layout.places[index].elem >= 0:
                        work.setdefault(unit, {})[index] = group
        owners = list(dict.fromkeys(unit.owner for unit in work)) or self._owners()
        for owner in owners:
            mine = [unit for unit in work if unit.owner is owner]
            owner.pager.check_idle(mine, "call optimizer.step() after backward, outside the model and `unsharded`")
        for unit in work:
            unit.settle()
        bad = _first_bad(work)
        for owner in owners:
            jobs = [] if bad else [self._job(unit, groups) for unit, groups in work.items() if unit.owner is owner]
            owner.pager.step(jobs)
            owner.metrics.add("skipped_steps" if bad else "steps")
        self._note_skip(bad)
        return loss

    def _owners(self) -> list[Any]:
        """The engines of all parameters."""
        return list(dict.fromkeys(_home(param)[0].owner for group in self.param_groups for param in group["params"]))

    def _job(self, unit: Unit, groups: dict[int, dict[str, Any]]) -> Update:
        hypers: dict[int, Hyper] = {}
        for index, group in groups.items():
            beta1, beta2 = (float(beta) for beta in group["betas"])
            hypers[index] = Hyper(
                float(group["lr"]),
                beta1,
                beta2,
                float(group["eps"]),
                float(group["weight_decay"]),
                unit.steps[index] + 1,
                unit.coef[index],
            )
        streamed = unit.owner.streamed
        counts = [self.state[unit.rest[index]]["step"] for index in hypers]

        def begin() -> None:
            for index, count in zip(hypers, counts, strict=True):
                unit.steps[index] += 1
                count += 1

        return Update(unit, lambda: streamed.update(unit, hypers), begin)

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

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take hyper-parameters, steps and moments from a state dict of this class or of torch.optim.AdamW (same
        parameters in the same order).
        """
        saved, groups = state_dict["state"], state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                "the state dict has other parameter groups than this optimizer: build it over the same parameters in "
                "the same groups"
            )
        for group, other in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in other.items() if key in group and key != "params"})
            for param, key in zip(group["params"], other["params"], strict=True):
                values = saved.get(key)
                if values is None or param not in self.state:
                    continue
                for name in ("exp_avg", "exp_avg_sq", "master"):
                    if name in values and name in self.state[param]:
                        self.state[param][name].copy_(values[name])
                step = int(values["step"])
                self.state[param]["step"].fill_(step)
                unit, index = _home(param)
                unit.steps[index] = step


class StateSource:
    """One parameter's part of a state record, as Paged reads and writes it."""

    def __init__(self, unit: Unit, index: int, part: int, name: str) -> None:
        self.unit = unit
        self.index = index
        self.part = part
        self.name = f"{unit.names[index]} ({name})"

    def read(self) -> torch.Tensor:
        async def read() -> torch.Tensor:
            place = self.unit.layout.places[self.index]
            out = torch.empty(place.spec.numel, dtype=torch.float32)
            assert self.unit.state is not None
            await self.unit.state.read(self.part, place.elem, out)
            return out.view(place.spec.shape)

        value: torch.Tensor = self.unit.at_rest(read())
        return value

    def write(self, value: torch.Tensor) -> None:
        async def write() -> None:
            assert self.unit.state is not None
            await self.unit.state.write(
                self.part, self.unit.layout.places[self.index].elem, value.detach().cpu().float().reshape(-1)
            )

        self.unit.at_rest(write(), changes=self.part == StateRecord.MASTER)


def _state(unit: Unit, index: int) -> dict[str, Any]:
    shape = unit.layout.places[index].spec.shape
    parts = {"exp_avg": StateRecord.EXP_AVG, "exp_avg_sq": StateRecord.EXP_AVG_SQ}
    if unit.layout.places[index].region == "param":
        parts["master"] = StateRecord.MASTER
    state: dict[str, Any] = {"step": torch.tensor(float(unit.steps[index]))}
    for name, part in parts.items():
        state[name] = Paged(StateSource(unit, index, part, name), shape, torch.float32)
    return state


def _home(param: torch.Tensor) -> tuple[Unit, int]:
    """Where a parameter lies that add_param_group has let in."""
    place = place_of(param)
    assert place is not None
    return place


def _first_bad(work: Iterable[Unit]) -> str | None:
    """The name of the first parameter whose gradient has an element that is not finite."""
    for unit in work:
        for index, norm in enumerate(unit_norms(unit)):
            if not norm < float("inf") and not is_finite(unit, index):
                return unit.names[index]
    return None


def _check_group(group: dict[str, Any]) -> None:
    lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", decay)):
        if not value >= 0:
            raise ValueError(f"{name} must be zero or more, got {value}")
    for beta in group["betas"]:
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas must lie in [0, 1), got {tuple(group['betas'])}")
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise TierzeroError(f"{name}=True is not supported by tierzero.AdamW; leave it out")
