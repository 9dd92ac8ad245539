"""The engine without its extension: the portable tier and torch's own kernels, the same bits."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from oracle import batches, check, make, tiered, tiers_for
from pairs import backward_both, in_groups, pair

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.mark.parametrize("shape", ["plain", "tied", "lora", "odd sizes", "empty parameter", "checkpoint"])
def test_without_the_extension(portable: None, shape: str, tmp_path: Path) -> None:
    """The pure-Python package trains, with the same bits."""
    check(models.SHAPES[shape], tmp_path, accumulate=2, clip=lambda step, norm: 0.5 * norm if step % 2 else None)
    model = make(models.SHAPES[shape])
    with tiered(model, tiers_for(model, "nvme", tmp_path / "last")):
        assert tz.stats(model)["native"] is False


def test_groups_and_gaps_without_the_extension(portable: None, tmp_path: Path) -> None:
    """Parameter groups and missing gradients on the portable path."""
    with pair(tmp_path, groups=in_groups, dtype=torch.bfloat16) as (plain, run):
        for step, ids in enumerate(batches(5)):
            backward_both(plain, run, ids)
            for each in (plain, run):
                for index, param in enumerate(each.model.parameters()):
                    if (index + step) % 3 == 0:
                        param.grad = None
            plain.step(1.0)
            run.step(1.0)
            plain.zero_grad()
            run.zero_grad()
