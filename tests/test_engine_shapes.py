"""Ways of using modules: every one equal to the plain loop bit by bit, in every placement."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import DIM, VOCAB, Block, Net
from oracle import Plain, assert_same, batches, check, loss_of, make, same, tiered, tiers_for, train_both
from torch import nn
from torch.utils.checkpoint import checkpoint

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")

MORE_SHAPES = {
    "checkpoint inside the block": lambda: Net(block=models.InnerCheckpointBlock),
    "lora under checkpointing": lambda: models.CheckpointedLoRA(reentrant=False),
    "lora under reentrant checkpointing": lambda: models.CheckpointedLoRA(reentrant=True),
    "experts": models.Mixture,
    "views and in-place": models.InPlace,
    "residuals": models.Residual,
    "hidden states": models.HiddenStates,
    "dropout": models.Dropout,
    "batch norm": models.BatchNormed,
    "one block 12 times": lambda: models.Shared(12),
    "one block 12 times, checkpointed": lambda: models.Shared(12, "non-reentrant"),
    "one block 12 times, checkpointed reentrant": lambda: models.Shared(12, "reentrant"),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("shape", MORE_SHAPES)
def test_shapes(shape: str, accumulate: int, tmp_path: Path) -> None:
    """More ways to build a model (M5, M9, M12, M23)."""
    check(MORE_SHAPES[shape], tmp_path, accumulate=accumulate, clip=lambda step, norm: 0.7 * norm if step % 2 else None)


UNITS: dict[str, Any] = {
    "every linear": lambda model: nn.Linear,
    "blocks and their linears": lambda model: (Block, nn.Linear),
    "one module": lambda model: [model.layers[1]],
    "by name": lambda model: lambda name, module: name.endswith(("up", "norm")),
    "the root alone": lambda model: [model],
}


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("shape", ["plain", "tied", "checkpoint", "block twice"])
def test_units(shape: str, units: str, tmp_path: Path) -> None:
    """Units as the user cuts them, nested ones too."""
    check(models.SHAPES[shape], tmp_path, steps=3, units=UNITS[units])


def two_forwards(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return loss_of(model, ids) + 0.3 * loss_of(model, ids.flip(0))


def policy_and_reference(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        reference = model(ids).float()
    return loss_of(model, ids) + 0.1 * F.mse_loss(model(ids).float(), reference + 0.01)


def evaluation_before(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        first = loss_of(model, ids)
    with torch.inference_mode():
        second = loss_of(model, ids)
    model.train()
    with torch.no_grad():
        third = loss_of(model, ids)  # in train mode without gradients
    return loss_of(model, ids) * (1 + 0 * float(first + second + third))


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


@pytest.mark.parametrize("shape", ["plain", "checkpoint", "tied", "lora"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_loops(loss: Any, shape: str, tmp_path: Path) -> None:
    """Several forwards, evaluation and generation around a backward (M6, M16, M17, N10)."""
    dtypes = [torch.float32] if loss is under_autocast else [torch.float32, torch.bfloat16]
    factory = models.SHAPES["plain" if loss is parts_called_by_hand and shape == "tied" else shape]
    check(factory, tmp_path, loss=loss, dtypes=dtypes, accumulate=2)


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


class PositionTable(nn.Module):
    """Returns rows of its own parameter: a view."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, DIM))

    def forward(self, length: int) -> torch.Tensor:
        return self.table[:length]


class WholeWeight(nn.Module):
    """Returns its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM))

    def forward(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}


class ViewsOfWeights(Net):
    """Uses weights that other modules hand out."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = PositionTable()
        self.table = WholeWeight()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions, weight = self.positions(ids.shape[1]), self.table()["weight"]
        h = self.body(self.embed(ids) + positions) + positions * 0.5
        return self.head(h) + F.linear(h, weight) * 2.0 + F.linear(h * h, weight)


def test_weights_handed_out(tmp_path: Path) -> None:
    """A module that returns its weight, or a view of it, stays right after the weight has left."""
    check(
        ViewsOfWeights,
        tmp_path,
        accumulate=2,
        units=lambda model: [*model.layers, model.positions, model.table, model.embed, model.head],
    )


class Listed(nn.Module):
    """Parameters in lists and dicts at the top of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(DIM, DIM) / 3) for _ in range(3)])
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.ones(DIM)), "shift": nn.Parameter(torch.zeros(DIM))})
        self.branches = nn.ModuleDict({"left": nn.Linear(DIM, DIM), "right": Block()})
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for matrix in self.matrices:
            h = torch.tanh(h @ matrix)
        h = h * self.named["gain"] + self.named["shift"]
        return self.head(self.branches["right"](h) + self.branches["left"](h))


class Attention(nn.Module):
    """torch's own attention at the top of the model: it uses its projection's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.head(h + self.attention(h, h, h, need_weights=False)[0])


class Encoder(nn.Module):
    """torch's own transformer stack."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids)))


class Parametrized(Net):
    """weight_norm, parametrizations and recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.utils.parametrizations.weight_norm(layer.up)
            nn.utils.parametrizations.orthogonal(layer.down)
        self.recurrent = nn.GRU(DIM, DIM, batch_first=True)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        return self.recurrent(super().body(h))[0]


class OldWeightNorm(Net):
    """The old weight_norm, a forward pre-hook that reads parameters."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.utils.weight_norm(layer.up)
        nn.utils.spectral_norm(self.head)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "factory", [Listed, Attention, Encoder, Parametrized, OldWeightNorm], ids=lambda factory: factory.__name__
)
def test_containers_and_parametrizations(factory: Any, tmp_path: Path) -> None:
    """ParameterList, MultiheadAttention, TransformerEncoder, weight_norm, parametrizations, GRU (M2)."""
    dtypes = [torch.float32] if factory in (Parametrized, OldWeightNorm) else [torch.float32, torch.bfloat16]
    check(factory, tmp_path, dtypes=dtypes, loss=evaluation_before)


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


def test_large_parameters_on_two_threads(two_threads: None, tmp_path: Path) -> None:
    """Chunks, threads and norms of parameters larger than one chunk, in sizes that no vector divides (F6, F7, C10)."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 5)
            self.layers = nn.ModuleList([nn.Linear(5, 60013), nn.Linear(60013, 5), nn.Linear(5, 131)])
            self.head = nn.Linear(131, VOCAB)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.embed(ids)
            for layer in self.layers:
                h = torch.tanh(layer(h))
            return self.head(h)

    check(Wide, tmp_path, steps=3, clip=lambda step, norm: 0.5 * norm)
