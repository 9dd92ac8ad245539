"""Whatever a loop does, the bytes of resident units never exceed the device budget, and the bits are the plain ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Plain, Tiered, assert_same, same, tiered
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class Vector(nn.Module):
    """One parameter of any size, all of which matters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        if fails:
            raise ValueError("on purpose")
        return torch.tanh(x * self.weight.mean() + self.weight[-1])


class Order(nn.Module):
    """Uses its units in the order that each call gives."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Vector(size) for size in sizes])

    def forward(self, order: Sequence[int], fails: bool = False) -> torch.Tensor:
        x = torch.ones(3)
        for count, index in enumerate(order):
            x = self.layers[index](x, fails and count == len(order) - 1)
        return x.sum()


@contextmanager
def watched(run: Tiered) -> Iterator[list[int]]:
    """The bytes that all units together really have on the device, at each moment when one of them gets some."""
    transfer: Any = run.engine.pager.transfer
    allocate, seen = transfer.allocate, [0]

    def noted(unit: Any) -> None:
        allocate(unit)
        seen.append(sum(each.flat.untyped_storage().nbytes() for each in run.engine.units))

    transfer.allocate = noted
    try:
        yield seen
    finally:
        del transfer.allocate


SIZES = st.lists(st.integers(1, 6000), min_size=1, max_size=7)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["train", "train", "train", "eval", "fail", "hold", "step"]),
        st.lists(st.integers(0, 6), min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(SIZES, st.integers(0, 60_000), st.one_of(st.just("auto"), st.integers(0, 3)), MOVES)
def test_residency_never_exceeds_the_budget_by_a_byte(sizes, spare, prefetch, moves) -> None:
    torch.manual_seed(0)
    plain = Plain(Order(sizes))
    model = copy.deepcopy(plain.model)
    units = list(model.layers)
    least = tz.plan(model, tz.Tiers(host="64MiB", device="64MiB", compute="cpu"), units=units).device_needed
    tiers = tz.Tiers(host="64MiB", device=least + spare, prefetch=prefetch, compute="cpu")
    with tiered(model, tiers, units=units) as run, watched(run) as seen:
        reserve = run.engine.placement.grad_reserve
        for kind, numbers in moves:
            order = [number % len(sizes) for number in numbers]
            if kind == "step":
                for each in (plain, run):
                    each.step()
                    each.zero_grad()
            elif kind == "hold":
                with tz.unsharded(model.layers[order[0]]):
                    assert same(model.layers[order[0]].weight, plain.model.layers[order[0]].weight)
            elif kind == "fail":
                for each in (plain, run):
                    with pytest.raises(ValueError, match="on purpose"):
                        each.model(order, fails=True)
            else:
                losses = []
                for each in (plain, run):
                    with torch.set_grad_enabled(kind == "train"):
                        losses.append(each.model(order))
                    if kind == "train":
                        losses[-1].backward()
                assert same(*losses)
        run.check_pools()
        assert max(seen) <= least + spare - reserve
        assert_same(run, plain, grads=True)
