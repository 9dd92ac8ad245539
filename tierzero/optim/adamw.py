"""AdamW: a torch.optim.Optimizer whose master weights and moments live in the tiers of an offloaded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tierzero.errors import TierzeroError
from tierzero.optim.base import TieredOptimizer, first_bad, home_of
from tierzero.optim.norms import begin_norms, without_grad
from tierzero.optim.overlap import Mode, Overlap
from tierzero.optim.resting import Resting
from tierzero.optim.streamed import Hyper, UnitUpdate
from tierzero.records import StateRecord
from tierzero.unit import Unit
from tierzero.updates import Guess, Update

_WRAP = "use tierzero.wrap_optimizer(torch.optim.AdamW, params, ...), which is slower"
_REFUSED = {
    "amsgrad": _WRAP,
    "maximize": _WRAP,
    "capturable": "a step that reads and writes tiers cannot be part of a CUDA graph",
    "differentiable": "nothing can be differentiated through a step whose tensors are paged out",
}


class AdamW(TieredOptimizer):
    """Decoupled weight decay Adam (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101), bit-equal to
    torch.optim.AdamW(fused=True) on float32 masters.

    `step()` queues the updates and returns; each unit's next use waits for its own. Master (for 16-bit parameters),
    exp_avg and exp_avg_sq are float32 and stream through the tiers. A step with a gradient that is infinite or NaN is
    skipped whole and logged; after `max_skipped_steps` in a row NonFiniteGradientError is raised.

    `overlap`: "eager" begins updates while backward still goes on and publishes them in `step()` if they turned out
    right, else does them again; "deferred" begins them in `step()`; "auto" chooses from how the last steps went. The
    results are the same to the last bit.

    `params`: parameters of an offloaded model, or groups of them. Frozen ones may be among them.
    `foreach` and `fused` choose nothing here, where steps are always those of torch's fused kernel; they go into state
    dicts, for torch.optim.AdamW. The other options of that class are refused when they are on.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = True,
        max_skipped_steps: int = 10,
        overlap: Mode = "auto",
    ) -> None:
        self.overlap = Overlap(overlap)
        self.members: dict[Unit, list[tuple[int, dict[str, Any]]]] = {}  # this optimizer's parameters by unit
        self.max_skipped_steps = max_skipped_steps
        theirs = {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "capturable": capturable}
        theirs |= {"differentiable": differentiable, "fused": fused}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **theirs})

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
                self.members.setdefault(unit, []).append((index, group))
                unit.owner.optimizers.add(self)

    @without_grad
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue one update of every parameter that has a gradient. Returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_group(group)
        work = self.work()
        owners = self._owners(work)
        for owner in owners:
            mine = [unit for unit in work if unit.owner is owner]
            owner.pager.check_idle(mine, "call optimizer.step() after backward, outside the model and `unsharded`")
        for unit in work:
            unit.owner.pager.settle(unit, keep_guess=True)
        bad = first_bad(work)
        skipped = bad is not None or self._overflowed()
        if not skipped:
            self._unscale(work)
        as_is = not skipped and not any(unit.touched or {*unit.coef, *unit.unscaled} != {1.0} for unit in work)
        for owner in owners:
            todo = [] if skipped else [unit for unit in work if unit.owner is owner]
            jobs = [self._job(unit, work[unit]) for unit in todo]
            owner.pager.step(jobs, [unit for unit in self.members if unit.owner is owner])
            owner.metrics.add("skipped_steps" if skipped else "steps")
        self.overlap.stepped(self._settings(), as_is=as_is)
        if not self._overflowed():  # else the GradScaler deals with it
            self._note_skip(bad)
        return loss

    # -- guesses -------------------------------------------------------------------------------------------------------

    def gradients_final(self, unit: Unit, *, certain: bool) -> None:
        """The engine says that a backward adds nothing more to the unit's gradients (`certain`), or probably not: what
        the step needs of them may begin.
        """
        members = self.members.get(unit)
        if members is None or unit.guess is not None or unit.pending is not None or not self.overlap.last:
            return
        groups = {index: group for index, group in members if unit.rest[index].grad is not None}
        if not groups or not (certain or len(groups) == len(members)):
            return
        begin_norms(unit)
        if unit.owner.can_guess(unit) and self.overlap.wanted():
            hypers = self._hypers(unit, groups)
            unit.owner.pager.guess(Guess(unit, UnitUpdate(unit.owner.streamed, unit, hypers), hypers))

    def backward_over(self) -> None:
        """The engine says that a backward has ended."""
        self.overlap.backward_over(self._settings())

    def _settings(self) -> list[tuple[float, ...]]:
        """The hyper-parameters of each group."""
        return [
            (float(g["lr"]), *(float(beta) for beta in g["betas"]), float(g["eps"]), float(g["weight_decay"]))
            for g in self.param_groups
        ]

    def _hypers(self, unit: Unit, groups: dict[int, dict[str, Any]]) -> dict[int, Hyper]:
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
                unit.coef[index] * unit.unscaled[index],
            )
        return hypers

    def _job(self, unit: Unit, numbers: dict[int, int]) -> Update:
        hypers = self._hypers(unit, {index: self.param_groups[number] for index, number in numbers.items()})
        counts = [self.state[unit.rest[index]]["step"] for index in hypers]

        def begin() -> None:
            for index, count in zip(hypers, counts, strict=True):
                unit.steps[index] += 1
                count += 1

        return Update(unit, UnitUpdate(unit.owner.streamed, unit, hypers), hypers, begin)

    def restored(self) -> None:
        """A snapshot has set the units' step counts."""
        for unit, members in self.members.items():
            for index, _ in members:
                self.state[unit.rest[index]]["step"].fill_(unit.steps[index])

    @torch.no_grad()
    def load(self, state_dict: dict[str, Any]) -> None:
        """Hyper-parameters, steps and moments, from a state dict of this class or of torch.optim.AdamW."""
        saved, groups = state_dict["state"], state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                "the state dict has other parameter groups than this optimizer: build it over the same parameters in "
                "the same groups"
            )
        merged = [
            {key: other.get(key, value) for key, value in group.items() if key != "params"}
            for group, other in zip(self.param_groups, groups, strict=True)
        ]
        for values in merged:
            _check_group(values)
        for group, values, other in zip(self.param_groups, merged, groups, strict=True):
            group.update(values)
            for param, key in zip(group["params"], other["params"], strict=True):
                if param not in self.state:
                    continue
                values = saved.get(key)
                if values is None:  # it was never stepped there
                    values = {"step": 0}
                    if self.state[param]["step"] != 0:
                        values |= {name: torch.zeros(param.shape) for name in ("exp_avg", "exp_avg_sq")}
                for name in ("exp_avg", "exp_avg_sq", "master"):
                    if name in values and name in self.state[param]:
                        self.state[param][name].copy_(values[name])
                step = int(values["step"])
                self.state[param]["step"].fill_(step)
                unit, index = home_of(param)
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
            self.unit.master_edited |= self.part == StateRecord.MASTER
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
        state[name] = Resting(StateSource(unit, index, part, name), shape, torch.float32)
    return state


def _check_group(group: dict[str, Any]) -> None:
    lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", decay)):
        if not value >= 0:
            raise ValueError(f"{name} must be zero or more, got {value}")
    for beta in group["betas"]:
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas must lie in [0, 1), got {tuple(group['betas'])}")
    for name, instead in _REFUSED.items():
        if group.get(name):
            raise TierzeroError(f"{name}=True is not supported by tierzero.AdamW; {instead}")
