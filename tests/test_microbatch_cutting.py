"""Micro-batches inside a unit: how many there may be, the budget they need, and how values are cut and put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import DIM, Net
from oracle import make, same
from pieces import slices
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import tierzero as tz
from tierzero.autograd.rows import Arguments, Results, sizes_of

usual = pytest.mark.usefixtures("one_thread", "no_leaks")


class Flat(nn.Module):
    """No stack at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)


@pytest.mark.parametrize("pieces", [0, -1, 1.5, True, "2", None])
def test_numbers(pieces: Any, tmp_path: Path) -> None:
    """Only whole numbers from 1 on."""
    tiers = tz.Tiers(host="64MiB", device="1MiB", compute="cpu")
    for function in (tz.offload, tz.plan):
        with pytest.raises(ValueError, match="is not a number of pieces"):
            function(Net(), tiers, micro_batches=pieces)  # type: ignore[operator]


def test_nothing_to_cut() -> None:
    """A model without repeated units, or whose units are around others, has nothing to cut; 1 is fine."""
    tiers = tz.Tiers(host="64MiB", device="1MiB", compute="cpu")
    with pytest.raises(tz.TierzeroError, match="Flat has no element of a ModuleList or Sequential"):
        tz.offload(Flat(), tiers, micro_batches=2)
    model = Net()
    with pytest.raises(tz.TierzeroError, match="has no unit to cut the batch in"):
        tz.offload(model, tiers, units=[model], micro_batches=2)
    tz.close(tz.offload(Flat(), tiers))


def test_device_budget(tmp_path: Path) -> None:
    """A block's gradients gather on the device, and the smallest budget counts them."""
    model = make(Net)
    tiers = tz.Tiers(host="64MiB", device="1MiB", compute="cpu")
    one, four = (tz.plan(model, tiers, micro_batches=pieces) for pieces in (1, 4))
    block = sum(param.nbytes for param in model.layers[0].parameters())  # type: ignore[index, union-attr]
    assert four.device_needed == one.device_needed + block
    with pytest.raises(tz.BudgetError, match=f"{four.device_needed} bytes"):
        tz.offload(model, tz.Tiers(host="64MiB", device=one.device_needed, compute="cpu"), micro_batches=4)
    assert (four.step_h2d, four.step_d2h) == (one.step_h2d, one.step_d2h)


@given(rows=st.integers(0, 40), pieces=st.integers(1, 20))
def test_sizes(rows: int, pieces: int) -> None:
    """All rows, in pieces as even as they can be, none empty, never more than asked for."""
    sizes = sizes_of(rows, pieces)
    assert sum(sizes) == rows
    assert len(sizes) == max(1, min(rows, pieces))
    assert max(sizes) - min(sizes) <= 1
    if rows:
        assert sizes == slices(rows, pieces)


shapes = st.sampled_from(["rows", "flat", "one", "table", "scalar"])
trees = st.recursive(
    shapes | st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


@given(tree=trees, rows=st.integers(2, 9), pieces=st.integers(2, 5))
def test_cut_and_together(tree: Any, rows: int, pieces: int) -> None:
    """What is cut and put together again is what it was, in any containers; the rest is passed as it is."""
    kinds = {"rows": (rows, 17), "one": (1, 17), "table": (11, 17), "scalar": (), "flat": (rows, 11, 17)}
    value = tree_map(lambda leaf: torch.randn(kinds[leaf]) if leaf in list(kinds) else leaf, tree)
    x = torch.randn(rows, 11, 17)
    arguments = Arguments("unit", (x, value), {"again": value}, pieces)
    tensors = arguments.tensors
    results = Results("unit", arguments.sizes)
    for start, count in zip(arguments.starts, arguments.sizes, strict=True):
        parts = arguments.take(tensors, start, count)
        args, kwargs = arguments.call(parts)
        assert all(leaf.shape[0] == count for leaf, cut in zip(parts, arguments.cut, strict=True) if cut)
        arguments.check_untouched((args, kwargs), parts)
        whole = [None if cut else part for part, cut in zip(parts, arguments.cut, strict=True)]
        results.keep(results.add((args, kwargs), whole))
    built = results.build(results.together(), tensors)
    mine, theirs = tree_leaves(built), tree_leaves(((x, value), {"again": value}))
    assert len(mine) == len(theirs)
    for own, given_leaf in zip(mine, theirs, strict=True):
        assert same(own, given_leaf) if isinstance(own, torch.Tensor) else own == given_leaf
