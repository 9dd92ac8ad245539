"""Two offloaded models in one process, in two threads: neither waits for the other, and both are the plain ones."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from models import SHAPES, Net
from oracle import Plain, Tiered, assert_same, batches, loss_of, make, same, tiered, tiers_for

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


def train(run: Tiered | Plain, seed: int, losses: list[torch.Tensor], turn: threading.Barrier | None) -> None:
    """Twelve steps; `turn` brings the others to each boundary at the same time."""
    for ids in batches(12, seed):
        loss = loss_of(run.model, ids)
        if turn is not None:
            turn.wait(60)
        loss.backward()
        losses.append(loss.detach())
        if turn is not None:
            turn.wait(60)
        run.step(0.7)
        run.zero_grad()


@pytest.mark.parametrize("together", [True, False], ids=["in step", "as they come"])
@pytest.mark.parametrize("shapes", [("plain", "plain"), ("checkpoint", "branch")], ids="-".join)
def test_two_models_in_two_threads(shapes: tuple[str, str], together: bool, tmp_path: Path) -> None:
    """Each has its own budgets, the smallest that work, and stays within them."""
    barrier = threading.Barrier(2) if together else None
    with ExitStack() as stack:
        runs = []
        for index, shape in enumerate(shapes):
            model = make(SHAPES[shape], seed=index)
            tiers = tiers_for(model, ("nvme", "mixed")[index], tmp_path / str(index))
            runs.append(stack.enter_context(tiered(model, tiers)))
        losses: list[list[torch.Tensor]] = [[], []]
        threads = [
            threading.Thread(target=train, args=(run, index, losses[index], barrier)) for index, run in enumerate(runs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "they wait for each other"
        for index, (shape, run) in enumerate(zip(shapes, runs, strict=True)):
            plain = Plain(make(SHAPES[shape], seed=index))
            expected: list[torch.Tensor] = []
            train(plain, index, expected, None)
            assert len(losses[index]) == len(expected)
            assert all(same(a, b) for a, b in zip(losses[index], expected, strict=True))
            assert_same(run, plain)


def test_backward_in_another_thread(tmp_path: Path) -> None:
    """The graph of one thread may be walked by another, while a second model runs in the first."""
    plains = [Plain(make(Net, seed=seed)) for seed in (0, 1)]
    with ExitStack() as stack:
        runs = []
        for index in range(2):
            model = make(Net, seed=index)
            runs.append(stack.enter_context(tiered(model, tiers_for(model, "nvme", tmp_path / str(index)))))
        for ids in batches(6):
            losses = [loss_of(run.model, ids) for run in runs]
            other = threading.Thread(target=losses[0].backward)
            other.start()
            losses[1].backward()
            other.join(120)
            assert not other.is_alive()
            for run, plain, loss in zip(runs, plains, losses, strict=True):
                expected = loss_of(plain.model, ids)
                expected.backward()
                assert same(loss, expected)
                for each in (run, plain):
                    each.step()
                    each.zero_grad()
        for run, plain in zip(runs, plains, strict=True):
            assert_same(run, plain)
            assert tz.stats(run.model)["device_peak"] <= tz.stats(run.model)["device_budget"]
