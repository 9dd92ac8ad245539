"""The optimizer in every way torch's own is used: equal bit by bit."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import Net
from oracle import HYPER, Plain, Tiered, assert_same, batches, check, loss_of, make, same, tiered, tiers_for, train_both
from torch import nn
from torch.optim import lr_scheduler

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@contextmanager
def pair(
    tmp_path: Path, factory: Any = Net, placement: str = "nvme", dtype: torch.dtype = torch.float32, **options: Any
) -> Iterator[tuple[Plain, Tiered]]:
    """A model under the plain loop and the same one offloaded; compared at the end."""
    plain = Plain(make(factory, dtype), options.get("groups"), **options.get("hyper", {}))
    model = make(factory, dtype)
    tiers = tiers_for(model, placement, tmp_path, spare=options.get("spare", 0))
    with tiered(model, tiers, groups=options.get("groups"), **options.get("hyper", {})) as run:
        yield plain, run
        assert_same(run, plain)


def backward_both(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    for each in (plain, run):
        loss_of(each.model, ids).backward()


def step_both(plain: Plain, run: Tiered, ids: torch.Tensor, max_norm: float | None = None) -> None:
    backward_both(plain, run, ids)
    expected, total = plain.step(max_norm), run.step(max_norm)
    assert (expected is None and total is None) or same(expected, total)
    plain.zero_grad()
    run.zero_grad()


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    decay = [p for name, p in named.items() if p.dim() > 1 and "head" not in name]
    rest = [p for name, p in named.items() if p.dim() <= 1 and "up" not in name]
    ups = [p for name, p in named.items() if p.dim() <= 1 and "up" in name]
    head = [p for name, p in named.items() if "head" in name]
    return [
        {"params": decay, "weight_decay": 0.3},
        {"params": rest, "weight_decay": 0.0, "lr": 3e-3},
        {"params": ups, "betas": (0.8, 0.5), "eps": 1e-3},
        {"params": head, "lr": 0.0, "weight_decay": 0.0},
    ]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_twice_without_zero_grad(dtype: torch.dtype, tmp_path: Path) -> None:
    """The same gradient is used again, clipped as it was."""
    with pair(tmp_path, dtype=dtype) as (plain, run):
        for ids in batches(3):
            backward_both(plain, run, ids)
            max_norm = plain.norm() * 0.4
            assert same(plain.step(max_norm), run.step(max_norm))
            plain.update()
            run.step()
            plain.zero_grad()
            run.zero_grad()


def test_clip_again_and_accumulate_after_a_step(tmp_path: Path) -> None:
    """Clipping twice, and going on accumulating into clipped gradients that a queued step still reads."""
    with pair(tmp_path) as (plain, run):
        for ids in batches(4):
            backward_both(plain, run, ids)
            plain.take_grads()
            first = plain.norm() * 0.5
            totals = []
            for each, params in ((plain, list(plain.model.parameters())), (run, list(run.model.parameters()))):
                clip = torch.nn.utils.clip_grad_norm_ if each is plain else tz.clip_grad_norm_
                totals.append([clip(params, first), clip(params, first * 0.7), clip(params, first * 5)])
            assert all(map(same, *totals))
            plain.step()
            run.step()
            totals = [
                torch.nn.utils.clip_grad_norm_(list(plain.model.parameters()), first * 0.1),
                tz.clip_grad_norm_(run.model.parameters(), first * 0.1),
            ]
            assert same(*totals)
            backward_both(plain, run, ids)  # accumulates into what was clipped
            plain.step()
            run.step()
            plain.zero_grad()
            run.zero_grad()


@pytest.mark.parametrize("which", ["a list", "one tensor", "a generator", "nothing", "part of the model"])
def test_what_is_clipped(which: str, tmp_path: Path) -> None:
    """clip_grad_norm_ takes what torch's takes; parameters outside keep their gradients."""
    with pair(tmp_path) as (plain, run):
        backward_both(plain, run, next(batches(1)))
        totals = []
        for each, clip in ((plain, torch.nn.utils.clip_grad_norm_), (run, tz.clip_grad_norm_)):
            params = list(each.model.parameters())
            chosen = {
                "a list": params,
                "one tensor": params[3],
                "a generator": iter(params),
                "nothing": [],
                "part of the model": params[2:7],
            }[which]
            totals.append(clip(chosen, 0.01))
        assert same(*totals)
        plain.step()
        run.step()


