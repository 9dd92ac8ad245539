"""Micro-batches inside a unit: when they run, what is kept for backward, errors, and taking them off again."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import DIM, Block, Net
from oracle import Tiered, assert_same, batches, collected, loss_of, make, same, tiered, tiers_for
from pieces import both, train

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class CountingBlock(Block):
    """Notes the rows of every call."""

    seen: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.seen.append(len(x))
        return super().forward(x)


def test_evaluation_is_not_cut(tmp_path: Path) -> None:
    """Without gradients, and in evaluation, a unit runs the whole batch at once; in training it runs pieces twice."""
    model = make(lambda: Net(blocks=1, block=CountingBlock))
    plain = copy.deepcopy(model)
    plain.layers[0].seen = []  # type: ignore[union-attr, index]
    seen = model.layers[0].seen = []  # type: ignore[union-attr, index, var-annotated]
    with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=4), micro_batches=4) as run:
        ids = next(batches(1, shape=(8, 5)))
        with torch.no_grad():
            assert same(run.model(ids), plain(ids))
        run.model.eval()
        assert same(run.model(ids), plain.eval()(ids))
        loss_of(run.model, ids).backward()
        assert seen == [8, 8, 8]
        run.model.train()
        loss = loss_of(run.model, ids)
        assert seen[3:] == [2, 2, 2, 2, 2, 2]  # twice to see that rows are independent
        loss.backward()
        assert seen[9:] == [2, 2, 2, 2]
        del seen[:]
        loss_of(run.model, ids).backward()
        assert seen == [2] * 8


def test_only_arguments_are_kept(tmp_path: Path) -> None:
    """What autograd saves outside the offloaded weights passes through the hooks around: of a unit, its arguments."""
    kept: dict[int, list[tuple[int, ...]]] = {}
    for pieces in (1, 4):
        model = make(Net)
        shapes: list[tuple[int, ...]] = []

        def pack(tensor: torch.Tensor, shapes: list[tuple[int, ...]] = shapes) -> torch.Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor.detach()

        with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=pieces), micro_batches=pieces) as run:
            ids = next(batches(1, shape=(8, 5)))
            loss_of(run.model, ids).backward()  # the trial is over
            run.optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                value = loss_of(run.model, ids)
            value.backward()
            kept[pieces] = shapes
    inside = [shape for shape in kept[4] if shape and shape[-1] in (DIM, 2 * DIM)]
    assert inside == [(8, 5, DIM)] * 3 + [(40, DIM)] * inside.count((40, DIM))
    assert inside.count((40, DIM)) <= 1  # the head's argument
    assert len(kept[1]) > len(kept[4]) + 6


def test_backward_twice(tmp_path: Path) -> None:
    """With retain_graph the pieces run again each time; without it the second backward is refused as always."""
    with both(Net, 4, tmp_path) as (run, fresh):
        ids = next(batches(1, shape=(8, 5)))
        for model in (fresh.model, run.model):
            loss = loss_of(model, ids)
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        assert_same(run, fresh, grads=True)


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_keeps_the_model(closed: bool, tmp_path: Path) -> None:
    """A graph goes with its loss, model and engine go with the last reference, closed or not."""
    model = make(Net)
    tiers = replace(tiers_for(model, "host", tmp_path, micro_batches=2), prefetch=0)
    run = Tiered(model, tiers, micro_batches=2)
    seen = []
    for ids in batches(2):
        state = model.embed(ids)
        seen.append(weakref.ref(state))
        loss = model.head(model.body(state)).sum()  # type: ignore[operator]
        if len(seen) == 1:
            loss.backward()
            run.step(1.0)
        del loss, state
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    loss_of(model, ids).backward()
    tz.synchronize(model)
    run.check_pools()
    if closed:
        tz.close(model)
    dead = [weakref.ref(thing) for thing in (model, run.optimizer, run.engine, model.layers[0], run.engine.units[0])]
    del model, run
    assert collected(*dead), [ref() for ref in dead]


class FailingBlock(Block):
    """Fails in the forward whose number `fails` counts down to."""

    fails = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        type(self).fails -= 1
        if type(self).fails == 0:
            raise ValueError("a piece failed")
        return super().forward(x)


@pytest.mark.parametrize("at", [1, 3, 6, 12, 13, 15, 18, 24])
def test_errors(at: int, tmp_path: Path) -> None:
    """An error in any piece, in forward or in backward, leaves nothing behind; what follows equals the plain loop."""
    with both(lambda: Net(block=FailingBlock), 4, tmp_path) as (run, fresh):
        train(run, fresh, 1)
        FailingBlock.fails = at
        with pytest.raises(ValueError, match="a piece failed") as caught:
            loss_of(run.model, next(batches(1, shape=(8, 5)))).backward()
        FailingBlock.fails = -1
        assert any("ran a piece of its batch of 8 rows" in note for note in caught.value.__notes__)
        run.optimizer.zero_grad()
        run.model(next(batches(1)))  # the next forward of the root tidies up
        run.check_pools()
        train(run, fresh, 2)


def test_modules_get_their_forward_back(tmp_path: Path) -> None:
    """A forward set on the instance survives, copies share nothing, signatures stay."""
    model = make(Net)
    model.layers[0].forward = first = lambda x: Block.forward(model.layers[0], x, scale=0.5)  # type: ignore[index]
    ids = next(batches(1, shape=(8, 5)))
    plain = copy.deepcopy(model)
    plain.layers[0].forward = lambda x: Block.forward(plain.layers[0], x, scale=0.5)  # type: ignore[index]
    with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=2), micro_batches=2) as run:
        assert list(inspect.signature(model.layers[1].forward).parameters) == ["x", "scale"]  # type: ignore[index]
        copied = copy.deepcopy(model.layers[1])  # type: ignore[index]
        x = torch.randn(2, 5, DIM)
        assert same(copied(x), plain.layers[1](x))  # type: ignore[index, operator]
        with torch.no_grad():
            assert same(run.model(ids), plain(ids))
        loss_of(run.model, ids).backward()
    assert model.layers[0].forward is first  # type: ignore[index]
    assert "forward" not in model.layers[1].__dict__  # type: ignore[index]
