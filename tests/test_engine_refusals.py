"""Budgets that are too small, calls in the wrong order and models that cannot be offloaded: a sentence for each."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import DIM, Net
from oracle import Plain, assert_same, batches, loss_of, make, tiered, tiers_for, train_both
from pairs import backward_both, pair
from torch import nn

import tierzero as tz
from tierzero.model import replaced

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


def smallest(message: str) -> int:
    """The number of bytes that an error message promises to work."""
    import re

    found = re.search(r"(?:works is |at least [^()]*\()(\d+) bytes", message)
    assert found is not None, message
    return int(found.group(1))


@pytest.mark.parametrize("shape", [*models.SHAPES])
@pytest.mark.parametrize("nvme", [False, True])
def test_budgets_that_are_too_small(nvme: bool, shape: str, tmp_path: Path) -> None:
    """The error names the smallest budget that works, one byte less does not, and that one trains (F5)."""
    factory = models.SHAPES[shape]
    where = tmp_path if nvme else None
    limits = {}
    for which in ("host", "device"):
        budgets = {"host": "1GiB", "device": "1GiB", which: 1}
        with pytest.raises(tz.BudgetError, match="smallest") as caught:
            tz.offload(make(factory), tz.Tiers(nvme=where, compute="cpu", **budgets))
        limits[which] = smallest(str(caught.value))
        with pytest.raises(tz.BudgetError) as again:
            tz.plan(make(factory), tz.Tiers(nvme=where, compute="cpu", **{**budgets, which: limits[which] - 1}))
        assert smallest(str(again.value)) == limits[which]
    model = make(factory)
    before = [id(param) for param in model.parameters()]
    with pytest.raises(tz.BudgetError):
        tz.offload(model, tz.Tiers(nvme=where, host=1, device="1GiB", compute="cpu"))
    assert [id(param) for param in model.parameters()] == before
    plain = Plain(make(factory))
    with tiered(model, tz.Tiers(nvme=where, compute="cpu", **limits)) as run:
        train_both([("", run)], plain, 2, accumulate=2)
        assert_same(run, plain)


def test_unsharding_more_than_fits(tmp_path: Path) -> None:
    """`unsharded` of the whole model names the budget that it would take."""
    with pair(tmp_path) as (plain, run):
        with pytest.raises(tz.BudgetError, match="works here") as caught, tz.unsharded(run.model):
            pass
        assert smallest(str(caught.value)) > run.engine.metrics.device_budget
        with tz.unsharded(run.model.layers[0]):
            pass
        train_both([("", run)], plain, 1)


def test_wrong_order(tmp_path: Path) -> None:
    """Optimizer before offload, offload twice, frozen parameters trained later, casts afterwards: each says what to do
    (D6, F14).
    """
    model = make(Net)
    with pytest.raises(tz.TierzeroError, match="offload"):
        tz.AdamW(model.parameters())
    with pytest.raises(tz.TierzeroError, match="offload"):
        tz.stats(model)
    model.layers[0].requires_grad_(False)
    tiers = tiers_for(model, "nvme", tmp_path)
    with tiered(model, tiers):
        with pytest.raises(tz.TierzeroError, match="offloaded already"):
            tz.offload(model, tiers)
        model.layers[0].up.weight.requires_grad_(True)
        with pytest.raises(tz.TierzeroError, match=r"layers\.0\.up\.weight was frozen when offload.*before offload"):
            tz.AdamW(model.parameters())
        with pytest.raises(tz.TierzeroError, match=r"layers\.0\.up\.weight was frozen when offload"):
            loss_of(model, next(batches(1)))
        model.layers[0].requires_grad_(False)
        loss_of(model, next(batches(1))).backward()
        model.zero_grad()
    with pytest.raises(tz.TierzeroError, match=r"closed"):
        model.head.weight.read()
    with pytest.raises(tz.TierzeroError, match=r"closed"):
        loss_of(model, next(batches(1)))
    with pytest.raises(tz.TierzeroError, match=r"was closed by tierzero\.close"):
        tz.offload(model, tiers)
    tz.close(model)


@pytest.mark.parametrize("how", ["assign", "replace"])
def test_parameters_replaced_afterwards(how: str, tmp_path: Path) -> None:
    """Replacing parameters after offload is refused by the next forward, naming the parameter (D6, M4)."""
    model = make(Net)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with tiered(model, tiers_for(model, "host", tmp_path)):
        if how == "assign":
            model.load_state_dict(state, assign=True)
        else:
            model.layers[1].up.weight = nn.Parameter(torch.zeros(2 * DIM, DIM))
        name = "layers.1.up.weight" if how == "replace" else "embed.weight"
        with pytest.raises(tz.TierzeroError, match=rf"{name} was replaced after offload"):
            loss_of(model, next(batches(1)))


@pytest.mark.parametrize("cast", [lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.half()])
def test_casts_afterwards(cast: Any, tmp_path: Path) -> None:
    """Casting an offloaded model is refused at once, and nothing has changed (D6)."""
    with pair(tmp_path) as (plain, run):
        with pytest.raises(tz.TierzeroError, match=r"embed\.weight.*before offload"):
            cast(run.model)
        train_both([("", run)], plain, 2)


def test_assigning_data(tmp_path: Path) -> None:
    """`param.data = tensor` of the same kind writes the values."""
    with pair(tmp_path) as (plain, run):
        for model in (plain.model, run.model):
            for param in model.parameters():
                param.data = param.detach().clone() * 0.5
        for param, master in plain.masters.items():
            master.data.copy_(param)
        train_both([("", run)], plain, 2)


def test_calls_that_change_nothing_are_fine(tmp_path: Path) -> None:
    """`.to` the place where it is, `.train()`, `.float()` of float32, `.cpu()`."""
    with pair(tmp_path) as (plain, run):
        run.model.to("cpu").to(torch.device("cpu")).to(torch.float32).float().cpu().train().eval().train()
        train_both([("", run)], plain, 2)


def test_optimizer_arguments(tmp_path: Path) -> None:
    """Values that make no sense are refused, and the groups stay as they were."""
    with pair(tmp_path) as (plain, run):
        for wrong in (
            {"lr": -1.0},
            {"eps": float("nan")},
            {"weight_decay": -0.1},
            {"betas": (1.0, 0.9)},
            {"betas": (0.9, -0.1)},
        ):
            with pytest.raises(ValueError):
                tz.AdamW(run.model.parameters(), **wrong)
        with pytest.raises(ValueError, match="empty"):
            tz.AdamW([])
        run.optimizer.param_groups[0]["lr"] = -1.0
        backward_both(plain, run, next(batches(1)))
        with pytest.raises(ValueError, match="lr must be zero or more"):
            run.optimizer.step()
        run.optimizer.param_groups[0]["lr"] = plain.optimizer.param_groups[0]["lr"]
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()


def test_an_optimizer_built_before_offload(tmp_path: Path) -> None:
    """torch's optimizers built before say at their first step that they would train nothing; others are left alone."""
    model, other = make(Net), make(Net)
    early = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1)
    elsewhere = torch.optim.AdamW(other.parameters())
    with pytest.raises(tz.TierzeroError, match=r"not one of an offloaded model: call tierzero.offload\(model\) first"):
        tz.AdamW(model.parameters())
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        for each in (model, other):
            loss_of(each, next(batches(1))).backward()
        elsewhere.step()
        run.step()
        with pytest.raises(tz.TierzeroError, match=r"this SGD was built before offload\(\).*embed\.weight"):
            early.step()
        assert replaced._REPLACED
        del early
        gc.collect()
        assert not replaced._REPLACED


