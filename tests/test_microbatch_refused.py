"""What micro-batches cannot be exact for is refused with a sentence, and the model goes on without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import DIM, Block, Net
from oracle import Plain, assert_same, batches, loss_of, make, tiered, tiers_for, train_both
from pieces import in_slices
from torch import nn

import tierzero as tz

usual = pytest.mark.usefixtures("one_thread", "no_leaks")


def refused(factory: Callable[[], nn.Module], directory: Path, match: str, shape: tuple[int, int] = (8, 5)) -> None:
    """Training `factory`'s model in 4 pieces raises a sentence; nothing is left in the pools."""
    model = make(factory)
    with tiered(model, tiers_for(model, "host", directory, micro_batches=4), micro_batches=4) as run:
        ids = next(batches(1, shape=shape))
        with pytest.raises(tz.TierzeroError, match=match):
            loss_of(run.model, ids).backward()
        with torch.no_grad():
            run.model(ids)


class Around(Block):
    """A block to build others on: `mixed` changes what it adds to its input."""

    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + self.mixed(self.inner(x))


class BatchMean(Around):
    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        return h - h.mean(0, keepdim=True)


class RowBefore(Around):
    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        return h + 0.01 * h.roll(1, 0)


class CausalOverRows(Around):
    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(h.cumsum(0), (DIM,))


class SequenceFirst(nn.Module):
    """torch's own layer with batch_first=False, which takes [time, batch, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Statistics(Around):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(h.detach().mean((0, 1)), 0.1)  # type: ignore[operator]
        return h - self.mean  # type: ignore[operator]


class Counter(Around):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return h


class Spectral(Around):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.up)


class Norm(nn.Module):
    """A block with a norm over [batch, DIM, time]."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(DIM, DIM), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.up(x).transpose(1, 2)).transpose(1, 2)


MIXING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: Norm(nn.BatchNorm1d(DIM)), "BatchNorm1d in training mode .norm., which mixes the rows"),
    "sync batch norm": (lambda: Norm(nn.SyncBatchNorm(DIM)), "SyncBatchNorm in training mode"),
    "instance norm": (lambda: Norm(nn.InstanceNorm1d(DIM, track_running_stats=True)), "InstanceNorm1d in training"),
    "batch mean": (BatchMean, "unit layers.0 mixes the rows of its batch"),
    "row before": (RowBefore, "mixes the rows"),
    "causal over rows": (CausalOverRows, "mixes the rows"),
    "sequence first": (SequenceFirst, "mixes the rows .*batch_first=False"),
    "experts chosen by the batch": (models.Experts, "mixes the rows"),
    "running statistic": (Statistics, "changes its buffer mean in forward"),
    "buffer replaced": (Counter, "changes its buffer calls in forward"),
    "power iteration": (Spectral, "changes its buffer .*_u in forward"),
}


@usual
def test_mixing(tmp_path: Path) -> None:
    """Units that mix the batch, known and found out."""
    for kind, (block, match) in MIXING.items():
        refused(lambda block=block: Net(blocks=3, block=block), tmp_path / kind, match)  # type: ignore[misc]


@usual
@pytest.mark.parametrize("pieces", [2, 4])
def test_batch_norm_in_eval(pieces: int, tmp_path: Path) -> None:
    """A frozen batch norm mixes nothing, until it is put back into training."""
    factory = lambda: Net(block=lambda: Norm(nn.BatchNorm1d(DIM)))
    model, theirs = make(factory), make(factory)
    fresh = Plain(in_slices(theirs, theirs.layers, pieces))  # type: ignore[arg-type]
    norms = [module for each in (model, theirs) for module in each.modules() if isinstance(module, nn.BatchNorm1d)]
    for norm in norms:
        norm.eval()
    with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=pieces), micro_batches=pieces) as run:
        train_both([("", run)], fresh, 3, shape=(4, 5))
        assert_same(run, fresh)
        norms[0].train()
        with pytest.raises(tz.TierzeroError, match="BatchNorm1d in training mode"):
            run.model(next(batches(1, shape=(4, 5))))


class Cache:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Taking(Net):
    """Calls its blocks with what `extra` makes of the hidden state."""

    def __init__(self, block: Callable[[], nn.Module], extra: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        super().__init__(block=block)
        self.extra = extra

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h, **self.extra(h))
        return h


class Takes(Around):
    def forward(self, x: torch.Tensor, *, extra: Any = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) if not isinstance(extra, torch.Tensor) else super().forward(x) + extra.sum() * 0