def test_clipping_with_other_parameters(tmp_path: Path) -> None:
    """Parameters of a plain module are clipped together with the offloaded ones."""
    extra, twin = (make(lambda: nn.Linear(3, 3)) for _ in range(2))
    with pair(tmp_path) as (plain, run):
        backward_both(plain, run, next(batches(1)))
        for module in (extra, twin):
            module(torch.ones(2, 3)).pow(2).sum().backward()
        totals = [
            torch.nn.utils.clip_grad_norm_([*plain.model.parameters(), *extra.parameters()], 0.3),
            tz.clip_grad_norm_([*run.model.parameters(), *twin.parameters()], 0.3),
        ]
        assert same(*totals)
        assert all(same(a.grad, b.grad) for a, b in zip(extra.parameters(), twin.parameters(), strict=True))
        plain.step()
        run.step()


def test_clip_arguments(tmp_path: Path) -> None:
    """What is refused says so."""
    with pair(tmp_path) as (_, run):
        params = list(run.model.parameters())
        with pytest.raises(tz.TierzeroError, match="2-norm"):
            tz.clip_grad_norm_(params, 1.0, norm_type=1.0)
        for wrong in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="zero or more"):
                tz.clip_grad_norm_(params, wrong)
        assert float(tz.clip_grad_norm_(params, 1.0)) == 0.0
        loss_of(run.model, next(batches(1))).backward()
        params[2].grad.fill_(float("inf"))
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            tz.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        run.zero_grad()


def test_torch_clips_published_gradients(tmp_path: Path) -> None:
    """torch's own clip_grad_norm_ works on what is published, and clip_grad_value_ and get_total_norm too."""
    with pair(tmp_path) as (plain, run):
        for ids in batches(3):
            backward_both(plain, run, ids)
            lists = [list(each.model.parameters()) for each in (plain, run)]
            assert same(*(torch.nn.utils.clip_grad_norm_(params, 0.05) for params in lists))
            assert same(*(torch.nn.utils.clip_grad_norm_(params, 0.04, foreach=False) for params in lists))
            for params in lists:
                torch.nn.utils.clip_grad_value_(params, 0.001)
            assert same(*(torch.nn.utils.get_total_norm([p.grad for p in params]) for params in lists))
            plain.step()
            run.step()
            plain.zero_grad()
            run.zero_grad()


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


def test_zero_grad_right_after_step(tmp_path: Path) -> None:
    """Zeroing in place, by the model or the optimizer, does not change the step that is queued."""
    ways = [
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: [param.grad.zero_() for param in model.parameters()],
        lambda model, optimizer: [param.grad.copy_(torch.ones_like(param.grad)) for param in model.parameters()],
    ]
    for placement in ("host", "nvme"):
        for index, way in enumerate(ways):
            with pair(tmp_path / f"{placement}{index}", placement=placement) as (plain, run):
                for ids in batches(3):
                    backward_both(plain, run, ids)
                    plain.step(0.5)
                    run.step(0.5)
                    for each in (plain, run):
                        way(each.model, each.optimizer)


