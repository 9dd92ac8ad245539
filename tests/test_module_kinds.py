"""torch's own kinds of modules, parameters and buffers: each equal to the plain loop, or refused with a sentence."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import DIM, VOCAB, Block, CheckpointedReentrant, Net
from oracle import Plain, assert_same, batches, loss_of, make, same, tiered, tiers_for, train_both
from pairs import evaluation_before, pair
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class Recurrent(Net):
    """torch keeps lists of these modules' weights besides the registered ones."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(DIM, DIM, batch_first=True, **options) for _ in range(2)])
        self.top = kind(DIM, DIM, batch_first=True, **options)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h)[0]
        return self.top(h)[0]


class Bilinear(Block):
    """A bilinear form, and a bag of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(DIM, DIM, DIM)
        self.bag = nn.EmbeddingBag(7, DIM, mode="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        bag = self.bag(torch.arange(6).view(1, 6)[:, : x.shape[1]])
        return x + torch.tanh(self.form(x, self.inner(x))) + bag[:, None]


class OtherDtypes(Block):
    """Buffers in dtypes of their own, persistent or not; frozen complex, integer and boolean parameters; scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(DIM, dtype=torch.float64) / 7, persistent=False)
        self.register_buffer("calls", torch.tensor(0))
        self.filter = nn.Parameter(torch.randn(DIM, dtype=torch.complex64), requires_grad=False)
        self.codes = nn.Parameter(torch.randint(-5, 5, (DIM, DIM), dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False] * (DIM // 2)), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        turned = torch.fft.ifft(torch.fft.fft(x.float()) * self.filter).real.to(x.dtype)
        coded = (x @ self.codes.to(x.dtype)) * 0.01 * self.mask
        wave = torch.cos(self.frequencies).to(x.dtype) * self.calls
        return x + self.inner(x) * self.scale + turned + coded + wave + self.nothing.sum()


class ComplexTrained(Block):
    """A complex parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(DIM, dtype=torch.complex64))


class FakeQuantised(Block):
    """Weights are rounded in forward, as quantisation-aware training does."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.fake_quantize_per_tensor_affine(self.up.weight, 0.1, 0, -128, 127)
        return self.down(F.gelu(F.linear(self.norm(x), weight, self.up.bias)))


class Pruned(Net):
    """Pruning computes `weight` before each forward from a parameter and a mask."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            prune.l1_unstructured(layer.up, "weight", 0.5)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "LSTM, two layers, both ways": lambda: Recurrent(nn.LSTM, num_layers=2, proj_size=DIM // 2, bidirectional=True),
    "GRU": lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.2),
    "RNN": lambda: Recurrent(nn.RNN),
    "bilinear": lambda: Net(block=Bilinear),
    "fake quantised": lambda: Net(block=FakeQuantised),
    "pruned": Pruned,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, tmp_path: Path) -> None:
    """Recurrent layers with their lists of weights, bilinear forms, bags, fake quantisation, pruning."""
    placement = "host" if kind == "GRU" else "nvme"
    with pair(tmp_path, KINDS[kind], placement) as (plain, run):
        train_both([(kind, run)], plain, 3, accumulate=2, loss=evaluation_before)


def make_mixed(dtype: torch.dtype) -> nn.Module:
    """The floating parameters in `dtype`, everything else as its code asks for."""
    torch.manual_seed(0)
    model = Net(block=OtherDtypes)
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_and_parameters_in_their_own_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """What its code made float64, int64, complex, int8 or bool stays that (C23, M20, M21)."""
    plain, model = Plain(make_mixed(dtype)), make_mixed(dtype)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        train_both([("", run)], plain, 3)
        assert_same(run, plain)
        block: Any = model.layers[0]
        assert block.frequencies.dtype == torch.float64
        assert "layers.0.frequencies" not in model.state_dict()
        assert block.codes.dtype == torch.int8
        assert int(block.calls) == 3


def test_complex_parameters_that_are_trained(tmp_path: Path) -> None:
    """Refused with a sentence before anything is moved."""
    model = Net(block=ComplexTrained)
    with pytest.raises((tz.TierzeroError, ValueError), match=r"layers\.0\.filter.*complex64"):
        tz.offload(model, tz.Tiers(nvme=tmp_path, host="64MiB", device="64MiB", compute="cpu"))
    loss_of(model, next(batches(1))).backward()


@pytest.mark.parametrize("overlap", ["eager", "deferred"])
@pytest.mark.parametrize("placement", ["host", "nvme", "mixed"])
@pytest.mark.parametrize("dim", [1, 3, 10])
def test_the_smallest_models(dim: int, placement: str, overlap: str, tmp_path: Path) -> None:
    """Hidden sizes of 1, 3 and 10, scalars and empty tensors in every tier, stepped early or late (M20, M21)."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, dim)
            self.layers = nn.ModuleList([Block(dim) for _ in range(2)])
            self.head = nn.Linear(dim, VOCAB)
            self.scale, self.nothing = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.embed(ids)
            for layer in self.layers:
                h = layer(h)
            return self.head(h) * self.scale + self.nothing.sum()

    dtype = torch.bfloat16 if dim == 3 else torch.float32
    plain, model = Plain(make(Small, dtype)), make(Small, dtype)
    with tiered(model, tiers_for(model, placement, tmp_path), overlap=overlap) as run:
        train_both([("", run)], plain, 3, clip=lambda step, norm: 0.5 * norm if step == 1 else None)
        assert_same(run, plain)


def test_parameters_over_the_same_memory(tmp_path: Path) -> None:
    """Two trained parameters that overlap are refused by name; disjoint parts of a buffer, and frozen ones, work."""

    class Views(Block):
        def __init__(self, first: int) -> None:
            super().__init__()
            whole = torch.randn(2 * DIM)
            self.one = nn.Parameter(whole[:DIM])
            self.two = nn.Parameter(whole[first : first + DIM])
            table = torch.randn(DIM, 4)
            self.left, self.right = nn.Parameter(table[:, :2]), nn.Parameter(table[:, 2:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * self.one + self.two + (self.left * self.right).sum(1)

    tiers = tz.Tiers(nvme=tmp_path / "a", host="64MiB", device="64MiB", compute="cpu")
    with pytest.raises(tz.TierzeroError, match=r"layers\.0\.one and layers\.0\.two are different parameters"):
        tz.offload(make(lambda: Net(block=lambda: Views(DIM - 1))), tiers)
    with pair(tmp_path / "b", lambda: Net(block=lambda: Views(DIM))) as (plain, run):
        train_both([("", run)], plain, 2)
    frozen = make(lambda: Net(block=lambda: Views(DIM - 1)))
    for layer in frozen.layers:  # type: ignore[union-attr]
        layer.one.requires_grad_(False)
        layer.two.requires_grad_(False)
    with tiered(frozen, tiers):
        loss_of(frozen, next(batches(1))).backward()
        frozen.zero_grad()


def test_lazy_modules(tmp_path: Path) -> None:
    """Before their first forward they are refused by name; afterwards they train."""

    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.LazyLinear(DIM)

        def body(self, h: torch.Tensor) -> torch.Tensor:
            return self.late(super().body(h))

    tiers = tz.Tiers(nvme=tmp_path / "a", host="64MiB", device="64MiB", compute="cpu")
    with pytest.raises(tz.TierzeroError, match=r"late\.weight is an UninitializedParameter.*before offload"):
        tz.offload(make(Lazy), tiers)

    def ready() -> nn.Module:
        model = Lazy()
        model(torch.zeros(1, 1, dtype=torch.long))
        return model

    with pair(tmp_path / "b", ready) as (plain, run):
        train_both([("", run)], plain, 2)


def test_the_fast_path_of_attention(tmp_path: Path) -> None:
    """In evaluation torch fuses nn.MultiheadAttention and nn.TransformerEncoder where it may: values are as without."""

    class Encoder(Net):
        def __init__(self) -> None:
            super().__init__()
            kind = lambda: nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.1, batch_first=True)
            self.layers = nn.ModuleList([kind() for _ in range(2)])
            self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

        def body(self, h: torch.Tensor) -> torch.Tensor:
            h = super().body(h)
            return h + self.attention(h, h, h)[0]

    with pair(tmp_path, Encoder) as (plain, run):
        train_both([("", run)], plain, 2)
        plain.model.eval()
        run.model.eval()
        with torch.no_grad():
            results = [each.model(next(batches(1))) for each in (plain, run)]
        assert torch.allclose(*results, atol=1e-6)


def test_whole_models_copied_and_pickled(tmp_path: Path) -> None:
    """copy.deepcopy, pickle and torch.save of the model itself give plain models with its values, hooks left behind."""
    for micro_batches in (1, 2):
        plain, model = Plain(make(Net)), make(Net)
        tiers = tz.Tiers(nvme=tmp_path / str(micro_batches), host="64MiB", device="64MiB", compute="cpu")
        with tiered(model, tiers, micro_batches=micro_batches) as run:
            if micro_batches == 1:
                train_both([("", run)], plain, 2)
            saved = io.BytesIO()
            torch.save(model, saved)
            saved.seek(0)
            copies = [copy.deepcopy(model), torch.load(saved, weights_only=False)]
            used = tz.stats(model)["hits"] + tz.stats(model)["misses"]
            ids = next(batches(1))
            for copied in copies:
                for (name, param), twin in zip(plain.model.named_parameters(), copied.parameters(), strict=True):
                    assert type(twin) is nn.Parameter, name
                    assert same(twin, param), name
                loss = loss_of(copied, ids)
                loss.backward()
                assert same(loss, loss_of(plain.model, ids))
            assert pickle.loads(pickle.dumps(copies[1])).head.weight.shape == (VOCAB, DIM)
            assert tz.stats(model)["hits"] + tz.stats(model)["misses"] == used


def test_averaged_models(tmp_path: Path) -> None:
    """torch's AveragedModel keeps a plain copy; it is updated inside `unsharded`, or says so."""
    with pair(tmp_path, spare=1 << 15) as (plain, run):
        averages = [AveragedModel(each.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for each in (plain, run)]
        for step in range(3):
            train_both([("", run)], plain, 1, seed=step)
            averages[0].update_parameters(plain.model)
            if step == 1:
                with pytest.raises(tz.TierzeroError, match=r"unsharded"):
                    averages[1].update_parameters(run.model)
            with tz.unsharded(run.model):
                averages[1].update_parameters(run.model)
        for theirs, mine in zip(*(average.parameters() for average in averages), strict=True):
            assert same(theirs, mine)


def test_hooks_of_the_user(tmp_path: Path) -> None:
    """Hooks from before and after offload() run in the plain order, see the weights and may return other outputs."""

    def observe(model: Any, seen: list[Any]) -> None:
        first, second = model.layers[1], model.layers[2]
        first.register_forward_pre_hook(lambda module, args: seen.append(("before", float(module.up.weight.sum()))))
        first.register_forward_hook(lambda module, args, out: seen.append(("after", float(module.up.weight.sum()))))
        first.register_forward_hook(lambda module, args, out: out * 2)
        second.register_forward_hook(lambda module, args, out: out + module.norm.weight)
        second.register_full_backward_hook(lambda module, g, _: seen.append(("back", float(module.up.bias.sum()))))
        for name, param in model.named_parameters():
            param.register_hook(lambda grad: grad * 0.5)
            param.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.shape)))

    for when in ("before", "after"):
        plain, model, seen = Plain(make(Net)), make(Net), ([], [])  # type: ignore[var-annotated]
        observe(plain.model, seen[0])
        if when == "before":
            observe(model, seen[1])
        with tiered(model, tiers_for(model, "nvme", tmp_path / when, spare=1 << 13)) as run:
            if when == "after":
                observe(model, seen[1])
            train_both([(when, run)], plain, 3)
            assert_same(run, plain)
        assert seen[0] == seen[1]
        assert len(seen[0]) > 9


def test_ways_of_touching_parameters(tmp_path: Path) -> None:
    """Gradients clipped by value, `apply`, names in order, `.data` and `zero_grad` (D6)."""
    with pair(tmp_path) as (plain, run):
        assert [name for name, _ in run.model.named_parameters()] == [n for n, _ in plain.model.named_parameters()]
        for ids in batches(2):
            for each in (plain, run):
                loss_of(each.model, ids).backward()
                nn.utils.clip_grad_value_(each.model.parameters(), 1e-3)
                each.step()
                each.model.zero_grad()
        assert all(param.grad is None for param in run.model.parameters())
        assert run.model.head.weight.data.shape == (VOCAB, DIM)
        with pytest.raises(tz.TierzeroError, match=r"head\.weight.*write=True"):
            run.model.head.apply(lambda module: nn.init.zeros_(module.weight))
        with tz.unsharded(run.model.head, write=True):
            run.model.head.apply(lambda module: nn.init.constant_(module.weight, 0.25))
        with torch.no_grad():
            plain.model.head.weight.fill_(0.25)
            plain.masters[plain.model.head.weight].fill_(0.25)
        train_both([("", run)], plain, 1)


def test_backward_with_a_gradient(tmp_path: Path) -> None:
    """`tensor.backward(gradient=...)` under reentrant checkpointing, step after step (M13)."""
    with pair(tmp_path, CheckpointedReentrant) as (plain, run):
        for ids in batches(4):
            outputs = [each.model(ids) for each in (plain, run)]
            assert same(*outputs)
            for output, each in zip(outputs, (plain, run), strict=True):
                output.backward(gradient=torch.linspace(-1, 1, output.numel()).view_as(output))
                each.step()
                each.zero_grad()
            assert not run.engine.hooks.frames
            assert not run.engine.hooks.backward.unfinished