def test_a_host_budget_above_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told before the memory is full, by the plan in the same words; one that the model does not use is fine."""
    tiers = tz.Tiers(nvme=tmp_path / "store", host="2GiB", device="1GiB", compute="cpu")
    for memory, told in ((1 << 20, True), (1 << 40, False)):
        for module in ("engine", "planning.planner"):
            monkeypatch.setattr(f"tierzero.{module}.memory_limit", lambda memory=memory: memory)
        caplog.clear()
        model = make(Net)
        with caplog.at_level(logging.WARNING, "tierzero"):
            planned = tz.plan(model, tiers)
            assert not caplog.messages
            tz.offload(model, tiers)
        tz.close(model)
        assert ("this process may use 1.0 MiB" in caplog.text) is told
        assert [planned.warning] == (caplog.messages or [""])
        assert (f"\nwarning: {planned.warning}" in str(planned)) is told


@pytest.mark.parametrize("options", [{}, {"foreach": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_of_torch_over_an_offloaded_model(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Its step says which optimizers to take instead; a closure that uses a weight is told what it always is."""
    model = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        optimizer = kind(model.parameters(), lr=0.1, **options)
        loss_of(model, next(batches(1))).backward()
        with pytest.raises(tz.PagedOutError, match=rf"{kind.__name__} cannot step .*wrap_optimizer\({kind.__name__}"):
            optimizer.step()
        with pytest.raises(tz.PagedOutError, match=r"paged out.*unsharded"):
            run.optimizer.step(lambda: next(model.parameters()).sum())


def test_stepping_inside_the_model(tmp_path: Path) -> None:
    """step() during a forward or inside `unsharded` is refused before anything changes."""

    class Steps(Net):
        optimizer: Any = None

        def body(self, h: torch.Tensor) -> torch.Tensor:
            if self.optimizer is not None:
                self.optimizer.step()
            return super().body(h)

    plain = Plain(make(Steps))
    model: Any = make(Steps)
    units = [model]
    with tiered(model, tiers_for(model, "nvme", tmp_path, units), units=units) as run:
        backward_both(plain, run, next(batches(1)))
        model.optimizer = run.optimizer
        with pytest.raises(tz.TierzeroError, match="running forward"):
            loss_of(model, next(batches(1)))
        model.optimizer = None
        with tz.unsharded(model), pytest.raises(tz.TierzeroError, match="unsharded"):
            run.optimizer.step()
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()
        train_both([("", run)], plain, 1)
        assert_same(run, plain)


def test_models_that_cannot_be_offloaded(tmp_path: Path) -> None:
    """Sparse gradients, dtypes that do not train, no parameters, lazy parameters."""
    tiers = tz.Tiers(host="64MiB", device="64MiB", compute="cpu")
    with pytest.raises(tz.TierzeroError, match="no parameters"):
        tz.offload(nn.ReLU(), tiers)
    with pytest.raises((tz.TierzeroError, ValueError), match="float64"):
        tz.offload(nn.Linear(2, 2).double(), tiers)
    with pytest.raises((tz.TierzeroError, ValueError), match=r"(?i)uninitialized"):
        tz.offload(nn.LazyLinear(3), tiers)
    with pytest.raises(TypeError, match=r"tierzero\.Tiers"):
        tz.offload(nn.Linear(2, 2), {"host": "1GiB"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="units="):
        tz.offload(nn.Linear(2, 2), tiers, units=nn.Conv1d)
    model = nn.Embedding(10, 3, sparse=True)
    tz.offload(model, tiers)
    try:
        with pytest.raises(tz.TierzeroError, match=r"weight got a sparse gradient.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
    finally:
        tz.close(model)
