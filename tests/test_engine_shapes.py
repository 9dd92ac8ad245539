"""Ways of building models: every one equal to the plain loop bit by bit, in every placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import DIM, VOCAB, Block, Net
from oracle import check, train_both
from pairs import evaluation_before, pair
from torch import nn

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
    """More ways to build a model (M5, M9, M12, M23): each three of shape, accumulation, dtype, placement together."""
    turn = list(MORE_SHAPES).index(shape) + accumulate // 2
    clip = lambda step, norm: 0.7 * norm if step % 2 else None
    check(MORE_SHAPES[shape], tmp_path, accumulate=accumulate, clip=clip, turn=turn)


UNITS: dict[str, Any] = {
    "every linear": lambda model: nn.Linear,
    "blocks and their linears": lambda model: (Block, nn.Linear),
    "one module": lambda model: [model.layers[1]],
    "by name": lambda model: lambda name, module: name.endswith(("up", "norm")),
    "the root alone": lambda model: [model],
}


CUT = ["plain", "tied", "checkpoint", "block twice"]


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("shape", CUT)
def test_units(shape: str, units: str, tmp_path: Path) -> None:
    """Units as the user cuts them, nested ones too: every three of units, shape, dtype and placement together."""
    turn = list(UNITS).index(units) + CUT.index(shape)
    check(models.SHAPES[shape], tmp_path, steps=3, units=UNITS[units], turn=turn)


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


class Peeking(Block):
    """Looks at the weights that the block before it left in the graph."""

    seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        nodes = [x.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is not None:
                nodes += [before for before, _ in node.next_functions]
                Peeking.seen += getattr(node, "_saved_mat2", None) is not None
        return super().forward(x)


def test_saved_weights_read_in_forward(tmp_path: Path) -> None:
    """Reading what autograd saved pages an earlier block in while a later one runs, and takes nothing from that."""
    with pair(tmp_path, lambda: Net(block=Peeking), spare=1 << 16) as (plain, run):
        train_both([("", run)], plain, 3)
    assert Peeking.seen


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
