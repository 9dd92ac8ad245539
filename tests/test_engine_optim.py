"""The optimizer in every way torch's own is used: equal bit by bit."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import Net
from oracle import HYPER, assert_same, batches, check, loss_of, make, same, tiered, tiers_for, train_both
from pairs import backward_both, in_groups, pair, step_both
from torch import nn
from torch.optim import lr_scheduler

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.mark.parametrize("shape", ["plain", "lora", "odd sizes"])
def test_param_groups(shape: str, tmp_path: Path) -> None:
    """Different hyper-parameters, zeros among them, inside one unit."""
    check(models.SHAPES[shape], tmp_path, groups=in_groups, clip=lambda step, norm: norm * 0.5)


HYPERS: list[dict[str, Any]] = [
    {"weight_decay": 0.0},
    {"lr": 0.0},
    {"betas": (0.0, 0.0)},
    {"betas": (0.5, 0.9)},  # torch computes the first moment in another way up to here
    {"betas": (0.51, 0.999)},
    {"eps": 0.1},
    {"lr": torch.tensor(0.02)},
]


@pytest.mark.parametrize("hyper", HYPERS, ids=str)
def test_hyper_parameters(hyper: dict[str, Any], tmp_path: Path) -> None:
    """Corner values of each, and a learning rate that is a tensor."""
    for dtype in (torch.float32, torch.bfloat16):
        with pair(tmp_path / str(dtype), hyper=hyper, dtype=dtype) as (plain, run):
            train_both([("", run)], plain, 5, accumulate=2)


@pytest.mark.parametrize("placement", ["host", "nvme", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_intermittent_gradients(dtype: torch.dtype, placement: str, tmp_path: Path) -> None:
    """A parameter without a gradient in a step does not advance (C7)."""
    with pair(tmp_path, placement=placement, dtype=dtype) as (plain, run):
        for step, ids in enumerate(batches(9)):
            backward_both(plain, run, ids)
            for each in (plain, run):
                for index, param in enumerate(each.model.parameters()):
                    if (index + step) % 3 == 0:
                        param.grad = None
            max_norm = plain.norm() * 0.5
            assert same(plain.step(max_norm), run.step(max_norm))
            plain.zero_grad()
            run.zero_grad()
        steps = {float(run.optimizer.state[param]["step"]) for param in run.model.parameters()}
        assert steps == {6.0}


def every_scheduler(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """One of each, over `optimizer`; building one may change the learning rate at once."""
    half = lambda epoch: 0.5**epoch
    pieces = lambda: [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return {
        "LambdaLR": lambda: lr_scheduler.LambdaLR(optimizer, half),
        "MultiplicativeLR": lambda: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
        "StepLR": lambda: lr_scheduler.StepLR(optimizer, 2, 0.5),
        "MultiStepLR": lambda: lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5),
        "ConstantLR": lambda: lr_scheduler.ConstantLR(optimizer, 0.5, 2),
        "LinearLR": lambda: lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3),
        "ExponentialLR": lambda: lr_scheduler.ExponentialLR(optimizer, 0.8),
        "PolynomialLR": lambda: lr_scheduler.PolynomialLR(optimizer, 5, 2.0),
        "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 4),
        "CosineAnnealingWarmRestarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
        "CyclicLR": lambda: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, 2, cycle_momentum=True),
        "OneCycleLR": lambda: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8),
        "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
        "ChainedScheduler": lambda: lr_scheduler.ChainedScheduler(pieces()),
        "SequentialLR": lambda: lr_scheduler.SequentialLR(optimizer, pieces(), [2]),
        "SWALR": lambda: torch.optim.swa_utils.SWALR(optimizer, 5e-3, 2),
    }


SCHEDULERS = sorted(every_scheduler(torch.optim.AdamW([nn.Parameter(torch.zeros(1))])))


def test_no_scheduler_is_left_out() -> None:
    """The list above is torch's."""
    known = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler",)}
    assert known <= {*SCHEDULERS}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, tmp_path: Path) -> None:
    """Every torch scheduler drives the optimizer as it drives torch's own, without a warning (F14)."""
    with pair(
        tmp_path,
        groups=lambda model: [
            {"params": list(model.parameters())[:4]},
            {"params": list(model.parameters())[4:], "lr": 3e-3},
        ],
    ) as (plain, run):
        schedulers = [every_scheduler(each.optimizer)[name]() for each in (plain, run)]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for ids in batches(7):
                step_both(plain, run, ids)
                for scheduler in schedulers:
                    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert [g["lr"] for g in plain.optimizer.param_groups] == [g["lr"] for g in run.optimizer.param_groups]
        assert [g["betas"] for g in plain.optimizer.param_groups] == [g["betas"] for g in run.optimizer.param_groups]
        state = schedulers[1].state_dict()
        schedulers[1].load_state_dict(copy.deepcopy(state))


