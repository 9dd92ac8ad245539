"""What wrap_optimizer refuses, and says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from oracle import make, tiers_for
from other_optimizers import roomy
from torch import nn, optim

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class Counting(optim.SGD):
    """Remembers something outside its state."""

    def __init__(self, params: Any, **hyper: Any) -> None:
        super().__init__(params, **hyper)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / self.count)


class Global(optim.SGD):
    """Looks across its parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in params]))
        for param in params:
            param.sub_(param.grad / norm, alpha=self.param_groups[0]["lr"])


class InGroup(optim.SGD):
    """Counts in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.5


class Listing(optim.SGD):
    """Keeps lists."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("history", []).append(1)


REFUSED = [
    (optim.LBFGS, tz.TierzeroError, "evaluates the model several times"),
    (optim.SparseAdam, tz.TierzeroError, "sparse gradients"),
    (Counting, tz.TierzeroError, "remembers more"),
    (Global, tz.TierzeroError, "looks across parameters"),
    (InGroup, tz.TierzeroError, "changes param_groups"),
    (Listing, tz.TierzeroError, "'history' is a list"),
    (nn.Linear, TypeError, "subclass of torch.optim.Optimizer"),
    (optim.SGD([nn.Parameter(torch.zeros(1))]), TypeError, "the class of an optimizer"),
]


@pytest.mark.parametrize(("cls", "error", "match"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused(cls: Any, error: Any, match: str, tmp_path: Path) -> None:
    model = make(Net)
    tz.offload(model, roomy(model, "nvme", tmp_path))
    try:
        state = torch.get_rng_state()
        with pytest.raises(error, match=match):
            tz.wrap_optimizer(cls, model.parameters())
        assert torch.equal(state, torch.get_rng_state())
        with pytest.raises(ValueError, match="2D parameters"):
            tz.wrap_optimizer(optim.Muon, model.parameters())
    finally:
        tz.close(model)


def test_parameters_from_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tz.TierzeroError, match="is not one of an offloaded model"):
        tz.wrap_optimizer(optim.SGD, make(Net).parameters(), lr=0.1)


def test_a_host_budget_too_small_names_the_one_that_works(tmp_path: Path) -> None:
    """Without NVMe everything must fit; with it, cached parameters make room. See `fitted`."""
    model = make(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), torch.bfloat16)
    tz.offload(model, tiers_for(model, "host", tmp_path))
    try:
        with pytest.raises(tz.BudgetError, match=r"a step by Adam|the states and masters of Adam"):
            tz.wrap_optimizer(optim.Adam, model.parameters(), amsgrad=True)
    finally:
        tz.close(model)
