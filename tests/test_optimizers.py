"""Torch optimizers other than AdamW, wrapped: equal bit by bit to the plain loop on float32 masters."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from oracle import HYPER, batches, loss_of, make, same, train_both
from other_optimizers import Lion, PlainOther, TieredOther, assert_same_states, fitted, other_pair, roomy, states_of
from pairs import backward_both, step_both
from torch import nn, optim

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")

MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.05}),
    "SGD momentum": (optim.SGD, {**MOMENTUM, "weight_decay": 0.01}),
    "SGD nesterov": (optim.SGD, {**MOMENTUM, "nesterov": True, "foreach": True}),
    "SGD fused": (optim.SGD, {**MOMENTUM, "dampening": 0.1, "fused": True}),
    "Adam": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True, "foreach": True}),
    "Adam fused": (optim.Adam, {"lr": 1e-2, "fused": True}),
    "AdamW": (optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "NAdam": (optim.NAdam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {"lr": 1e-2}),
    "Adamax": (optim.Adamax, {"lr": 1e-2}),
    "RMSprop": (optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "Rprop": (optim.Rprop, {"lr": 1e-3}),
    "ASGD": (optim.ASGD, {"lr": 1e-2}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 0.5}),
    "Adafactor": (optim.Adafactor, {"lr": 1e-2}),
    "Lion": (Lion, {"lr": 1e-3, "decay": 0.1}),
}
PLACES = [(torch.float32, "nvme"), (torch.bfloat16, "nvme"), (torch.bfloat16, "mixed"), (torch.float32, "host")]


@pytest.mark.parametrize("name", CASES)
def test_every_optimizer(name: str, tmp_path: Path) -> None:
    """Losses, weights, masters and states, in both dtypes and all placements, with accumulation and clipping."""
    cls, hyper = CASES[name]
    for dtype, placement in PLACES:
        where = f"{dtype} {placement}"
        with other_pair(tmp_path / where, cls, placement=placement, dtype=dtype, **hyper) as (plain, run):
            if placement == "nvme":
                assert all(unit.host_flat is None and not unit.state_host for unit in run.engine.units)
            train_both([(where, run)], plain, 3, accumulate=2, clip=lambda step, norm: norm * 0.5 if step else None)


def in_two(model: nn.Module) -> list[dict[str, Any]]:
    """Groups across units, with options of their own."""
    params = list(model.parameters())
    return [{"params": params[::2], "lr": 0.01}, {"params": params[1::2], "momentum": 0.5, "nesterov": False}]


@pytest.mark.parametrize(("dtype", "placement"), PLACES)
def test_groups_frozen_parameters_and_missing_gradients(dtype: torch.dtype, placement: str, tmp_path: Path) -> None:
    """Parameters without a gradient stay as they are, and so do frozen ones; the others follow their own group."""

    def build() -> nn.Module:
        model = Net()
        model.layers[1].requires_grad_(False)
        return model

    hyper = {"lr": 0.05, "momentum": 0.9, "nesterov": True}
    with other_pair(tmp_path, optim.SGD, placement=placement, dtype=dtype, factory=build, groups=in_two, **hyper) as (
        plain,
        run,
    ):
        schedulers = [optim.lr_scheduler.OneCycleLR(each.optimizer, 0.1, total_steps=9) for each in (plain, run)]
        for step, ids in enumerate(batches(7)):
            backward_both(plain, run, ids)
            for each in (plain, run):
                for index, param in enumerate(each.model.parameters()):
                    if (index + step) % 3 == 0:
                        param.grad = None
            max_norm = plain.norm() * 0.5 if step % 2 else None
            total, own = plain.step(max_norm), run.step(max_norm)
            assert total is None or same(total, own)
            for each, scheduler in zip((plain, run), schedulers, strict=True):
                each.zero_grad()
                scheduler.step()
        assert_same_states(run, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_beside_adamw(dtype: torch.dtype, tmp_path: Path) -> None:
    """The usual recipe: matrices by Muon, all else by AdamW, in the same units; then a snapshot of both."""

    def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        params = list(model.parameters())
        return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]

    def both(model: nn.Module) -> list[optim.Optimizer]:
        return [tz.wrap_optimizer(optim.Muon, split(model)[0], lr=1e-2), tz.AdamW(split(model)[1], **HYPER)]

    def train(steps: int, tiered: nn.Module, plain: PlainOther, theirs: list[Any], mine: list[Any]) -> None:
        for ids in batches(steps, steps):
            expected, value = loss_of(plain.model, ids), loss_of(tiered, ids)
            assert same(expected, value)
            expected.backward()
            value.backward()
            plain.take_grads()
            for optimizer in theirs + mine:
                optimizer.step()
            with torch.no_grad():
                for param, master in plain.masters.items():
                    param.copy_(master)
            plain.zero_grad()
            tiered.zero_grad()
        for param, expected in zip(tiered.parameters(), plain.model.parameters(), strict=True):
            assert same(param.read(), expected)

    for placement in ("nvme", "host"):
        plain = PlainOther(make(Net, dtype), optim.SGD, **MOMENTUM)
        masters = [[plain.masters[p] for p in part] for part in split(plain.model)]
        theirs = [optim.Muon(masters[0], lr=1e-2), optim.AdamW(masters[1], fused=True, **HYPER)]
        ours = make(Net, dtype)
        tiers = roomy(ours, placement, tmp_path / placement)
        tz.offload(ours, tiers)
        try:
            mine = both(ours)
            train(4, ours, plain, theirs, mine)
            if placement == "nvme":
                tz.snapshot(ours, mine, "both")
        finally:
            tz.close(ours)
        if placement == "nvme":
            again = make(Net, dtype, seed=5)
            tz.offload(again, tiers, resume="both")
            try:
                mine = both(again)
                tz.restore(again, mine)
                train(3, again, plain, theirs, mine)
            finally:
                tz.close(again)


@pytest.mark.parametrize(("dtype", "placement"), [case for case in PLACES if case[1] != "host"])
@pytest.mark.parametrize("cls", [optim.Adam, Lion])
def test_snapshot_and_resume(cls: Any, dtype: torch.dtype, placement: str, tmp_path: Path) -> None:
    """A snapshot holds masters and states of whatever kind; a later one writes only what changed."""
    plain = PlainOther(make(Net, dtype), cls, lr=1e-2)
    run = fitted(lambda: make(Net, dtype), placement, tmp_path, cls, lr=1e-2)
    tiers = run.engine.tiers
    for _ in range(2):
        try:
            train_both([("", run)], plain, 3)
            run.optimizer.param_groups[0]["lr"] = plain.optimizer.param_groups[0]["lr"] = 5e-3
            tz.snapshot(run.model, run.optimizer, "here", {"step": 3})
            before = run.engine.metrics.nvme_written_expected
            tz.snapshot(run.model, run.optimizer, "here", {"step": 3})
            assert run.engine.metrics.nvme_written_expected == before
        finally:
            run.engine.close()
        run = fitted(lambda: make(Net, dtype, seed=3), tiers, tmp_path, cls, resume=True, lr=1e-2)
        assert tz.restore(run.model, run.optimizer) == {"step": 3}
        assert_same_states(run, plain)
    run.engine.close()
    with pytest.raises(tz.TierzeroError, match="resume with the optimizer that wrote the snapshot"):
        TieredOther(make(Net, dtype), tiers, optim.RAdam, resume=True)


@pytest.mark.parametrize(("dtype", "placement"), PLACES)
def test_state_dict(dtype: torch.dtype, placement: str, tmp_path: Path) -> None:
    """To the torch class and back, through torch.save and without it, and into another engine with its masters."""
    with other_pair(tmp_path / "a", optim.RMSprop, placement=placement, dtype=dtype, momentum=0.5) as (plain, run):
        train_both([("", run)], plain, 2)
        theirs = optim.RMSprop(list(plain.masters.values()), momentum=0.5)
        theirs.load_state_dict(run.optimizer.state_dict())
        for master in plain.masters.values():
            for key, value in plain.optimizer.state[master].items():
                assert type(theirs.state[master][key]) is torch.Tensor
                assert same(theirs.state[master][key], value)
        buffer = io.BytesIO()
        torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, buffer)
        saved = torch.load(io.BytesIO(buffer.getvalue()))
        other = fitted(lambda: make(Net, dtype, seed=9), "nvme", tmp_path / "b", optim.RMSprop, momentum=0.5)
        try:
            other.model.load_state_dict(saved["model"])
            other.optimizer.load_state_dict(saved["optimizer"])
            assert_same_states(other, plain)
            train_both([("first", run), ("second", other)], plain, 2, seed=5)
            other.optimizer.load_state_dict(plain.optimizer.state_dict())  # torch's own: the masters stay
            assert_same_states(other, plain)
            train_both([("first", run), ("second", other)], plain, 2, seed=6)
            assert_same_states(other, plain)
        finally:
            other.engine.close()


def test_closure_groups_and_hooks(tmp_path: Path) -> None:
    """A closure's loss comes back, groups can be added, hooks are called, it is an Optimizer and says what it wraps."""
    only = lambda model: [{"params": list(model.layers[0].parameters())}]
    with other_pair(tmp_path, optim.SGD, groups=only, **MOMENTUM) as (plain, run):
        optimizer = run.optimizer
        assert isinstance(optimizer, optim.Optimizer)
        assert repr(optimizer).startswith("wrap_optimizer(SGD) (")
        assert optimizer.defaults == plain.optimizer.defaults
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
        optimizer.register_step_post_hook(lambda *args: seen.append("after"))
        step_both(plain, run, next(batches(1)))
        run.model.zero_grad()
        assert seen == ["before", "after"]
        for each in (plain, run):
            params = list(each.model.head.parameters()) + list(each.model.layers[2].parameters())
            params = [plain.masters[p] for p in params] if each is plain else params
            each.optimizer.add_param_group({"params": params, "lr": 5e-3})
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [run.model.head.weight]})
        assert [g["lr"] for g in optimizer.param_groups] == [0.05, 5e-3]
        for ids in batches(3, seed=3):
            expected = loss_of(plain.model, ids)
            expected.backward()
            plain.step()
            plain.zero_grad()

            def closure(ids: torch.Tensor = ids) -> torch.Tensor:
                run.model.zero_grad()
                loss = loss_of(run.model, ids)
                loss.backward()
                return loss

            assert same(optimizer.step(closure), expected)
        optimizer.zero_grad(set_to_none=False)
        assert all(not param.grad.any() for group in optimizer.param_groups for param in group["params"])
        run.model.zero_grad()
        for copying in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(tz.TierzeroError, match=r"save optimizer\.state_dict\(\)"):
                copying(optimizer)
        with pytest.raises(tz.TierzeroError, match="cannot be assigned"):
            optimizer.state = {}


