"""Tiny models, one per shape that offloading has to get right. All take int64[batch, tokens] and return logits
float[batch, tokens, VOCAB].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB = 24
DIM = 8


class Block(nn.Module):
    """LayerNorm and a two-layer MLP around a residual."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor, *, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        return x + self.inner(x) * scale


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([block() for _ in range(blocks)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h)
        return h

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


class Tied(Net):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.base.requires_grad_(False)
        self.a = nn.Linear(DIM, 2, bias=False)
        self.b = nn.Linear(2, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class LoRABlock(nn.Module):
    """Mostly frozen, with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.query = LoRALinear()
        self.out = nn.Linear(DIM, DIM)
        self.norm.requires_grad_(False)
        self.out.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.query(self.norm(x))))


class LoRA(Net):
    """Frozen embedding and head, blocks with adapters."""

    def __init__(self) -> None:
        super().__init__(block=LoRABlock)
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)


class Twice(Net):
    """Two of the blocks are used again."""

    def body(self, h: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.layers[1](super().body(h)))


class Branch(Net):
    """Every other forward leaves a block out."""

    calls = 0

    def body(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for index, layer in enumerate(self.layers):
            if index == 1 and self.calls % 2:
                continue
            h = layer(h, scale=torch.tensor(0.5, dtype=h.dtype))
        return h


class DictBlock(Block):
    """Takes keyword arguments and returns a dict."""

    def forward(self, x: torch.Tensor | None = None, **extra: object) -> dict[str, torch.Tensor | None]:  # type: ignore[override]
        assert x is not None
        return {"hidden": x + self.inner(x), "nothing": None}


class Dicts(Net):
    """Blocks that are called with keywords and answer with dicts."""

    def __init__(self) -> None:
        super().__init__(block=DictBlock)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x=h, unused=3)["hidden"]
        return h


class Checkpointed(Net):
    """Each block under activation checkpointing."""

    reentrant = False

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return h


class CheckpointedReentrant(Checkpointed):
    """The same with the reentrant kind."""

    reentrant = True


class InnerCheckpointBlock(Block):
    """Checkpoints what is inside the unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + checkpoint(self.inner, x, use_reentrant=False)


class CheckpointedLoRA(Checkpointed):
    """Frozen blocks with adapters under checkpointing; set `reentrant` on the instance."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__(block=LoRABlock)
        self.reentrant = reentrant
        self.embed.requires_grad_(reentrant)  # reentrant checkpointing needs inputs that require gradients
        self.head.requires_grad_(False)


class OddBlock(nn.Module):
    """Vectors of every length in `sizes` and a scalar, each of which matters to the result."""

    def __init__(self, sizes: range) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.stack([torch.tanh(vector).mean() for vector in self.vectors])
        return torch.tanh(x * self.scale + mixed.sum() / len(mixed)) + x * mixed[:DIM].mean()


class Odd(Net):
    """Parameters of 1 to 40 elements, and scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OddBlock(range(1, 21)), OddBlock(range(21, 41))])


class EmptyBlock(Block):
    """Holds a parameter without elements, which takes part in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + self.inner(x) + self.empty.sum()


class Empty(Net):
    """Blocks with parameters of zero elements."""

    def __init__(self) -> None:
        super().__init__(block=EmptyBlock)


class Experts(nn.Module):
    """A mixture whose expert the batch chooses."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, experts)
        self.experts = nn.ModuleList([Block() for _ in range(experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).mean((0, 1))
        chosen = scores.detach().float().topk(2).indices.tolist()
        return x + sum(self.experts[k](x) * scores[k] for k in chosen)


class Mixture(Net):
    """Blocks, then experts of which few are used."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.layers.append(Experts())


class ViewBlock(Block):
    """Works in place on its input's copy and returns a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        h = x * 1.0
        h += self.inner(x)
        return h.view(-1, DIM).view(x.shape)


class InPlace(Net):
    """In-place operations on what blocks took and returned."""

    def __init__(self) -> None:
        super().__init__(block=ViewBlock)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        h = h * 1.0
        for layer in self.layers:
            h = layer(h)
            h += 1.0
            h.mul_(0.75)
        return h


class Residual(Net):
    """The blocks' inputs are used several times inside and outside of them."""

    def body(self, h: torch.Tensor) -> torch.Tensor:
        start = h
        for layer in self.layers:
            h = layer(h) + 0.5 * h + layer(h * 2.0) * start
        return h + start


class HiddenStates(Net):
    """Every hidden state is part of the output."""

    def body(self, h: torch.Tensor) -> torch.Tensor:
        states = [h]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return sum(state * (index + 1) for index, state in enumerate(states)) / len(states)  # type: ignore[return-value]


class Dropout(Net):
    """Blocks with dropout."""

    def __init__(self) -> None:
        super().__init__(block=lambda: nn.Sequential(Block(), nn.Dropout(0.3)))


class Shared(Net):
    """One block, many times."""

    def __init__(self, times: int = 12, mode: str = "plain") -> None:
        super().__init__(blocks=1)
        self.times, self.mode = times, mode

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            h = (
                self.layers[0](h)
                if self.mode == "plain"
                else checkpoint(self.layers[0], h, use_reentrant=self.mode == "reentrant")
            )
            h = torch.tanh(h)
        return h


class BatchNormed(Net):
    """Buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Conv1d(DIM, DIM, 3, padding=1), nn.BatchNorm1d(DIM), nn.ReLU()) for _ in range(3)]
        )

    def body(self, h: torch.Tensor) -> torch.Tensor:
        return super().body(h.transpose(1, 2)).transpose(1, 2)


class RandomBranch(Net):
    """Each forward takes a random subset of the blocks, the same for the same generator state."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__(blocks=blocks)
        self.generator_seed, self.calls = 5, 0

    def body(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        choice = (
            torch.rand(len(self.layers), generator=torch.Generator().manual_seed(self.generator_seed + self.calls))
            < 0.5
        )
        for taken, layer in zip(choice.tolist(), self.layers, strict=True):
            h = layer(h) if taken else h
        return h


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "tied": Tied,
    "lora": LoRA,
    "block twice": Twice,
    "branch": Branch,
    "dicts": Dicts,
    "checkpoint": Checkpointed,
    "checkpoint reentrant": CheckpointedReentrant,
    "odd sizes": Odd,
    "empty parameter": Empty,
}
