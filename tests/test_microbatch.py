"""Micro-batches inside a unit: bit by bit the plain loop whose blocks run over slices, and no more bytes for it."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import DIM, VOCAB, Block, Net
from oracle import Plain, Tiered, assert_same, batches, collected, loss_of, make, same, tiered, tiers_for, train_both
from pieces import in_slices
from torch import nn
from torch.utils.checkpoint import checkpoint

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
HALF_CLIPPED = {"clip": lambda step, norm: 0.7 * norm if step % 2 else None}


@contextmanager
def both(
    factory: Callable[[], nn.Module],
    pieces: int,
    directory: Path,
    *,
    placement: str = "mixed",
    dtype: torch.dtype = torch.float32,
    oracle: Callable[[], nn.Module] | None = None,
    **hyper: Any,
) -> Iterator[tuple[Tiered, Plain]]:
    """An offloaded model under the smallest budgets, and the plain one whose blocks run over slices."""
    model, theirs = make(factory, dtype), make(oracle or factory, dtype)
    fresh = Plain(in_slices(theirs, theirs.layers, pieces))  # type: ignore[arg-type]
    tiers = tiers_for(model, placement, directory, micro_batches=pieces)
    with tiered(model, tiers, micro_batches=pieces, **hyper) as run:
        yield run, fresh


def train(run: Tiered, fresh: Plain, steps: int = 3, **options: Any) -> None:
    """Train both; losses, gradients, clip norms, weights and states are compared at every step."""

    def each_step(step: int, which: Any) -> None:
        if which is run:
            assert_same(run, fresh, f"step {step}", grads=True)

    options = {"shape": (8, 5), "each_step": each_step, **HALF_CLIPPED, **options}
    train_both([("", run)], fresh, steps, **options)
    assert_same(run, fresh)


class SharedInside(Net):
    """Blocks that share one of their layers, which belongs to the unit around them."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up = self.layers[0].up  # type: ignore[union-attr]


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "tied": models.Tied,
    "lora": models.LoRA,
    "block twice": models.Twice,
    "layer shared by the blocks": SharedInside,
    "branch": models.Branch,
    "dicts": models.Dicts,
    "odd sizes": models.Odd,
    "empty parameter": models.Empty,
    "views and in-place": models.InPlace,
    "residuals": models.Residual,
    "hidden states": models.HiddenStates,
    "one block 12 times": lambda: models.Shared(12),
    "checkpoint": models.Checkpointed,
    "checkpoint reentrant": models.CheckpointedReentrant,
    "lora under checkpointing": models.CheckpointedLoRA,
    "checkpoint inside the block": lambda: Net(block=models.InnerCheckpointBlock),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, tmp_path: Path) -> None:
    """Losses, gradients, weights and moments equal the loop over slices in every way of building a model."""
    for pieces, dtype, placement in (
        (2, torch.bfloat16, "nvme"),
        (4, torch.float32, "mixed"),
        (8, torch.bfloat16, "host"),
    ):
        directory = tmp_path / str(pieces)
        with both(SHAPES[shape], pieces, directory, placement=placement, dtype=dtype) as (run, fresh):
            train(run, fresh)


def test_bytes_do_not_grow(tmp_path: Path) -> None:
    """Bytes per step to and from the device and the drive, fetches and departures are the same for 1, 2, 4, 8."""
    seen = {}
    for pieces in (1, 2, 4, 8):
        with both(Net, pieces, tmp_path / str(pieces), placement="nvme", overlap="deferred") as (run, fresh):
            train(run, fresh, 2)
            tz.synchronize(run.model)
            before = tz.stats(run.model)
            train(run, fresh, 3, seed=2)
            tz.synchronize(run.model)
            after = tz.stats(run.model)
            grads = sum(p.numel() * 4 for p in run.model.parameters())
            assert after["d2h"] - before["d2h"] == 3 * grads
            names = ("h2d", "d2h", "departures", "faults", "nvme_read_expected", "nvme_written_expected")
            seen[pieces] = {name: after[name] - before[name] for name in names}
    assert seen[2] == seen[1]
    assert seen[4] == seen[1]
    assert seen[8] == seen[1]


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_uneven_batches(rows: int, tmp_path: Path) -> None:
    """Pieces of 7 rows in 4 are 2, 2, 2, 1; of 3 rows there are 3; one row is one piece. Batches change in size."""
    with both(Net, 4, tmp_path) as (run, fresh):
        train(run, fresh, 2, shape=(rows, 5))
        train(run, fresh, 2, shape=(6, 5))


