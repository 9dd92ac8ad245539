"""Torch optimizers other than AdamW, wrapped: equal bit by bit to the plain loop on float32 masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from oracle import make, train_both
from other_optimizers import Lion, TieredOther, assert_same_states, other_pair, roomy
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")

O = torch.optim
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (O.SGD, {"lr": 0.05}),
    "SGD momentum": (O.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD nesterov": (O.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": (O.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "fused": True}),
    "Adam": (O.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam amsgrad": (O.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True, "foreach": True}),
    "Adam fused": (O.Adam, {"lr": 1e-2, "fused": True}),
    "AdamW": (O.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "NAdam": (O.NAdam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (O.RAdam, {"lr": 1e-2}),
    "Adamax": (O.Adamax, {"lr": 1e-2}),
    "RMSprop": (O.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "Rprop": (O.Rprop, {"lr": 1e-3}),
    "ASGD": (O.ASGD, {"lr": 1e-2}),
    "Adagrad": (O.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "Adadelta": (O.Adadelta, {"lr": 0.5}),
    "Adafactor": (O.Adafactor, {"lr": 1e-2}),
    "Lion": (Lion, {"lr": 1e-3, "decay": 0.1}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_optimizer(name: str, tmp_path: Path) -> None:
    """Losses, weights, masters and states, in both dtypes and all placements, with accumulation and clipping."""
    cls, hyper = CASES[name]
    for dtype in (torch.float32, torch.bfloat16):
        for placement in ("host", "nvme", "mixed"):
            directory = tmp_path / f"{dtype}{placement}"
            with other_pair(directory, cls, placement=placement, dtype=dtype, **hyper) as (plain, run):
                train_both(
                    [(f"{dtype} {placement}", run)], plain, 4, accumulate=2, clip=lambda s, n: n * 0.5 if s % 2 else None
                )


def in_two(model: nn.Module) -> list[dict[str, Any]]:
    """Groups across units, with options of their own."""
    params = list(model.parameters())
    return [{"params": params[::2], "lr": 0.01}, {"params": params[1::2], "momentum": 0.5}]