def test_closure(tmp_path: Path) -> None:
    """A closure runs forward and backward with gradients on, and its loss is returned."""
    with pair(tmp_path) as (plain, run):
        for ids in batches(3):
            expected = loss_of(plain.model, ids)
            expected.backward()
            plain.step()
            plain.zero_grad()

            def closure(ids: torch.Tensor = ids) -> torch.Tensor:
                run.optimizer.zero_grad()
                loss = loss_of(run.model, ids)
                loss.backward()
                return loss

            assert same(run.optimizer.step(closure), expected)
            run.zero_grad()


def test_add_param_group(tmp_path: Path) -> None:
    """A group added in the middle of training starts at step one."""
    only = lambda model: [{"params": list(model.layers[0].parameters())}]
    with pair(tmp_path, groups=only) as (plain, run):
        for ids in batches(2, seed=2):
            step_both(plain, run, ids)
            run.model.zero_grad()  # of the parameters that no group has yet
        for each in (plain, run):
            params = list(each.model.head.parameters()) + list(each.model.layers[2].parameters())
            each.optimizer.add_param_group(
                {"params": [plain.masters[p] for p in params] if each is plain else params, "lr": 5e-3}
            )
        for ids in batches(3, seed=3):
            step_both(plain, run, ids)
        with pytest.raises(ValueError, match="more than one parameter group"):
            run.optimizer.add_param_group({"params": [run.model.head.weight]})


