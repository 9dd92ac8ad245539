"""Activations that leave the device until backward: the plain loop's bits, within budgets, and nothing is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from oracle import Plain, Tiered, assert_same, make, tiered, tiers_for, train_both
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks", "everything_moves")

ROOMS = {"host": (None, 1 << 20), "spilled": ("nvme", 8 << 10), "some stays": (None, 8 << 10)}


@pytest.fixture
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small."""
    monkeypatch.setattr("tierzero.activations.LEAST", 1)
    monkeypatch.setattr("tierzero.activations.IN_FLIGHT", 4096)


def with_activations(model: nn.Module, placement: str, directory: Path, nbytes: int, **options: Any) -> tz.Tiers:
    """The smallest budgets that work, with `nbytes` for activations."""
    tiers = tiers_for(model, placement, directory, **options)
    return dataclasses.replace(tiers, host=int(tiers.host) + nbytes, activations=nbytes)


@contextmanager
def pair(
    directory: Path, factory: Callable[[], nn.Module], room: str = "spilled", dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Plain, Tiered]]:
    """A model under the plain loop and the same one offloaded with its activations; compared at the end."""
    nvme, nbytes = ROOMS[room]
    model, plain = make(factory, dtype), Plain(make(factory, dtype))
    with tiered(model, with_activations(model, nvme or "host", directory, nbytes)) as run:
        yield plain, run
        assert_same(run, plain)


SHAPES = {
    **{name: models.SHAPES[name] for name in ("plain", "tied", "checkpoint", "checkpoint reentrant", "lora")},
    "checkpoint inside the block": lambda: models.Net(block=models.InnerCheckpointBlock),
    "one block 12 times, checkpointed": lambda: models.Shared(12, "non-reentrant"),
    "residuals": models.Residual,
    "views and in-place": models.InPlace,
    "random branches": models.RandomBranch,
    "experts": models.Mixture,
    "dropout": models.Dropout,
    "batch norm": models.BatchNormed,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_plain_training(shape: str, room: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whatever is saved, wherever it goes, with accumulation and clipping."""
    with pair(tmp_path, SHAPES[shape], room, dtype) as (plain, run):
        train_both([(shape, run)], plain, 3, accumulate=2, clip=lambda step, norm: 0.7 * norm if step % 2 else None)
        counts = tz.stats(run.model)
        assert counts["activations_restored"] > 0
        assert (counts["activations_written"] > 0) == (room == "spilled")
        assert (counts["activations_kept"] > 0) == (room == "some stays")