class Appends(Around):
    def forward(self, x: torch.Tensor, *, extra: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        extra.append(x)
        return super().forward(x)


class InPlace(Around):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x += 1.0
        return super().forward(x)


class Returning(Around):
    """Returns what `make` makes of its result."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return self.make(super().forward(x))


class First(Net):
    """Goes on with the first of what blocks return."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(block=lambda: Returning(make))

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h)[0]
        return h


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "cache": (lambda: Taking(Takes, lambda h: {"extra": Cache()}), "takes a Cache, .*use_cache=False"),
    "list that grows": (lambda: Taking(Appends, lambda h: {"extra": [h]}), "changes a list or dict"),
    "in place": (lambda: Net(block=InPlace), "changes one of its arguments in place"),
    "in place on data": (lambda: Net(block=lambda: nn.Sequential(InPlace())), "changes one of its arguments in place"),
    "scalar": (lambda: First(lambda h: (h, h.mean())), r"returns a tensor of shape \[\] for two rows"),
    "not a row each": (lambda: First(lambda h: (h, h.mean(0, keepdim=True))), "for two rows of its batch: its first"),
    "number": (lambda: First(lambda h: (h, float(h.detach()[0, 0, 0]))), "for a later piece of its batch"),
    "object": (lambda: First(lambda h: (h, Cache())), "returns a Cache"),
    "nothing": (lambda: First(lambda h: (None,)), "returns no tensor of its own"),
}


@usual
def test_arguments_and_results(tmp_path: Path) -> None:
    """Arguments without a batch dimension that can be told, and results that cannot be put together."""
    for kind, (factory, match) in REFUSED.items():
        model = make(factory)
        if kind == "in place on data":
            model.embed.requires_grad_(False)  # type: ignore[operator, union-attr]
        with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=4), micro_batches=4) as run:
            with pytest.raises(tz.TierzeroError, match=match):
                run.model(next(batches(1, shape=(8, 5))))


@usual
def test_ambiguous_batch(tmp_path: Path) -> None:
    """A table of the other dimension that is as long as the batch is refused; with another batch it is not."""
    model = make(lambda: Taking(Takes, lambda h: {"extra": torch.zeros(5, 3)}))
    with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=4), micro_batches=4) as run:
        with pytest.raises(tz.TierzeroError, match=r"5 is the batch and another dimension too"):
            run.model(next(batches(1, shape=(5, 5))))
        loss_of(run.model, next(batches(1, shape=(6, 5)))).backward()


class Stashes(Around):
    """Keeps an auxiliary loss of its inside."""

    aux: torch.Tensor
    plain = False

    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        self.aux = h.sum() if self.plain else h.pow(2).mean()
        return h


class StashesSum(Stashes):
    """The same through operations that save nothing."""

    plain = True


@usual
@pytest.mark.parametrize("block", [Stashes, StashesSum])
def test_auxiliary_loss(block: type[Stashes], tmp_path: Path) -> None:
    """A loss that goes past the unit's results has no way back, and says so; looking at it is allowed."""
    model = make(lambda: Net(block=block))
    with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=4), micro_batches=4) as run:
        ids = next(batches(1, shape=(8, 5)))
        loss = loss_of(run.model, ids)
        assert run.model.layers[0].aux.isfinite()  # type: ignore[index, union-attr]
        with pytest.raises(tz.TierzeroError, match="in another way than through what the unit returns"):
            (loss + run.model.layers[0].aux).backward()  # type: ignore[index, union-attr]
        run.optimizer.zero_grad()
        loss_of(run.model, ids).backward()


class Collected(Net):
    """A hook collects what an inner module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[torch.Tensor] = []
        self.layers[1].up.register_forward_hook(lambda module, args, output: self.collected.append(output))


class Elsewhere(Net):
    """Blocks that take a tensor from elsewhere than their arguments."""

    class Block(Around):
        memory: list[torch.Tensor]

        def mixed(self, h: torch.Tensor) -> torch.Tensor:
            return h + self.memory[0]

    def __init__(self) -> None:
        super().__init__(block=Elsewhere.Block)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.memory = [h.mean()]
        return super().body(h)


@usual
def test_inside_and_outside(tmp_path: Path) -> None:
    """Tensors that leave or enter a unit past its results and arguments."""
    refused(Collected, tmp_path, "what its module up returns is kept")
    refused(Elsewhere, tmp_path, "neither one of its arguments nor one of its offloaded parameters")


@usual
def test_parameters_added_later(tmp_path: Path) -> None:
    """Adapters put in after offload are not the engine's: the model says so, and so does a block called by itself."""
    model = make(Net)
    with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=4), micro_batches=4) as run:
        run.model.layers[0].late = nn.Linear(DIM, DIM)  # type: ignore[index, union-attr]
        with pytest.raises(tz.TierzeroError, match=r"layers\.0\.late\.weight.*after offload"):
            run.model(next(batches(1, shape=(8, 5))))
        with pytest.raises(tz.TierzeroError, match=r"late.weight of unit layers.0 was added after offload"):
            run.model.layers[0](torch.ones(8, 5, DIM))
