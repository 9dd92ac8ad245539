"""Modules called without their unit's, and inputs that are passed on as outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import DIM, Block
from oracle import Plain, assert_same, make, same, tiered, tiers_for
from torch import nn
from torch.utils.checkpoint import checkpoint

import tierzero as tz
from tierzero.autograd.entrances import entrances

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class Tower(nn.Module):
    """Blocks, with a norm of its own that belongs to the whole model's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(DIM)

    def forward(self, h: torch.Tensor, deep: int = 0) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h)
        return self(self.norm(h), deep - 1) if deep else self.norm(h)  # type: ignore[no-any-return]


class Towers(nn.Module):
    """Two towers under one roof, and a projection of both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()
        self.project = nn.Linear(DIM, DIM)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.project(self.left(h)) + self.right(h)  # type: ignore[no-any-return]


class Biased(nn.Module):
    """The first block makes a bias that all blocks use and hand on, each inside a checkpoint of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Handing(index == 0, reentrant) for index in range(4)])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        bias = None
        for layer in self.layers:
            h, bias = layer(h, bias)
        return h


class _Handing(nn.Module):
    def __init__(self, first: bool, reentrant: bool) -> None:
        super().__init__()
        self.bias = nn.Linear(DIM, DIM) if first else None
        self.before, self.after = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.reentrant = reentrant

    def forward(self, h: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return checkpoint(self._run, h, bias, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def _run(self, h: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.before(h)
        if self.bias is not None:
            bias = self.bias(h).tanh()
        assert bias is not None
        return h + self.after(torch.softmax(key + bias, -1) * h), bias


LOSSES: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "one tower": lambda model, h: model.left(h).square().mean(),
    "both by hand": lambda model, h: (model.project(model.left(h)) + model.right(h)).square().mean(),
    "a projection": lambda model, h: model.project(h).square().mean(),
    "one inside itself": lambda model, h: model.left(h, 2).square().mean(),
    "one, and the whole": lambda model, h: (model.left(h) * model(h)).mean(),
    "without gradients first": lambda model, h: model(_frozen(model.left, h)).square().mean(),
}


def _frozen(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LOSSES)
def test_called_without_the_whole(name: str, tmp_path: Path) -> None:
    """Losses, gradients and weights as in plain PyTorch, at the smallest device budget."""
    model = make(Towers)
    plain = Plain(copy.deepcopy(model))
    generator = torch.Generator().manual_seed(1)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        for step in range(4):
            h = torch.randn(2, 3, DIM, generator=generator)
            values = [LOSSES[name](each, h) for each in (plain.model, model)]
            for value in values:
                value.backward()
            assert same(*values), step
            assert_same(run, plain, str(step), grads=True)
            for each in (plain, run):
                each.step(0.1)  # type: ignore[attr-defined]
                each.zero_grad()  # type: ignore[attr-defined]
        assert_same(run, plain)


def test_an_exception_in_one(tmp_path: Path) -> None:
    """What a tower raises leaves nothing in use, and it runs afterwards."""
    model = make(Towers)
    plain = copy.deepcopy(model)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        with pytest.raises(RuntimeError, match=r"size|shape"):
            model.left(torch.ones(1, 3, DIM + 1))  # type: ignore[operator]
        run.check_pools()
        with torch.no_grad():
            h = torch.ones(1, 3, DIM)
            assert same(model.left(h), plain.left(h))  # type: ignore[operator]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_an_output_that_is_an_input(reentrant: bool, tmp_path: Path) -> None:
    """Its gradient takes no bytes away from the block whose backward it arrives in."""
    model = make(lambda: Biased(reentrant))
    plain = Plain(copy.deepcopy(model))
    generator = torch.Generator().manual_seed(1)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        for step in range(3):
            h = torch.randn(2, 3, DIM, generator=generator).requires_grad_()
            for each in (plain, run):
                each.model(h).square().mean().backward()  # type: ignore[attr-defined]
            assert_same(run, plain, str(step), grads=True)
            for each in (plain, run):
                each.step(0.1)  # type: ignore[attr-defined]
                each.zero_grad()  # type: ignore[attr-defined]
        assert reentrant or tz.stats(model)["forced_evictions"] == 0  # a reentrant checkpoint hands on copies


def test_which_modules_are_entrances() -> None:
    """Those that need what the unit around them holds, inside it and outside the units in it; no containers."""
    model = Towers()
    units = [model, *model.left.layers, *model.right.layers]
    held = [{id(model.left.norm), id(model.project), id(model.right.norm)}, *({id(unit)} for unit in units[1:])]
    found = entrances(units, held)
    assert [type(module) for module in found[0]] == [nn.LayerNorm, Tower, nn.LayerNorm, Tower, nn.Linear]
    assert found[1:] == [[]] * 6
    assert entrances(units, [set()] * 7) == [[]] * 7
    assert entrances([model], [{id(model.project)}]) == [[]]