class DropoutBlock(Block):
    """Dropout on both sides of a checkpoint if `checkpointed`."""

    checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = F.dropout(x, 0.2, self.training)
        inner = checkpoint(self.noisy, x, use_reentrant=False) if self.checkpointed else self.noisy(x)
        return x + F.dropout(inner, 0.2, self.training)

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(F.dropout(x, 0.1, self.training))


class DropoutCheckpointBlock(DropoutBlock):
    """The same with the checkpoint."""

    checkpointed = True


class DropoutAround(models.Checkpointed):
    """Dropout blocks, each under activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(block=DropoutBlock)
        self.reentrant = reentrant


DROPOUTS: dict[str, Callable[[], nn.Module]] = {
    "sequential": models.Dropout,
    "block": lambda: Net(block=DropoutBlock),
    "checkpoint inside": lambda: Net(block=DropoutCheckpointBlock),
    "checkpoint around": lambda: DropoutAround(False),
    "reentrant checkpoint around": lambda: DropoutAround(True),
}


@pytest.mark.parametrize("shape", DROPOUTS)
@pytest.mark.parametrize("pieces", [2, 4])
def test_dropout(shape: str, pieces: int, tmp_path: Path) -> None:
    """The masks are those of the loop over slices, drawn slice by slice, and the generator ends where it ends there."""
    with both(DROPOUTS[shape], pieces, tmp_path) as (run, fresh):
        train(run, fresh, accumulate=2)
        ids = next(batches(1, 9, (8, 5)))
        ends = []
        for model in (fresh.model, run.model):
            torch.manual_seed(5)
            loss_of(model, ids).backward()
            ends.append(torch.get_rng_state())
        assert torch.equal(*ends)


class InnerReentrantBlock(Block):
    """A reentrant checkpoint inside the unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + checkpoint(self.inner, x, use_reentrant=True)


def test_reentrant_checkpoint_inside(tmp_path: Path) -> None:
    """It is the same function as with the other kind, which the plain loop has here."""
    plain = lambda: Net(block=models.InnerCheckpointBlock)
    with both(lambda: Net(block=InnerReentrantBlock), 4, tmp_path, oracle=plain) as (run, fresh):
        train(run, fresh)


@pytest.mark.parametrize("overlap", ["eager", "deferred"])
def test_accumulation_and_early_updates(overlap: str, tmp_path: Path) -> None:
    """Several backwards a step, clipped every other step, with updates that begin in backward and at the step."""
    with both(Net, 4, tmp_path, placement="nvme", overlap=overlap) as (run, fresh):
        train(run, fresh, 5, accumulate=3)
        if overlap == "eager":
            assert tz.stats(run.model)["guesses"] > 0


class MaskedBlock(Block):
    """Takes what Hugging Face blocks take: tensors with the batch dimension, without it and with one of size 1, in
    tuples and keywords; one shared one requires a gradient.
    """

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        *,
        mask: torch.Tensor,
        bias: torch.Tensor,
        gain: torch.Tensor,
        extra: dict[str, Any],
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        cos, sin = tables
        assert extra["name"] == "x"
        h = self.inner(x * cos + x.roll(1, -1) * sin + bias) * mask * extra["weight"]
        return x + h * gain, {"ids": extra["ids"], "tables": cos, "flat": h.flatten(0, 1), "depth": 3, "none": None}


