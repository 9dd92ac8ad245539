"""AdamW: a torch.optim.Optimizer whose master weights and moments live in the tiers of an offloaded model."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tierzero.errors import TierzeroError
from tierzero.native import NATIVE
from tierzero.optim.base import TieredOptimizer, first_bad, home_of
from tierzero.optim.norms import begin_norms, without_grad
from tierzero.optim.overlap import Mode, Overlap
from tierzero.optim.resting import Resting
from tierzero.optim.streamed import Hyper, UnitUpdate
from tierzero.paging.updates import Guess, Update
from tierzero.units.records import StateRecord
from tierzero.units.state_format import StateFormat, choose_format
from tierzero.units.unit import Unit

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_REFUSED = {
    "capturable": "a step that reads and writes tiers cannot be part of a CUDA graph",
    "differentiable": "nothing can be differentiated through a step whose tensors are paged out",
}


class AdamW(TieredOptimizer):
    """Decoupled weight decay Adam (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101), bit-equal to
    torch.optim.AdamW(fused=True) on float32 masters; with `decoupled` False plain Adam, bit-equal to torch.optim.Adam.

    `step()` queues the updates and returns; each unit's next use waits for its own. Master (for 16-bit parameters),
    exp_avg and exp_avg_sq stream through the tiers, in float32 unless told otherwise. A step with a gradient that is
    infinite or NaN is skipped whole and logged; after `max_skipped_steps` in a row NonFiniteGradientError is raised.

    `overlap`: "eager" begins updates while backward still goes on and publishes them in `step()` if they turned out
    right, else does them again; "deferred" begins them in `step()`; "auto" chooses from how the last steps went. The
    results are the same to the last bit.

    `params`: parameters of an offloaded model, or groups of them. Frozen ones may be among them.

    `state_dtype`: of the moments, torch.float32, torch.bfloat16 (rounded stochastically) or "8bit" (with a scale for
    every 256 elements); what is rounded depends on `seed`, the parameter's name, the step and the element alone.
    `master`: "float32", or "split" for bfloat16 parameters cached in host memory: they are then the high half of their
    masters and NVMe holds the low one, nothing is lost and 10 bytes per parameter move instead of 12. Other parameters
    keep float32 masters. All optimizers of a model have the same `state_dtype`, `master` and `amsgrad`.

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
        decoupled: bool = True,
        state_dtype: torch.dtype | str = torch.float32,
        master: str = "float32",
        seed: int = 0,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = True,
        max_skipped_steps: int = 10,
        overlap: Mode = "auto",
    ) -> None:
        self.overlap = Overlap(overlap)
        self.format = choose_format(state_dtype, master, amsgrad, native=NATIVE is not None)
        self.members: dict[Unit, list[tuple[int, dict[str, Any]]]] = {}
        self.max_skipped_steps = max_skipped_steps
        self._built = False
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        defaults |= {"maximize": maximize, "decoupled_weight_decay": decoupled, "seed": seed}
        defaults |= {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(params, defaults)
        for group in self.param_groups:  # all of them were let in
            self._claim(group)
        self._built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; state records are created for the units that hold them."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group, self.format)
            places = [self._place(param, index) for index, param in enumerate(group["params"])]
            for owner in dict.fromkeys(unit.owner for unit, _ in places):
                owner.ensure_state(self.format)
        except BaseException:
            self.param_groups.pop()
            raise
        for param, (unit, index) in zip(group["params"], places, strict=True):
            if unit.layout.places[index].elem >= 0:
                self.state[param] = _state(unit, index)
                self.members.setdefault(unit, []).append((index, group))
                unit.owner.optimizers.add(self)
        if self._built:
            self._claim(group)

    def _check_latest(self, work: dict[Unit, dict[int, int]]) -> None:
        for unit, index in ((unit, index) for unit, indices in work.items() for index in indices):
            if unit.latest[index]() is not self:
                raise TierzeroError(
                    f"another AdamW was built over {unit.names[index]} after this one and has its moments now, which "
                    "are one record: step that one, or give each optimizer parameters of its own"
                )

    @torch.no_grad()
    def _claim(self, group: dict[str, Any]) -> None:
        """Take over the moments of the group's parameters; what an optimizer before this one has left is forgotten."""
        for param in group["params"]:
            unit, index = home_of(param)
            unit.latest[index] = weakref.ref(self)
            if index in unit.stepped and param in self.state:
                for name in _MOMENTS:
                    if name in self.state[param]:
                        self.state[param][name].copy_(torch.zeros(param.shape))
                self.state[param]["step"].zero_()
                unit.steps[index] = 0
                unit.stepped.discard(index)

    @without_grad
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue one update of every parameter that has a gradient. Returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_group(group, self.format)
        with self.counted("optimizer step"):
            owners, bad, as_is = self._queue()
        self.end_steps(owners, skipped=bad is not None or self._overflowed())
        self.overlap.stepped(self._settings(), as_is=as_is)
        if not self._overflowed():  # else the GradScaler deals with it
            self._note_skip(bad)
        return loss

    def _queue(self) -> tuple[list[Any], str | None, bool]:
        """(the engines stepped, the first parameter with a bad gradient, whether all gradients were as they came)."""
        work = self.work()
        self._check_latest(work)
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
        return owners, bad, as_is

    # -- guesses -------------------------------------------------------------------------------------------------------

    def gradients_final(self, unit: Unit, *, certain: bool) -> None:
        """The engine says that a backward adds nothing more to the unit's gradients (`certain`), or probably not: what
        the step needs of them may begin.
        """
        members = self.members.get(unit)
        if members is None or unit.guess is not None or unit.pending is not None or not self.overlap.last:
            return
        groups = {index: group for index, group in members if unit.rest[index].grad is not None}
        if any(unit.latest[index]() is not self for index in groups):
            return  # the step will say so
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
            (
                *(float(value) for value in (g["lr"], *g["betas"], g["eps"], g["weight_decay"])),
                *(bool(g["maximize"]), bool(g["decoupled_weight_decay"]), int(g["seed"])),
            )
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
                bool(group["maximize"]),
                bool(group["decoupled_weight_decay"]),
                0 if self.format.moments == "f32" else _noise(group["seed"], unit, index),
            )
        return hypers

    def _job(self, unit: Unit, numbers: dict[int, int]) -> Update:
        hypers = self._hypers(unit, {index: self.param_groups[number] for index, number in numbers.items()})
        counts = [self.state[unit.rest[index]]["step"] for index in hypers]

        def begin() -> None:
            for index, count in zip(hypers, counts, strict=True):
                unit.steps[index] += 1
                unit.stepped.add(index)
                count += 1

        return Update(unit, UnitUpdate(unit.owner.streamed, unit, hypers), hypers, begin)

    def restored(self) -> None:
        """A snapshot has set the units' step counts."""
        super().restored()
        for unit, members in self.members.items():
            for index, _ in members:
                self.state[unit.rest[index]]["step"].fill_(unit.steps[index])

    @torch.no_grad()
    def load(self, state_dict: dict[str, Any]) -> None:
        """Hyper-parameters, steps and moments, from a state dict of this class or of torch.optim.AdamW."""
        self.take(state_dict)
        saved = state_dict["state"]
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], other["params"], strict=True):
                if param not in self.state:
                    continue
                values = saved.get(key)
                if values is None:  # it was never stepped there
                    values = {"step": 0}
                    if self.state[param]["step"] != 0:
                        values |= {name: torch.zeros(param.shape) for name in _MOMENTS}
                for name in (*_MOMENTS, "master"):
                    if name in values and name in self.state[param]:
                        self.state[param][name].copy_(values[name])
                step = int(values["step"])
                self.state[param]["step"].fill_(step)
                unit, index = home_of(param)
                unit.steps[index] = step

    def take(self, state_dict: dict[str, Any]) -> None:
        """The hyper-parameters alone."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                "the state dict has other parameter groups than this optimizer: build it over the same parameters in "
                "the same groups"
            )
        if any(bool(group.get("amsgrad", False)) != self.format.amsgrad for group in groups):
            raise ValueError("the state dict has another amsgrad= than this optimizer: build it with the same one")
        merged = [
            {key: other.get(key, value) for key, value in group.items() if key != "params"}
            for group, other in zip(self.param_groups, groups, strict=True)
        ]
        for values in merged:
            _check_group(values, self.format)
        for group, values in zip(self.param_groups, merged, strict=True):
            group.update(values)


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

        self.unit.at_rest(write(), writes=True, changes=self.part == StateRecord.MASTER)


def _state(unit: Unit, index: int) -> dict[str, Any]:
    shape = unit.layout.places[index].spec.shape
    parts = {"exp_avg": StateRecord.EXP_AVG, "exp_avg_sq": StateRecord.EXP_AVG_SQ}
    if unit.state is not None and unit.state.format.amsgrad:
        parts["max_exp_avg_sq"] = StateRecord.MAX_EXP_AVG_SQ
    if unit.layout.places[index].region == "param":
        parts["master"] = StateRecord.MASTER
    state: dict[str, Any] = {"step": torch.tensor(float(unit.steps[index]))}
    for name, part in parts.items():
        state[name] = Resting(StateSource(unit, index, part, name), shape, torch.float32)
    return state


def _noise(seed: int, unit: Unit, index: int) -> int:
    """64 bits for the next step of one parameter."""
    what = f"{seed} {unit.steps[index] + 1} {unit.names[index]}"
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")


def _check_group(group: dict[str, Any], format: StateFormat) -> None:
    lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", decay)):
        if not value >= 0:
            raise ValueError(f"{name} must be zero or more, got {value}")
    for beta in group["betas"]:
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas must lie in [0, 1), got {tuple(group['betas'])}")
    if bool(group["amsgrad"]) != format.amsgrad:
        raise ValueError("amsgrad= is one for all groups, it decides what state records hold: give it to AdamW()")
    for name, instead in _REFUSED.items():
        if group.get(name):
            raise TierzeroError(f"{name}=True is not supported by tierzero.AdamW; {instead}")
