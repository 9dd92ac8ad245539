"""The plain loop and the offloaded one under any torch optimizer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from models import Net
from oracle import Groups, Plain, Tiered, make, same, tiers_for
from torch import nn

import tierzero as tz
from tierzero.api import engine_of


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al., https://arxiv.org/abs/2302.06675)."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["count"], state["momentum"] = 0, torch.zeros_like(param)
                    state["half"] = torch.zeros_like(param, dtype=torch.bfloat16)
                state["count"] += 1
                momentum = state["momentum"]
                param.mul_(1 - group["lr"] * group["decay"])
                param.add_(torch.sign(momentum * beta1 + param.grad * (1 - beta1)), alpha=-group["lr"])
                state["momentum"] = momentum * beta2 + param.grad * (1 - beta2)  # another tensor each time
                state["half"].copy_(momentum)


class PlainOther(Plain):
    """float32 masters under `cls`."""

    def __init__(self, model: nn.Module, cls: Any, groups: Groups | None = None, **hyper: Any) -> None:
        super().__init__(model, groups)
        chosen = [{"params": self.params}] if groups is None else groups(model)
        own = [{**group, "params": [self.masters[p] for p in group["params"] if p in self.masters]} for group in chosen]
        self.optimizer = cls(own, **hyper)


class TieredOther(Tiered):
    """The same on an offloaded model."""

    def __init__(
        self,
        model: nn.Module,
        tiers: tz.Tiers,
        cls: Any,
        groups: Groups | None = None,
        resume: bool = False,
        **hyper: Any,
    ) -> None:
        self.model = tz.offload(model, tiers, resume=resume)
        try:
            chosen = list(model.parameters()) if groups is None else groups(model)
            self.optimizer = tz.wrap_optimizer(cls, chosen, **hyper)
            self.engine = engine_of(model)
        except BaseException:
            tz.close(model)
            raise


def roomy(model: nn.Module, placement: str, directory: Path) -> tz.Tiers:
    """The budgets of `tiers_for` and a MiB more of host memory."""
    tiers = tiers_for(model, placement, directory)
    return dataclasses.replace(tiers, host=int(tiers.host) + (1 << 20))


def fitted(
    build: Callable[[], nn.Module], placement: str | tz.Tiers, directory: Path, cls: Any, *given: Any, **hyper: Any
) -> TieredOther:
    """In the budgets of `tiers_for` with as much more host memory as the error names."""
    model = build()
    tiers = tiers_for(model, placement, directory) if isinstance(placement, str) else placement
    for _ in range(2):
        try:
            return TieredOther(model, tiers, cls, *given, **hyper)
        except tz.BudgetError as error:
            found = re.search(r"smallest host budget that works for this is (\d+) bytes", str(error))
            if found is None:
                raise
            tiers, model = dataclasses.replace(tiers, host=int(found[1])), build()
    return TieredOther(model, tiers, cls, *given, **hyper)


@contextmanager
def other_pair(
    directory: Path,
    cls: Any,
    *,
    placement: str | tz.Tiers = "nvme",
    dtype: torch.dtype = torch.float32,
    factory: Any = Net,
    groups: Groups | None = None,
    **hyper: Any,
) -> Iterator[tuple[PlainOther, TieredOther]]:
    """Both, compared at the end."""
    plain = PlainOther(make(factory, dtype), cls, groups, **hyper)
    run = fitted(lambda: make(factory, dtype), placement, directory, cls, groups, **hyper)
    done = False
    try:
        yield plain, run
        assert_same_states(run, plain)
        run.check_pools()
        done = True
    finally:
        run.engine.close()
        if done:
            assert run.engine.metrics.device_used == 0


def states_of(run: TieredOther) -> dict[str, Any]:
    """Every value of the offloaded model and its optimizer's state, by name."""
    found: dict[str, Any] = {}
    state = run.optimizer.state
    for name, param in run.model.named_parameters():
        found[name] = param.read()
        for key, value in state.get(param, {}).items():
            found[f"{name} {key}"] = value.read() if hasattr(value, "read") else value
    return found


def assert_same_states(run: TieredOther, plain: PlainOther) -> None:
    """Parameters, masters and states have the same bits."""
    mine, names = states_of(run), dict(plain.model.named_parameters())
    expected: dict[str, Any] = {}
    for name, param in names.items():
        expected[name] = param.detach()
        master = plain.masters.get(param)
        if master is None:
            continue
        kept = plain.optimizer.state.get(master, {})
        expected.update({f"{name} {key}": value for key, value in kept.items() if value is not None})
        if f"{name} master" in mine:
            expected[f"{name} master"] = master.detach()
    mine = {name: value for name, value in mine.items() if value is not None}
    assert mine.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not _same(mine[name], value)]
    assert not wrong, wrong


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and same(a, b)
    return type(a) is type(b) and a == b


__all__ = [
    *("Lion", "PlainOther", "TieredOther", "assert_same_states", "fitted", "other_pair", "roomy", "states_of"),
]