def test_gradients_edited_and_assigned(tmp_path: Path) -> None:
    """What the user does to `.grad` is what is clipped and stepped (C14)."""
    edits = {
        "halved": lambda p: p.grad.mul_(0.5),
        "through data": lambda p: p.grad.data.add_(0.25),
        "through numpy": lambda p: p.grad.numpy().__imul__(2.0) if p.dtype == torch.float32 else p.grad.mul_(2.0),
        "assigned": lambda p: setattr(p, "grad", torch.full_like(p.grad, 0.125).contiguous()),
        "assigned transposed": lambda p: setattr(
            p, "grad", (p.grad.t() * 2).contiguous().t() if p.dim() == 2 else p.grad * 2
        ),
        "swapped in": lambda p: setattr(p, "grad", p.grad.clone()),
        "removed": lambda p: setattr(p, "grad", None),
        "noise by slices": lambda p: p.grad.view(-1)[::2].sub_(0.5),
        "clamped": lambda p: p.grad.clamp_(-0.01, 0.01),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for name, edit in edits.items():
            where = f"{name} {dtype}"
            with pair(tmp_path / where, dtype=dtype) as (plain, run):
                for ids in batches(2):
                    backward_both(plain, run, ids)
                    plain.norm()
                    tz.clip_grad_norm_(run.model.parameters(), 1e9)  # the norms are known before the edit
                    for each in (plain, run):
                        for param in list(each.model.parameters())[1::2]:
                            edit(param)
                    max_norm = plain.norm() * 0.5
                    expected, total = plain.step(max_norm), run.step(max_norm)
                    assert same(expected, total), where
                    plain.zero_grad()
                    run.zero_grad()


def test_gradients_assigned_while_a_step_is_queued(tmp_path: Path) -> None:
    """New gradients put in right after step() do not disturb the step that is still on its way."""
    for placement in ("host", "nvme"):
        with pair(tmp_path / placement, placement=placement) as (plain, run):
            generator = torch.Generator().manual_seed(2)
            for _ in range(12):
                values = [torch.randn(param.shape, generator=generator) for param in plain.model.parameters()]
                for each in (plain, run):
                    for param, value in zip(each.model.parameters(), values, strict=True):
                        param.grad = value.clone()
                plain.step(0.5)
                run.step(0.5)
                plain.zero_grad()
                run.zero_grad()


def test_gradients_stay_readable(tmp_path: Path) -> None:
    """Published gradients look like torch's: values, type, arithmetic, copies and pickles."""
    with pair(tmp_path) as (plain, run):
        backward_both(plain, run, next(batches(1)))
        for mine, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
            assert isinstance(mine.grad, torch.Tensor)
            assert mine.grad.device == theirs.grad.device
            for view in (
                lambda g: g.clone(),
                lambda g: g * 2 + 1,
                lambda g: g.norm(),
                lambda g: torch.stack([g, g]),
                copy.deepcopy,
            ):
                assert same(view(mine.grad), view(theirs.grad))
            buffer = io.BytesIO()
            torch.save(mine.grad, buffer)
            assert same(torch.load(io.BytesIO(buffer.getvalue())), theirs.grad)
            assert repr(mine.grad) == repr(theirs.grad)
            assert mine.grad.tolist() == theirs.grad.tolist()
        run.zero_grad()
        plain.zero_grad()


def test_a_clipped_gradient_assigned_to_itself(tmp_path: Path) -> None:
    """`p.grad = p.grad.detach()` after clipping changes nothing."""
    with pair(tmp_path) as (plain, run):
        for ids in batches(3):
            backward_both(plain, run, ids)
            max_norm = plain.norm() * 0.3
            tz.clip_grad_norm_(run.model.parameters(), max_norm)
            for param in list(run.model.parameters())[::2]:
                param.grad = param.grad.detach()
            for param in list(run.model.parameters())[1::2]:
                param.grad = param.grad
            plain.step(max_norm)
            run.step()
            plain.zero_grad()
            run.zero_grad()


def test_gradients_that_are_kept(tmp_path: Path) -> None:
    """A gradient that somebody keeps stays what it was when the next one arrives, and is assigned back as it is."""
    with pair(tmp_path) as (plain, run):
        backward_both(plain, run, next(batches(1)))
        kept = [[param.grad for param in each.model.parameters()] for each in (plain, run)]
        for each in (plain, run):
            each.zero_grad()
        backward_both(plain, run, next(batches(1, seed=2)))
        assert all(same(mine + 0, theirs + 0) for mine, theirs in zip(*kept, strict=True))
        assert all(a.grad is not b for a, b in zip(run.model.parameters(), kept[1], strict=True))
        plain.step()
        run.step()
        for each, grads in zip((plain, run), kept, strict=True):
            for param, grad in zip(each.model.parameters(), grads, strict=True):
                param.grad = grad
        plain.step(0.5)
        run.step(0.5)
        plain.zero_grad()
        run.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_parameter_hooks(accumulate: int, tmp_path: Path) -> None:
    """register_hook and register_post_accumulate_grad_hook on parameters run as in torch."""
    with pair(tmp_path) as (plain, run):
        calls: dict[str, list[str]] = {"plain": [], "run": []}
        handles = []
        for label, each in (("plain", plain), ("run", run)):
            for name, param in list(each.model.named_parameters())[::2]:
                handles.append(
                    param.register_hook(lambda grad, label=label, name=name: (calls[label].append(name), grad * 0.5)[1])
                )
                handles.append(
                    param.register_post_accumulate_grad_hook(
                        lambda p, label=label, name=name: (calls[label].append(f"after {name}"), p.grad.mul_(2.0))[0]
                    )
                )
        train_both([("", run)], plain, 3, accumulate=accumulate)
        assert calls["plain"] == calls["run"]
        assert calls["run"]
        for handle in handles:
            handle.remove()
        train_both([("", run)], plain, 2)
        assert len(calls["run"]) == len(calls["plain"])


def test_requires_grad_toggled(tmp_path: Path) -> None:
    """Parameters frozen for a while and trained again."""
    with pair(tmp_path) as (plain, run):
        for step in range(6):
            for each in (plain, run):
                each.model.layers[1].requires_grad_(step % 3 != 1)
                each.model.embed.weight.requires_grad_(step % 2 == 0)
            train_both([(f"step {step}", run)], plain, 1, seed=step)


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