class Masked(Net):
    """Blocks with all kinds of arguments; every kind of result is used."""

    def __init__(self) -> None:
        super().__init__(block=MaskedBlock)
        self.gain = nn.Parameter(torch.full((1, 1, DIM), 0.7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        rows, time = ids.shape
        angles = torch.linspace(0, 1, time)[:, None]
        tables = (angles.cos().to(h), angles.sin().to(h))
        mask = (ids % 3 != 0)[:, :, None].to(h)
        bias = torch.linspace(-1, 1, time * DIM).view(1, time, DIM).to(h)
        extra = {"name": "x", "ids": ids, "weight": ids[:, :, None].to(h) / VOCAB}
        total: Any = 0.0
        for layer in self.layers:
            h, out = layer(h, tables, mask=mask, bias=bias, gain=self.gain, extra=extra)
            assert (out["depth"], out["none"]) == (3, None)
            assert out["tables"].shape == tables[0].shape
            assert torch.equal(out["ids"], ids)
            assert out["ids"].shape == ids.shape
            total = total + out["flat"].view(rows, time, DIM)
        return self.head(h + total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_arguments_and_results(dtype: torch.dtype, tmp_path: Path) -> None:
    """Tuples, dicts, keywords, plain values; tensors with the batch, of batch size 1, without it, flattened with it."""
    with both(Masked, 4, tmp_path, dtype=dtype) as (run, fresh):
        for layer in fresh.model.layers:  # type: ignore[union-attr]
            first = layer.forward

            def forward(*args: Any, first: Any = first, **kwargs: Any) -> Any:
                h, out = first(*args, **kwargs)
                return h, {**out, "tables": args[1][0]}  # comes out as it went in

            layer.forward = forward
        train(run, fresh, shape=(6, 5))


def test_equal_to_accumulation(tmp_path: Path) -> None:
    """Where what comes after the blocks treats rows alone, as here, a block's gradients are those of a plain loop that
    accumulates over the micro-batches, bit for bit.
    """
    plain, model = make(Net), make(Net)
    with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=4), micro_batches=4) as run:
        ids = next(batches(1, shape=(8, 5)))
        weights = torch.randn(8, 5, DIM, generator=torch.Generator().manual_seed(2))
        for piece, weight in zip(ids.chunk(4), weights.chunk(4), strict=True):
            (plain.body(plain.embed(piece)) * weight).sum().backward()  # type: ignore[operator]
        run.model.head = nn.Identity()  # type: ignore[assignment]
        (run.model(ids) * weights).sum().backward()
        found = dict(run.model.named_parameters())
        for name, param in plain.named_parameters():
            if name.startswith("layers."):
                assert same(found[name].grad.plain, param.grad), name  # type: ignore[union-attr, arg-type]


def test_autocast(tmp_path: Path) -> None:
    """Under autocast it is the loop whose blocks cast their weights anew for each slice, whatever is on in backward."""

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return loss_of(model, ids)

    def cached(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, ids)

    with both(Net, 4, tmp_path) as (run, fresh):
        train(run, fresh, loss=loss)
        ids = next(batches(1, 4, (8, 5)))
        values = [loss(fresh.model, ids), cached(run.model, ids)]
        for value in values:
            with torch.autocast("cpu", dtype=torch.float16):
                value.backward()
        assert same(*values)
        for (name, param), rest in zip(fresh.model.named_parameters(), run.model.parameters(), strict=True):
            if name.startswith("layers."):
                assert same(rest.grad.plain, param.grad), name  # type: ignore[union-attr, arg-type]


class CountingBlock(Block):
    """Notes the rows of every call."""

    seen: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.seen.append(len(x))
        return super().forward(x)


def test_evaluation_is_not_cut(tmp_path: Path) -> None:
    """Without gradients, and in evaluation, a unit runs the whole batch at once; in training it runs pieces twice."""
    model = make(lambda: Net(blocks=1, block=CountingBlock))
    plain = copy.deepcopy(model)
    plain.layers[0].seen = []  # type: ignore[union-attr, index]
    seen = model.layers[0].seen = []  # type: ignore[union-attr, index, var-annotated]
    with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=4), micro_batches=4) as run:
        ids = next(batches(1, shape=(8, 5)))
        with torch.no_grad():
            assert same(run.model(ids), plain(ids))
        run.model.eval()
        assert same(run.model(ids), plain.eval()(ids))
        loss_of(run.model, ids).backward()
        assert seen == [8, 8, 8]
        run.model.train()
        loss = loss_of(run.model, ids)
        assert seen[3:] == [2, 2, 2, 2, 2, 2]  # twice to see that rows are independent
        loss.backward()
        assert seen[9:] == [2, 2, 2, 2]
        del seen[:]
        loss_of(run.model, ids).backward()
        assert seen == [2] * 8


