"""Values that user code changes: in forward, inside `unsharded`, and losses on weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIM, Block, Net
from oracle import batches, loss_of, make, same, tiered, tiers_for, train_both
from pairs import pair
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


def in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.9)


def through_data(weight: torch.Tensor) -> None:
    weight.data.mul_(0.9)


def new_data(weight: torch.Tensor) -> None:
    weight.data = weight.data * 0.9


def assigned_rows(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight[1:3] = 0.25


def only_read(weight: torch.Tensor) -> None:
    assert weight.data.norm() >= 0


WAYS = [in_place, through_data, new_data, assigned_rows, only_read]


class Codebook(Block):
    """Changes a frozen parameter and a trained one at the end of its forward."""

    way: Callable[[torch.Tensor], None] = staticmethod(in_place)

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.randn(5, DIM), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out = x + self.inner(x) + self.book.sum(0)
        if self.training:
            type(self).way(self.book)
            type(self).way(self.down.bias)  # backward does not need its values
        return out


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_changes_in_forward(way: Any, placement: str, tmp_path: Path) -> None:
    """A codebook's moving average and the like reach the tiers, and the masters (M1)."""

    class Changes(Codebook):
        pass

    Changes.way = staticmethod(way)
    plain, model = make(lambda: Net(block=Changes)), make(lambda: Net(block=Changes))
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    with tiered(model, tiers_for(model, placement, tmp_path), lr=1e-2, betas=(0.9, 0.999), weight_decay=1e-2) as run:
        for ids in batches(3):
            losses = [loss_of(each, ids) for each in (plain, model)]
            assert same(*losses)
            for loss in losses:
                loss.backward()
            optimizer.step()
            run.step()
            optimizer.zero_grad()
            run.zero_grad()
        for name, param in plain.named_parameters():
            assert same(dict(model.named_parameters())[name].read(), param), name


def test_changing_what_backward_needs(tmp_path: Path) -> None:
    """As in plain PyTorch: autograd's own error."""

    class Wrong(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            out = x + self.inner(x)
            with torch.no_grad():
                self.down.weight.mul_(0.9)
            return out

    plain, model = make(lambda: Net(block=Wrong)), make(lambda: Net(block=Wrong))
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        for each in (plain, model):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss_of(each, next(batches(1))).backward()
        model.zero_grad()


@pytest.mark.parametrize("way", [in_place, through_data, new_data, assigned_rows], ids=lambda way: way.__name__)
def test_unsharded_drops_or_keeps(way: Any, tmp_path: Path) -> None:
    """With write=True changes are there afterwards, without it they are not, whatever the budget keeps resident."""
    with pair(tmp_path, spare=1 << 15) as (plain, run):
        with tz.unsharded(run.model):
            way(run.model.head.weight)
        train_both([("", run)], plain, 1)
        with tz.unsharded(run.model, write=True):
            way(run.model.head.weight)
        way(plain.model.head.weight)
        with torch.no_grad():
            plain.masters[plain.model.head.weight].copy_(plain.model.head.weight)
        train_both([("", run)], plain, 2)


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_on_weights(dtype: torch.dtype, backward_inside: bool, tmp_path: Path) -> None:
    """A sum of norms inside `unsharded`, added to the loss: gradients reach the weights, inside or afterwards (M2)."""

    def penalty(model: nn.Module) -> torch.Tensor:
        return sum(param.float().norm() for param in model.parameters())  # type: ignore[return-value]

    with pair(tmp_path, dtype=dtype, spare=1 << 15) as (plain, run):
        for ids in batches(3):
            expected = loss_of(plain.model, ids) + 0.01 * penalty(plain.model)
            expected.backward()
            with tz.unsharded(run.model):
                loss = loss_of(run.model, ids) + 0.01 * penalty(run.model)
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                with torch.no_grad():
                    run.model(ids)  # other units come and go
                loss.backward()
            assert same(loss, expected)
            total, own = plain.step(0.5), run.step(0.5)
            assert own is not None
            assert total is not None
            assert same(own, total)
            plain.zero_grad()
            run.zero_grad()


def test_one_unit_after_another(tmp_path: Path) -> None:
    """The same, a unit at a time in the smallest budget, with one backward for all."""
    with pair(tmp_path) as (plain, run):
        for ids in batches(2):
            losses = []
            for each in (plain, run):
                loss = loss_of(each.model, ids)
                for layer in each.model.layers:
                    if each is plain:
                        loss = loss + 0.1 * layer.up.weight.norm() * layer.down.weight.abs().sum()
                    else:
                        with tz.unsharded(layer):
                            loss = loss + 0.1 * layer.up.weight.norm() * layer.down.weight.abs().sum()
                loss.backward()
                losses.append(loss)
                each.step()
                each.zero_grad()
            assert same(*losses)
