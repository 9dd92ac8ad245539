"""Models whose modules read the weights of others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import DIM, VOCAB, Block, Net
from torch import nn
from torch.utils.checkpoint import checkpoint


class RootReads(Net):
    """The model's own forward uses the embedding's weight as its head."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(self.embed(ids)), self.embed.weight)


class TiedReads(RootReads):
    """The same weight is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Neighbour(Block):
    """Uses weights of another block several times: whole, as a transposed view, in part, cast."""

    other: tuple[Block, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weight, (block,) = self.other[0].up.weight, self.other
        through = F.linear(F.linear(x, weight, block.up.bias), weight.t())
        gains = block.norm.weight[: DIM // 2].repeat(2) + block.down.bias.float().to(x.dtype) + sum(block.norm.bias)
        return x + self.inner(x) + torch.tanh(through) * gains


class Neighbours(Net):
    """Each block reads another one, before or after it."""

    def __init__(self, block: type[Block] = Neighbour) -> None:
        super().__init__(block=block)
        for mine, other in ((0, 2), (1, 0), (2, 1)):
            self.layers[mine].__dict__["other"] = (self.layers[other],)


class Checkpointed(Neighbours):
    """The blocks under checkpointing."""

    reentrant = False

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return h


class CheckpointedReentrant(Checkpointed):
    """The other kind."""

    reentrant = True


class Inside(Neighbour):
    """Checkpoints what is inside the block."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class InsideReentrant(Inside):
    """The other kind."""

    reentrant = True


class CheckpointedFunction(Net):
    """A function of the model is checkpointed, which reads weights without any module's forward around it."""

    reentrant = False

    def end(self, h: torch.Tensor) -> torch.Tensor:
        weight = self.layers[0].up.weight
        return F.linear(torch.tanh(h @ weight.t()) @ weight, self.embed.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.end, self.body(self.embed(ids)), use_reentrant=self.reentrant)


class CheckpointedFunctionReentrant(CheckpointedFunction):
    """The other kind."""

    reentrant = True


class Frozen(Neighbours):
    """Some of what is read is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].up.requires_grad_(False)


class Regularised(Net):
    """A loss on weights inside the model's forward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        norms = [param.norm() for layer in self.layers for param in layer.parameters()]
        return super().forward(ids) + sum(norms) * 0.01


class Kept(Net):
    """Weights kept in plain lists, tuples and dicts from before offload()."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.layers[0].up.weight]
        self.layers[1].__dict__["found"] = {"a": (self.layers[0].up.weight, [self.head.weight])}

    def body(self, h: torch.Tensor) -> torch.Tensor:
        same_one, (head,) = self.layers[1].found["a"]
        return super().body(h) + F.linear(F.linear(h, self.kept[0]), same_one.t()) + h @ head.t() @ head


class OtherLists(nn.Module):
    """A block reads parameters in lists and dicts that belong to its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(DIM, DIM) / 3) for _ in range(2)])
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.ones(DIM))})
        self.layers = nn.ModuleList([Block(), nn.Linear(DIM, DIM)])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](self.embed(ids))
        for matrix in self.matrices:
            h = F.linear(h @ matrix, self.layers[1].weight)
        return self.head(h * self.named["gain"])


class Normed(RootReads):
    """The weight that is read is computed by a parametrization, and by the old weight_norm, of its own module."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.layers[0].up)
        nn.utils.parametrizations.spectral_norm(self.layers[1].up)
        nn.utils.weight_norm(self.layers[2].up)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        mixed = F.linear(h, self.layers[0].up.weight) + F.linear(h, self.layers[1].up.weight)
        return super().body(h) + F.linear(mixed, self.layers[0].up.weight.t())


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "root": RootReads,
    "tied": TiedReads,
    "blocks": Neighbours,
    "checkpointed": Checkpointed,
    "checkpointed, reentrant": CheckpointedReentrant,
    "checkpoint inside": lambda: Neighbours(Inside),
    "checkpoint inside, reentrant": lambda: Neighbours(InsideReentrant),
    "checkpointed function": CheckpointedFunction,
    "checkpointed function, reentrant": CheckpointedFunctionReentrant,
    "frozen": Frozen,
    "regularised": Regularised,
    "kept from before": Kept,
    "lists of the parent": OtherLists,
    "normed": Normed,
}
