"""Ways of using a model in a loop: every one equal to the plain loop bit by bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import DIM, VOCAB, Net
from oracle import Plain, assert_same, batches, check, loss_of, make, same, tiered, tiers_for, train_both
from pairs import evaluation_before
from torch import nn
from torch.utils.checkpoint import checkpoint

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


def two_forwards(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return loss_of(model, ids) + 0.3 * loss_of(model, ids.flip(0))


def policy_and_reference(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        reference = model(ids).float()
    return loss_of(model, ids) + 0.1 * F.mse_loss(model(ids).float(), reference + 0.01)


def generation_between(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    tokens = ids[:1, :2]
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return loss_of(model, torch.cat([ids, tokens[:, : ids.shape[1]]]))


def grad_left_unused(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss_of(model, ids)  # a graph that nobody runs backward
    return loss_of(model, ids)


def parts_called_by_hand(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    h = model.embed(ids)
    for layer in model.layers:
        h = layer(h)
    return F.cross_entropy(model.head(h).float().flatten(0, 1), ids.flatten())


def under_autocast(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, ids)


def gradients_switched_on_inside(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.enable_grad():
        return loss_of(model, ids)


LOSSES = [
    two_forwards,
    policy_and_reference,
    evaluation_before,
    generation_between,
    grad_left_unused,
    parts_called_by_hand,
    under_autocast,
    gradients_switched_on_inside,
]


LOOPED = ["plain", "checkpoint", "tied", "lora"]


@pytest.mark.parametrize("shape", LOOPED)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_loops(loss: Any, shape: str, tmp_path: Path) -> None:
    """Several forwards, evaluation and generation around a backward (M6, M16, M17, N10): every three of loop, shape,
    dtype and placement together.
    """
    dtypes = [torch.float32] if loss is under_autocast else [torch.float32, torch.bfloat16]
    factory = models.SHAPES["plain" if loss is parts_called_by_hand and shape == "tied" else shape]
    turn = None if loss is under_autocast else LOSSES.index(loss) + LOOPED.index(shape)
    check(factory, tmp_path, loss=loss, dtypes=dtypes, accumulate=2, turn=turn)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("shape", ["plain", "checkpoint", "block twice", "dicts"])
def test_two_backwards_of_one_graph(shape: str, placement: str, tmp_path: Path) -> None:
    """retain_graph: gradients of both backwards add up (M7)."""
    plain = Plain(make(models.SHAPES[shape]))
    model = copy.deepcopy(plain.model)
    with tiered(model, tiers_for(model, placement, tmp_path)) as run:
        for ids in batches(4):
            for each in (plain, run):
                loss = loss_of(each.model, ids)
                loss.backward(retain_graph=True)
                (loss * 0.5).backward()
            assert_same(run, plain, grads=True)
            plain.step()
            run.step()
            plain.zero_grad()
            run.zero_grad()
        assert_same(run, plain)


@pytest.mark.parametrize("placement", ["host", "nvme", "mixed"])
def test_random_branches(placement: str, tmp_path: Path) -> None:
    """Two hundred steps through random blocks; the pools are empty afterwards and waste is counted (M8)."""
    plain = Plain(make(models.RandomBranch))
    model = copy.deepcopy(plain.model)
    spare = 3 * 4096
    with tiered(model, tiers_for(model, placement, tmp_path, spare=spare)) as run:
        train_both([(placement, run)], plain, 200)
        assert_same(run, plain)
        run.check_pools()
        stats = tz.stats(model)
        assert stats["departures"] > 0
        assert stats["prefetch_wasted"] <= stats["prefetched"]


@pytest.mark.parametrize("depth", [0, 1, 3, "auto"])
def test_prefetch_depth_changes_nothing(depth: int | str, tmp_path: Path) -> None:
    """Any depth and any spare memory give the same bits."""
    for spare in (0, 4096, 1 << 20):
        plain = Plain(make(Net))
        model = copy.deepcopy(plain.model)
        tiers = tiers_for(model, "nvme", tmp_path / str(spare), spare=spare)
        tiers = tz.Tiers(tiers.nvme, tiers.host, tiers.device, prefetch=depth, compute="cpu")
        with tiered(model, tiers) as run:
            train_both([("", run)], plain, 6, accumulate=2)
            assert_same(run, plain)
            if depth == 0:
                assert tz.stats(model)["prefetched"] == 0


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_inputs_that_require_gradients(placement: str, tmp_path: Path) -> None:
    """The gradient of a leaf input is the plain one, and no hook stays on it."""
    plain = Plain(make(Net))
    model = copy.deepcopy(plain.model)
    mine, theirs = (
        torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in range(2)
    )
    with tiered(model, tiers_for(model, placement, tmp_path)) as run:
        for _ in range(4):
            for each, x in ((plain, theirs), (run, mine)):
                (each.model.head(each.model.body(x)) ** 2).mean().backward()
            assert same(mine.grad, theirs.grad)
            assert_same(run, plain, grads=True)
            assert not mine._backward_hooks
        for _ in range(3):
            with torch.no_grad():
                model.head(model.body(mine))
            model.head(model.body(mine))
        model(next(batches(1)))
        tz.reset(model)
        assert not mine._backward_hooks


def test_two_models_share_an_activation(tmp_path: Path) -> None:
    """Hooks of one model do not fire for the other (M11)."""
    shared = nn.Sequential(nn.ReLU(), nn.Dropout(0.2))

    def build() -> nn.Module:
        model = Net()
        model.layers = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), shared) for _ in range(2)])
        return model

    ours = [make(build, seed=seed) for seed in (0, 1)]
    plains = [Plain(copy.deepcopy(model)) for model in ours]
    for model in ours:
        assert model.layers[0][1] is shared
    with (
        tiered(ours[0], tiers_for(ours[0], "nvme", tmp_path / "a")) as first,
        tiered(ours[1], tiers_for(ours[1], "host", tmp_path / "b")) as second,
    ):
        for step in range(4):
            for run, plain in ((first, plains[0]), (second, plains[1])):
                train_both([(f"step {step}", run)], plain, 1, seed=step)
        assert_same(first, plains[0])
        assert_same(second, plains[1])


def test_one_loss_through_two_models(tmp_path: Path) -> None:
    """Two offloaded models in one graph, like a policy and a critic."""
    ours = [make(Net, seed=seed) for seed in (0, 1)]
    plains = [Plain(copy.deepcopy(model)) for model in ours]
    with (
        tiered(ours[0], tiers_for(ours[0], "nvme", tmp_path / "a")) as first,
        tiered(ours[1], tiers_for(ours[1], "mixed", tmp_path / "b")) as second,
    ):
        for ids in batches(5):
            values = []
            for pair in (plains, (first, second)):
                a, b = (each.model(ids) for each in pair)
                values.append((a * b.detach() + a.tanh() * b).pow(2).mean())
                values[-1].backward()
                for each in pair:
                    each.step(0.5)
                    each.zero_grad()
            assert same(*values)
        assert_same(first, plains[0])
        assert_same(second, plains[1])


def test_copies_share_nothing(tmp_path: Path) -> None:
    """A deep copy of an offloaded model is a plain model with its values, whose forwards leave the engine alone."""
    plain = Plain(make(Net))
    model = copy.deepcopy(plain.model)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        train_both([("", run)], plain, 2)
        copied = copy.deepcopy(model)
        used = tz.stats(model)["hits"] + tz.stats(model)["misses"]
        for (name, param), twin in zip(plain.model.named_parameters(), copied.parameters(), strict=True):
            assert isinstance(twin, nn.Parameter), name
            assert twin.requires_grad == param.requires_grad
            assert same(twin, param), name
        ids = next(batches(1))
        loss = loss_of(copied, ids)
        loss.backward()
        assert same(loss, loss_of(plain.model, ids))
        assert all(param.grad is not None for param in copied.parameters())
        assert tz.stats(model)["hits"] + tz.stats(model)["misses"] == used
        train_both([("", run)], plain, 2)
        assert_same(run, plain)


class Recursive(Net):
    """Calls itself."""

    def forward(self, ids: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth == 0:
            return self.head(self.body(self.embed(ids)))
        return self.head.weight.sum() * 0.01 + self(ids, depth - 1) + self.layers[0](self.embed(ids)).sum() * 0.01


def test_models_that_call_themselves(tmp_path: Path) -> None:
    """A forward of the root inside a forward of the root."""

    class Own(Recursive):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(VOCAB))

        def forward(self, ids: torch.Tensor, depth: int = 2) -> torch.Tensor:
            if depth == 0:
                return self.head(self.body(self.embed(ids))) * self.scale
            return self(ids, depth - 1) * self.scale

    check(Own, tmp_path)


def test_registered_methods(tmp_path: Path) -> None:
    """`generate` and `encode` use parameters of their own around whole forwards."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * self.temperature

        def generate(self, ids: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                scaled = self(ids)[:, -1:] / self.temperature
                ids = torch.cat([ids, scaled.argmax(-1)], 1)
            return ids

        def encode(self, ids: torch.Tensor) -> torch.Tensor:
            return self.body(self.embed(ids)) * self.temperature

        def fail(self) -> None:
            assert self.temperature > 0
            raise ValueError("on purpose")

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            longer = model.generate(ids)
        with pytest.raises(ValueError, match="on purpose"):
            model.fail()
        return loss_of(model, longer) + model.encode(ids).float().pow(2).mean()

    plain = Plain(make(Model))
    model = copy.deepcopy(plain.model)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        for name in ("generate", "encode", "fail"):
            tz.register_forward_method(model, name)
        with pytest.raises(tz.TierzeroError, match="no method 'nothing'"):
            tz.register_forward_method(model, "nothing")
        train_both([("", run)], plain, 3, loss=loss)
        assert_same(run, plain)


class Energy(Net):
    """Computes a gradient inside its own forward, under no_grad too."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            h = self.embed(ids).detach().requires_grad_()
            (force,) = torch.autograd.grad(self.body(h).pow(2).mean(), h)
        return self.head(self.body(self.embed(ids)) - force.detach())


@pytest.mark.parametrize("units", [None, lambda model: [model]], ids=["blocks", "root"])
def test_gradients_inside_forward(units: Any, tmp_path: Path) -> None:
    """autograd.grad inside forward, with gradients switched on under no_grad."""
    check(Energy, tmp_path, units=units, loss=policy_and_reference)


def test_checkpoint_around_everything(tmp_path: Path) -> None:
    """Checkpointing of several units at once, and nested."""

    class Nested(Net):
        def pair(self, h: torch.Tensor) -> torch.Tensor:
            h = checkpoint(self.layers[0], h, use_reentrant=False)
            return self.layers[1](h)

        def body(self, h: torch.Tensor) -> torch.Tensor:
            h = checkpoint(self.pair, h, use_reentrant=False)
            return self.layers[2](h)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, self.embed(ids), use_reentrant=False))

    check(Nested, tmp_path, accumulate=2)


def test_saved_tensor_hooks_of_the_user(tmp_path: Path) -> None:
    """A user's saved-tensor hooks see activations as before, and never a weight that may be gone."""
    seen = []

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.shape), t.clone())[1], lambda t: t):
            return loss_of(model, ids)

    check(Net, tmp_path, loss=loss, steps=3)
    assert seen


def test_functional_call(tmp_path: Path) -> None:
    """torch.func.functional_call overrides parameters of a unit for one call."""
    plain = Plain(make(Net))
    model = copy.deepcopy(plain.model)
    override = {"layers.1.up.weight": torch.full((2 * DIM, DIM), 0.25), "head.weight": torch.full((VOCAB, DIM), 0.5)}
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        ids = next(batches(1))
        results = [torch.func.functional_call(each, override, (ids,)) for each in (plain.model, model)]
        assert same(*results)
        train_both([("", run)], plain, 2)
        assert_same(run, plain)
