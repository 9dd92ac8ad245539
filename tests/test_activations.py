"""Activations that leave the device until backward: the plain loop's bits, fewer bytes on the device, moved once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from activations import PAGE, ROOMS, moved_all, pair, usage, with_activations
from models import Net
from oracle import Plain, Tiered, assert_same, batches, loss_of, make, same, tiered, train_both
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks", "small_activations_too")


SHAPES = {
    **{name: models.SHAPES[name] for name in ("plain", "tied", "checkpoint", "checkpoint reentrant", "lora")},
    "checkpoint inside the block": lambda: Net(block=models.InnerCheckpointBlock),
    "one block 12 times, checkpointed": lambda: models.Shared(12, "non-reentrant"),
    "residuals": models.Residual,
    "views and in-place": models.InPlace,
    "random branches": models.RandomBranch,
    "experts": models.Mixture,
    "dropout": models.Dropout,
    "batch norm": models.BatchNormed,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_plain_training(shape: str, tmp_path: Path) -> None:
    """Whatever is saved, wherever it goes, with accumulation and clipping."""
    for room, dtype in (("host", 32), ("spilled", 32), ("spilled", 16), ("some stays", 16)):
        where = f"{shape}, {room}, {dtype}"
        precision = torch.float32 if dtype == 32 else torch.bfloat16
        with pair(tmp_path / where, SHAPES[shape], room, precision) as (plain, run):
            train_both([(where, run)], plain, 3, accumulate=2, clip=lambda step, norm: 0.7 * norm if step % 2 else None)
            counts = tz.stats(run.model)
            assert counts["activations_restored"] > 0
            assert (counts["activations_written"] > 0) == (room == "spilled")
            assert (counts["activations_kept"] > 0) == (room == "some stays")
            assert counts["activations_host_peak"] <= counts["activations_budget"] == ROOMS[room][1]


def test_they_stay_where_nothing_is_said(tmp_path: Path) -> None:
    model = make(Net)
    with tiered(model, with_activations(model, "host", tmp_path, 0)) as run:
        train_both([("", run)], Plain(make(Net)), 1)
        assert run.engine.activations is None
        assert tz.stats(model)["activations_offloaded"] == tz.stats(model)["activations_budget"] == 0


# -- what is on the device -----------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Layers whose inputs are far larger than their weights; remembers their storages, weakly."""

    rows, dim = 2048, 8

    def __init__(self, kind: str, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([models.Block(self.dim) for _ in range(layers)])
        self.kind = kind
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x * 1.0
            self.seen.append(StorageWeakRef(x.untyped_storage()))
            x = layer(x) if self.kind == "plain" else checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
        return x.sum()

    @property
    def alive(self) -> int:
        """How many of the layers' inputs are on the device."""
        return sum(not ref.expired() for ref in self.seen)


@pytest.mark.parametrize("room", [None, "nvme"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "plain"])
def test_the_device_holds_less(kind: str, room: str | None, tmp_path: Path) -> None:
    """After forward all inputs of the layers are on the device in plain PyTorch, none when they were moved; backward
    has two of them there at a time.
    """
    size = Wide.rows * Wide.dim * 4
    inputs = torch.randn(Wide.rows, Wide.dim, requires_grad=True)
    plain = make(lambda: Wide(kind))
    loss = plain(inputs)
    assert plain.alive == 6
    loss.backward()
    expected, inputs.grad = inputs.grad, None
    model = make(lambda: Wide(kind))
    budget = 2 * size if room else 64 * size
    units = list(model.layers)  # there is no unit around them
    tiers = with_activations(model, room or "host", tmp_path, budget, units=units)
    with tiered(model, tiers, units=units) as run:
        loss = model(inputs)
        moved_all(run)
        assert model.alive == 0
        counts = tz.stats(model)
        assert counts["activations_offloaded"] >= 6 * size
        if kind != "plain":
            assert counts["activations_offloaded"] == 6 * size
            assert counts["activations_host"] + counts["activations_nvme"] >= 6 * size
            peaks: list[int] = []
            watched = Watch(run, peaks)
            with watched:
                loss.backward()
            assert max(peaks) <= 3
        else:
            loss.backward()
        assert same(inputs.grad, expected)
        if room:
            assert tz.stats(model)["activations_read"] >= 4 * size
            assert tz.stats(model)["activations_host_peak"] <= budget


class Watch:
    """Counts how many of the pieces that were brought back are on the device, at each one."""

    def __init__(self, run: Tiered, peaks: list[int]) -> None:
        self.activations: Any = run.engine.activations
        self.bring, self.peaks = self.activations.bring, peaks
        self.refs: list[StorageWeakRef] = []

    def __enter__(self) -> None:
        self.activations.bring = self

    def __call__(self, piece: Any) -> Any:
        found = self.bring(piece)
        self.refs.append(StorageWeakRef(found[0]))
        ahead = self.activations.pool._ahead is not None
        self.peaks.append(sum(not ref.expired() for ref in self.refs) + ahead)
        return found

    def __exit__(self, *_: object) -> None:
        del self.activations.bring


# -- moved once ----------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Saves one storage as a whole, twice, and as three views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 192, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.layers[0](x)
        q, k, v = qkv.chunk(3, dim=-1)
        return (torch.tanh(q * k) * v).sum() + (qkv * qkv).sum() + qkv.exp().log().sum()


def test_one_storage_moves_once(tmp_path: Path) -> None:
    """Saved twice, and as several views: one copy out, one back; changed in between, it is another version."""
    x = torch.randn(256, 64)
    plain = make(Heads)
    plain(x).backward()
    model = make(Heads)
    with tiered(model, with_activations(model, "host", tmp_path, 1 << 22)) as run:
        loss = model(x)
        moved_all(run)
        qkv, part = 256 * 192 * 4, 256 * 64 * 4
        # qkv once; tanh, which its own node and the product save, and exp, which its own node and the logarithm save
        assert tz.stats(model)["activations_offloaded"] == qkv + part + qkv
        loss.backward()
        assert tz.stats(model)["activations_restored"] == tz.stats(model)["activations_offloaded"]
        assert same(model.layers[0].weight.grad.plain, plain.layers[0].weight.grad)
        before = tz.stats(model)["activations_offloaded"]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # a user's own come first
            model(x).backward()
        assert tz.stats(model)["activations_offloaded"] == before


class Slices(nn.Module):
    """Saves a little of something large that it does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.data = torch.randn(4096, 8)
        self.register_buffer("mask", torch.ones(512, 8))

    def forward(self, at: int, given: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.layers[0](self.data[at : at + 16])) * self.mask[:16]).sum() * given.exp().sum()


def test_only_what_is_saved_moves(tmp_path: Path) -> None:
    """Not the data set that a batch is a view of, no buffers, not what the model was called with."""
    given = torch.randn(3000, requires_grad=True)
    model, plain = make(Slices), make(Slices)
    model.data = plain.data
    with tiered(model, with_activations(model, "host", tmp_path, 1 << 20)) as run:
        expected = plain(100, given)
        expected.backward()
        theirs, given.grad = given.grad, None
        loss = model(100, given)
        assert same(loss, expected)
        moved_all(run)
        # a page each of the slice, tanh's output and two sums, three of given.exp()
        assert usage(run)["activations_host"] == 7 * PAGE
        loss.backward()
        assert same(given.grad, theirs)
        assert same(model.layers[0].weight.grad.plain, plain.layers[0].weight.grad)
        assert tz.stats(model)["activations_offloaded"] < 16 << 10


# -- as in plain PyTorch -------------------------------------------------------------------------------------------


class Spoilt(Net):
    """Changes in place what was saved."""

    def body(self, h: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](h)
        saved = h.exp()
        out = self.layers[1](saved * 2)
        saved.add_(1.0)
        return out + saved


def test_changes_in_place_are_errors(tmp_path: Path) -> None:
    """The same as autograd's own, although the tensor itself is gone by then."""
    ids = next(batches(1))
    model, plain = make(Spoilt), make(Spoilt)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as theirs:
        loss_of(plain, ids).backward()
    with tiered(model, with_activations(model, "nvme", tmp_path, 2 * PAGE)) as run:
        for _ in range(2):
            loss = loss_of(model, ids)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as ours:
                loss.backward()
            wanted = "torch.FloatTensor [2, 5, 8]]"
            assert wanted in str(theirs.value)
            assert wanted in str(ours.value)
            assert "is at version 1; expected version 0 instead" in str(theirs.value)
            assert "is at version 1; expected version 0 instead" in str(ours.value)
            model.zero_grad()
            del loss, ours
        run.check_pools()


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("shape", ["plain", "checkpoint", "residuals"])
def test_two_backwards(shape: str, room: str, tmp_path: Path) -> None:
    """A retained graph is unpacked twice, and two graphs live at once."""
    with pair(tmp_path, SHAPES[shape], room) as (plain, run):
        for step in range(3):
            for each in (plain, run):
                first, second = (loss_of(each.model, ids) for ids in batches(2, seed=step))
                first.backward(retain_graph=True)
                second.backward()
                first.backward()
                del first, second
            assert_same(run, plain, f"step {step}", grads=True)
            run.check_pools()
            plain.step(0.5)
            run.step(0.5)
            plain.zero_grad()
            run.zero_grad()


def test_a_dropped_graph_gives_its_room_back(tmp_path: Path) -> None:
    """At once, without a backward; so does a forward that is evaluated only, which has none."""
    with pair(tmp_path) as (plain, run):
        for _ in range(3):
            loss = loss_of(run.model, next(batches(1)))
            moved_all(run)
            used = usage(run)
            assert used["activations_host"] + used["activations_nvme"] > 4 * PAGE
            del loss
            run.check_pools()
            with torch.no_grad():
                kept = loss_of(run.model, next(batches(1)))
            assert usage(run)["activations_host"] == 0
            del kept
        train_both([("", run)], plain, 1)


def test_saved_tensors_that_are_looked_at(tmp_path: Path) -> None:
    """Reading grad_fn's attributes outside of backward brings them back."""
    with pair(tmp_path, lambda: Net(block=Tanh)) as (plain, run):
        for each in (plain, run):
            loss = loss_of(each.model, next(batches(1)))
            moved = Tanh.last.grad_fn._saved_result
            assert same(moved, Tanh.value)
            loss.backward()
            del loss, moved
            each.step()
            each.zero_grad()
        Tanh.last = Tanh.value = None


class Tanh(models.Block):
    """Leaves its last tanh behind."""

    last: Any = None
    value: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = torch.tanh(self.inner(x))
        Tanh.last, Tanh.value = y.view(y.shape), y.detach().clone()
        Tanh.last = y
        return x + y * 2
