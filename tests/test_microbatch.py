"""Micro-batches inside a unit: bit by bit the plain loop whose blocks run over slices, and no more bytes for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import DIM, VOCAB, Block, Net
from oracle import batches, loss_of, make, same, tiered, tiers_for
from pieces import both, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


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
