"""The plain loop that micro-batches are held against: ordinary autograd, nothing computed twice.

Every block runs over the slices of its batch in order. Its parameters fan out into one alias a slice, and the fan adds
the aliases' gradients in the order of the slices: ((g1 + g2) + g3) + g4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from oracle import Plain, Tiered, assert_same, make, tiered, tiers_for, train_both
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


class Fan(torch.autograd.Function):
    """x -> `count` aliases of it; their gradients are added in order."""

    @staticmethod
    def forward(ctx: Any, count: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        given = [grad for grad in grads if grad is not None]
        total = given[0] if given else None
        for grad in given[1:]:
            total = total + grad
        return None, total


def slices(rows: int, pieces: int) -> list[int]:
    """The sizes of the slices, spelled out: rows dealt out one by one."""
    sizes = [0] * min(rows, pieces)
    for row in range(rows):
        sizes[row % len(sizes)] += 1
    return sizes


def _cut(value: Any, rows: int, sizes: list[int]) -> list[Any]:
    """One argument as each slice gets it."""
    if not isinstance(value, torch.Tensor):
        return [value] * len(sizes)
    if value.ndim and value.shape[0] == rows:
        return list(value.split(sizes))
    return list(Fan.apply(len(sizes), value)) if value.requires_grad else [value] * len(sizes)


def run_in_slices(block: nn.Module, run: Callable[..., Any], pieces: int, args: Any, kwargs: Any) -> Any:
    """`run` is the block's own forward under `torch.func.functional_call`."""
    leaves, spec = tree_flatten((args, kwargs))
    rows = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 1).shape[0]
    sizes = slices(rows, pieces)
    cut = [_cut(leaf, rows, sizes) for leaf in leaves]
    trained = {name: p for name, p in block.named_parameters() if p.requires_grad}
    fans = {name: Fan.apply(len(sizes), p) for name, p in trained.items()}
    outputs = []
    for index in range(len(sizes)):
        own_args, own_kwargs = tree_unflatten([one[index] for one in cut], spec)
        own = {name: fan[index] for name, fan in fans.items()}
        outputs.append(run(own, own_args, own_kwargs))
    return tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0], *outputs)


def in_slices(model: nn.Module, blocks: Iterable[nn.Module], pieces: int) -> nn.Module:
    """Let every one of the plain `model`'s `blocks` run over `pieces` slices in training. Returns `model`."""
    for block in blocks if pieces > 1 else ():
        _replace(block, pieces)
    return model


def _replace(block: nn.Module, pieces: int) -> None:
    own, inside = block.forward, False

    def call(params: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return torch.func.functional_call(block, params, args, kwargs)
        finally:
            inside = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        if inside or not block.training:  # without gradients too: a reentrant checkpoint runs it so first
            return own(*args, **kwargs)
        return run_in_slices(block, call, pieces, args, kwargs)

    block.forward = forward


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
