"""A model under the plain loop beside the same one offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from models import Net
from oracle import Plain, Tiered, assert_same, loss_of, make, same, tiered, tiers_for
from torch import nn


@contextmanager
def pair(
    tmp_path: Path, factory: Any = Net, placement: str = "nvme", dtype: torch.dtype = torch.float32, **options: Any
) -> Iterator[tuple[Plain, Tiered]]:
    """A model under the plain loop and the same one offloaded; compared at the end."""
    plain = Plain(make(factory, dtype), options.get("groups"), **options.get("hyper", {}))
    model = make(factory, dtype)
    tiers = tiers_for(model, placement, tmp_path, spare=options.get("spare", 0))
    with tiered(model, tiers, groups=options.get("groups"), **options.get("hyper", {})) as run:
        yield plain, run
        assert_same(run, plain)


def backward_both(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    for each in (plain, run):
        loss_of(each.model, ids).backward()


def step_both(plain: Plain, run: Tiered, ids: torch.Tensor, max_norm: float | None = None) -> None:
    backward_both(plain, run, ids)
    expected, total = plain.step(max_norm), run.step(max_norm)
    assert (expected is None and total is None) or same(expected, total)
    plain.zero_grad()
    run.zero_grad()


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    decay = [p for name, p in named.items() if p.dim() > 1 and "head" not in name]
    rest = [p for name, p in named.items() if p.dim() <= 1 and "up" not in name]
    ups = [p for name, p in named.items() if p.dim() <= 1 and "up" in name]
    head = [p for name, p in named.items() if "head" in name]
    return [
        {"params": decay, "weight_decay": 0.3},
        {"params": rest, "weight_decay": 0.0, "lr": 3e-3},
        {"params": ups, "betas": (0.8, 0.5), "eps": 1e-3},
        {"params": head, "lr": 0.0, "weight_decay": 0.0},
    ]


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