def test_another_optimizer_starts_anew(tmp_path: Path) -> None:
    """As in torch: with its own state, from the masters as they are."""
    tiers = roomy(make(Net, torch.bfloat16), "nvme", tmp_path)
    with other_pair(tmp_path, optim.SGD, placement=tiers, dtype=torch.bfloat16, **MOMENTUM) as (plain, run):
        train_both([("", run)], plain, 2)
        for cls in (optim.Adam, optim.Adam, optim.RMSprop):
            plain.optimizer = cls(list(plain.masters.values()), lr=1e-3)
            run.optimizer = tz.wrap_optimizer(cls, run.model.parameters(), lr=1e-3)
            train_both([(cls.__name__, run)], plain, 2)
        plain.optimizer = optim.AdamW(list(plain.masters.values()), fused=True, **HYPER)
        run.optimizer = tz.AdamW(run.model.parameters(), **HYPER)
        train_both([("AdamW", run)], plain, 2)
        plain.optimizer = optim.SGD(list(plain.masters.values()), **MOMENTUM)
        run.optimizer = tz.wrap_optimizer(optim.SGD, run.model.parameters(), **MOMENTUM)
        train_both([("AdamW", run)], plain, 2)


def test_named_parameters(tmp_path: Path) -> None:
    """Their names reach the class and the state dict."""
    named = lambda model: list(model.named_parameters())[::2]
    seen: set[str] = set()

    class Reading(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.update(name for group in self.param_groups for name in group.get("param_names", ()))
            return super().step(closure)

    model, plain = make(Net), make(Net)
    theirs = Reading(named(plain), **MOMENTUM)
    tz.offload(model, roomy(model, "nvme", tmp_path))
    try:
        mine = tz.wrap_optimizer(Reading, named(model), **MOMENTUM)
        for ids in batches(3):
            for each, optimizer in ((plain, theirs), (model, mine)):
                loss_of(each, ids).backward()
                optimizer.step()
                each.zero_grad()
        assert mine.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
        assert all(same(a.read(), b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        assert seen == {name for name, _ in named(plain)}
    finally:
        tz.close(model)


def test_masters_follow_changed_parameters(tmp_path: Path) -> None:
    """Values written from outside between steps are the new masters."""
    with other_pair(tmp_path, optim.SGD, dtype=torch.bfloat16, **MOMENTUM) as (plain, run):
        train_both([("", run)], plain, 2)
        with torch.no_grad(), tz.unsharded(run.model.head, write=True):
            run.model.head.weight.mul_(0.5)
        with torch.no_grad():
            plain.model.head.weight.mul_(0.5)
            plain.masters[plain.model.head.weight].copy_(plain.model.head.weight)
        train_both([("", run)], plain, 2)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_non_finite_gradients(placement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bad step changes no byte; too many in a row are an error."""
    with other_pair(tmp_path, optim.Adam, placement=placement, dtype=torch.bfloat16) as (plain, run):
        train_both([("", run)], plain, 2)
        run.optimizer.max_skipped_steps = 2
        before = states_of(run)
        for index in range(2):
            loss_of(run.model, next(batches(1))).backward()
            run.model.head.weight.grad[0, 0] = float("nan")
            with caplog.at_level(logging.WARNING, "tierzero"):
                if index:
                    with pytest.raises(tz.NonFiniteGradientError, match=r"2 steps in a row.*head\.weight"):
                        run.optimizer.step()
                else:
                    run.optimizer.step()
            run.zero_grad()
            after = states_of(run)
            assert all(same(before[key], after[key]) for key in before)
        assert "the gradient of head.weight is not finite" in caplog.text
        assert tz.stats(run.model)["skipped_steps"] == 2
        train_both([("", run)], plain, 1)


def test_an_update_that_fails_has_changed_nothing(tmp_path: Path) -> None:
    """What the class raises comes out of the next use, and the update is done again then."""
    failing = [False]

    class Moody(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if failing[0]:
                raise ValueError("not now")
            return super().step(closure)

    with other_pair(tmp_path, Moody, dtype=torch.bfloat16, **MOMENTUM) as (plain, run):
        for ids in batches(3):
            backward_both(plain, run, ids)
            plain.step()
            failing[0] = True
            run.step()
            with pytest.raises(ValueError, match="not now"):
                tz.synchronize(run.model)
            failing[0] = False
            plain.zero_grad()
            run.zero_grad()
