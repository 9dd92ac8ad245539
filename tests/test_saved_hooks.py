"""Saved-tensor hooks of the user's between the engine's: each sees what it would see, but for the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, Net
from oracle import train_both
from pairs import pair
from torch.autograd.graph import saved_tensors_hooks

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")

SEEN: list[tuple[str, tuple[int, ...]]] = []  # by whom, and the shape of what was saved


def noting(who: str) -> saved_tensors_hooks:
    """Hooks that keep copies."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        SEEN.append((who, tuple(tensor.shape)))
        return tensor.detach().clone()

    return saved_tensors_hooks(pack, lambda tensor: tensor)


class InsideBlock(Block):
    """Has hooks around a part of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with noting("inside"):
            x = super().forward(x)
        return x * x


class Around(Net):
    """Has hooks around every second block, within its forward."""

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            if index % 2:
                with noting("around"):
                    x = layer(x)
            else:
                x = layer(x)
        return self.head(x)


class Inner(Net):
    """Its blocks have hooks."""

    def __init__(self) -> None:
        super().__init__(block=InsideBlock)


def outside(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """A loss with hooks around the whole model."""
    with noting("outside"):
        return model(ids).float().square().mean()


@pytest.mark.parametrize("factory", [Net, Around, Inner])
def test_hooks_between_the_engines(factory: type[Net], tmp_path: Path) -> None:
    """Around the model, around a unit and inside of one: none from outside copies a weight, and all else comes to
    each as in the plain loop.
    """
    with pair(tmp_path, factory) as (plain, run):
        weights = {tuple(param.shape) for param in plain.model.parameters()}
        weights |= {shape[::-1] for shape in weights}
        seen = []
        for model in (plain.model, run.model):
            SEEN.clear()
            outside(model, torch.arange(6).view(2, 3)).backward()
            seen.append([each for each in SEEN if each[1] not in weights])
            for param in model.parameters():
                param.grad = None
            if model is run.model:
                assert {who for who, shape in SEEN if shape in weights} <= {"inside"}  # which is asked first
        assert seen[0] == seen[1]
        assert len({who for who, _ in seen[0]}) == (1 if factory is Net else 2)
        train_both([(factory.__name__, run)], plain, 3, loss=outside)