@pytest.mark.parametrize("overlap", ["eager", "deferred"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["host", "nvme", "mixed"])
def test_another_adamw_starts_anew(placement: str, dtype: torch.dtype, overlap: str, tmp_path: Path) -> None:
    """As in torch: no moments and no steps of the one before, whose updates and guesses are on their way."""
    with pair(tmp_path, placement=placement, dtype=dtype) as (plain, run):
        for count in (1, 2):
            train_both([("", run)], plain, 3, seed=count)
            backward_both(plain, run, next(batches(1, seed=9)))  # a guess, which the new one does again or drops
            plain.optimizer = torch.optim.AdamW(list(plain.masters.values()), fused=True, **HYPER)
            run.optimizer = tz.AdamW(run.model.parameters(), **HYPER, overlap=overlap)  # type: ignore[arg-type]
            assert {float(state["step"]) for state in run.optimizer.state.values()} == {0.0}
            assert same(plain.step(0.1), run.step(0.1))  # type: ignore[arg-type]
            plain.zero_grad()
            run.zero_grad()
        train_both([("", run)], plain, 3)


@pytest.mark.parametrize("overlap", ["eager", "deferred"])
def test_an_adamw_whose_parameters_another_one_took(overlap: str, tmp_path: Path) -> None:
    """There is one record of moments: the older optimizer is refused, with nothing changed, and the newer one goes on.
    One that could not be built takes nothing.
    """
    with pair(tmp_path) as (plain, run):
        train_both([("", run)], plain, 2)
        older = run.optimizer
        params = list(run.model.parameters())
        with pytest.raises(ValueError, match="weight_decay must be"):
            tz.AdamW([{"params": params[:3]}, {"params": params[3:], "weight_decay": -1.0}])
        train_both([("", run)], plain, 1)
        backward_both(plain, run, next(batches(1)))
        plain.optimizer = torch.optim.AdamW(list(plain.masters.values()), fused=True, **HYPER)
        run.optimizer = tz.AdamW(run.model.parameters(), **HYPER, overlap=overlap)  # type: ignore[arg-type]
        with pytest.raises(tz.TierzeroError, match=r"another AdamW was built over embed\.weight after this one"):
            older.step()
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()
        train_both([("", run)], plain, 3)


def test_two_optimizers(tmp_path: Path) -> None:
    """Two optimizers share the parameters of one unit."""
    model, ours = make(Net), make(Net)
    split = lambda m: (list(m.parameters())[::2], list(m.parameters())[1::2])
    theirs = [torch.optim.AdamW(params, fused=True, **HYPER) for params in split(model)]
    tz.offload(ours, tiers_for(ours, "nvme", tmp_path))
    try:
        mine = [tz.AdamW(params, **HYPER) for params in split(ours)]
        for index, ids in enumerate(batches(6)):
            for each, optimizers in ((model, theirs), (ours, mine)):
                loss_of(each, ids).backward()
                for optimizer in optimizers[: 1 + index % 2]:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        assert all(same(a.read(), b) for a, b in zip(ours.parameters(), model.parameters(), strict=True))
    finally:
        tz.close(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_state_dict_round_trip(placement: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Model and optimizer state saved with torch.save and loaded into a fresh engine go on bit-equal."""
    with pair(tmp_path / "a", placement=placement, dtype=dtype, groups=in_groups) as (plain, run):
        train_both([("", run)], plain, 3)
        buffer = io.BytesIO()
        torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, buffer)
        state = torch.load(io.BytesIO(buffer.getvalue()))
        assert all(type(value) is torch.Tensor for value in state["model"].values())
        fresh = make(Net, dtype, seed=9)
        with tiered(fresh, tiers_for(fresh, "mixed", tmp_path / "b"), groups=in_groups) as other:
            fresh.load_state_dict(state["model"])
            other.optimizer.load_state_dict(state["optimizer"])
            assert_same(other, plain)
            train_both([("first", run), ("second", other)], plain, 3, seed=5)
            assert_same(other, plain)


def test_state_of_torch_adamw(tmp_path: Path) -> None:
    """A state dict of torch.optim.AdamW is taken over, and the other way round."""
    torch_model = make(Net)
    theirs = torch.optim.AdamW(torch_model.parameters(), fused=True, **HYPER)
    for ids in batches(3):
        loss_of(torch_model, ids).backward()
        theirs.step()
        theirs.zero_grad()
    ours = copy.deepcopy(torch_model)
    with tiered(ours, tiers_for(ours, "nvme", tmp_path)) as run:
        run.optimizer.load_state_dict(theirs.state_dict())
        for ids in batches(3, seed=4):
            for model, optimizer in ((torch_model, theirs), (ours, run.optimizer)):
                loss_of(model, ids).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(same(a.read(), b) for a, b in zip(ours.parameters(), torch_model.parameters(), strict=True))
        back = torch.optim.AdamW(torch_model.parameters(), fused=True, **HYPER)
        state = torch.load(io.BytesIO(_saved(run.optimizer.state_dict())))
        back.load_state_dict(state)
        for param in torch_model.parameters():
            assert same(back.state[param]["exp_avg"], theirs.state[param]["exp_avg"])


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_it_is_an_optimizer(tmp_path: Path) -> None:
    """isinstance, defaults, param_groups, repr, step hooks (F14)."""
    with pair(tmp_path) as (plain, run):
        optimizer = run.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert set(optimizer.defaults) >= {"lr", "betas", "eps", "weight_decay"}
        assert "AdamW" in repr(optimizer)
        seen = []
        optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
        optimizer.register_step_post_hook(lambda *args: seen.append("after"))
        step_both(plain, run, next(batches(1)))
        assert seen == ["before", "after"]


def test_ema_of_parameters(tmp_path: Path) -> None:
    """An averaged model beside the offloaded one reads its parameters at rest."""
    with pair(tmp_path) as (plain, run):
        averages = [[param.detach().clone() for param in each.model.parameters()] for each in (plain, run)]
        for ids in batches(3):
            step_both(plain, run, ids)
            for each, average in zip((plain, run), averages, strict=True):
                for mean, param in zip(average, each.model.parameters(), strict=True):
                    mean.lerp_(param.detach().clone(), 0.1)
        assert all(map(same, *averages))