def test_only_arguments_are_kept(tmp_path: Path) -> None:
    """What autograd saves outside the offloaded weights passes through the hooks around: of a unit, its arguments."""
    kept: dict[int, list[tuple[int, ...]]] = {}
    for pieces in (1, 4):
        model = make(Net)
        shapes: list[tuple[int, ...]] = []

        def pack(tensor: torch.Tensor, shapes: list[tuple[int, ...]] = shapes) -> torch.Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor.detach()

        with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=pieces), micro_batches=pieces) as run:
            ids = next(batches(1, shape=(8, 5)))
            loss_of(run.model, ids).backward()  # the trial is over
            run.optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                value = loss_of(run.model, ids)
            value.backward()
            kept[pieces] = shapes
    inside = [shape for shape in kept[4] if shape and shape[-1] in (DIM, 2 * DIM)]
    assert inside == [(8, 5, DIM)] * 3 + [(40, DIM)] * inside.count((40, DIM))
    assert inside.count((40, DIM)) <= 1  # the head's argument
    assert len(kept[1]) > len(kept[4]) + 6


def test_backward_twice(tmp_path: Path) -> None:
    """With retain_graph the pieces run again each time; without it the second backward is refused as always."""
    with both(Net, 4, tmp_path) as (run, fresh):
        ids = next(batches(1, shape=(8, 5)))
        for model in (fresh.model, run.model):
            loss = loss_of(model, ids)
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        assert_same(run, fresh, grads=True)


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_keeps_the_model(closed: bool, tmp_path: Path) -> None:
    """A graph goes with its loss, model and engine go with the last reference, closed or not."""
    model = make(Net)
    tiers = replace(tiers_for(model, "host", tmp_path, micro_batches=2), prefetch=0)
    run = Tiered(model, tiers, micro_batches=2)
    seen = []
    for ids in batches(2):
        state = model.embed(ids)
        seen.append(weakref.ref(state))
        loss = model.head(model.body(state)).sum()  # type: ignore[operator]
        if len(seen) == 1:
            loss.backward()
            run.step(1.0)
        del loss, state
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    loss_of(model, ids).backward()
    tz.synchronize(model)
    run.check_pools()
    if closed:
        tz.close(model)
    dead = [weakref.ref(thing) for thing in (model, run.optimizer, run.engine, model.layers[0], run.engine.units[0])]
    del model, run
    assert collected(*dead), [ref() for ref in dead]


class FailingBlock(Block):
    """Fails in the forward whose number `fails` counts down to."""

    fails = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        type(self).fails -= 1
        if type(self).fails == 0:
            raise ValueError("a piece failed")
        return super().forward(x)


@pytest.mark.parametrize("at", [1, 3, 6, 12, 13, 15, 18, 24])
def test_errors(at: int, tmp_path: Path) -> None:
    """An error in any piece, in forward or in backward, leaves nothing behind; what follows equals the plain loop."""
    with both(lambda: Net(block=FailingBlock), 4, tmp_path) as (run, fresh):
        train(run, fresh, 1)
        FailingBlock.fails = at
        with pytest.raises(ValueError, match="a piece failed") as caught:
            loss_of(run.model, next(batches(1, shape=(8, 5)))).backward()
        FailingBlock.fails = -1
        assert any("ran a piece of its batch of 8 rows" in note for note in caught.value.__notes__)
        run.optimizer.zero_grad()
        run.model(next(batches(1)))  # the next forward of the root tidies up
        run.check_pools()
        train(run, fresh, 2)


def test_modules_get_their_forward_back(tmp_path: Path) -> None:
    """A forward set on the instance survives, copies share nothing, signatures stay."""
    model = make(Net)
    model.layers[0].forward = first = lambda x: Block.forward(model.layers[0], x, scale=0.5)  # type: ignore[index]
    ids = next(batches(1, shape=(8, 5)))
    plain = copy.deepcopy(model)
    plain.layers[0].forward = lambda x: Block.forward(plain.layers[0], x, scale=0.5)  # type: ignore[index]
    with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=2), micro_batches=2) as run:
        assert list(inspect.signature(model.layers[1].forward).parameters) == ["x", "scale"]  # type: ignore[index]
        copied = copy.deepcopy(model.layers[1])  # type: ignore[index]
        x = torch.randn(2, 5, DIM)
        assert same(copied(x), plain.layers[1](x))  # type: ignore[index, operator]
        with torch.no_grad():
            assert same(run.model(ids), plain(ids))
        loss_of(run.model, ids).backward()
    assert model.layers[0].forward is first  # type: ignore[index]
    assert "forward" not in model.layers[1].__dict__  # type: ignore[index]
