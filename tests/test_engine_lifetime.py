"""What is held and for how long: memory, threads, files, and the model itself."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import models
import psutil
import pytest
import torch
from models import Net
from oracle import PLACEMENTS, Plain, Tiered, batches, collected, loss_of, make, tiered, tiers_for, train_both
from torch import nn

import tierzero as tz
from tierzero.api import engine_of
from tierzero.paging.pins import Pin
from tierzero.paging.states import State

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("closed", [True, False])
def test_nothing_keeps_the_model(closed: bool, placement: str, tmp_path: Path) -> None:
    """After del, closed or not, model, optimizer and engine are collected, whatever was in flight (N5)."""
    model = make(Net)
    tiers = tiers_for(model, placement, tmp_path)
    if not closed:  # a fetch on its way would keep the engine until it has arrived
        tiers = tz.Tiers(tiers.nvme, tiers.host, tiers.device, prefetch=0, compute="cpu")
    run = Tiered(model, tiers)
    kept = []
    for ids in batches(3):
        loss = loss_of(model, ids)
        loss.backward()
        kept.append(loss.detach())
        run.step(1.0)
        run.zero_grad()
    loss_of(model, ids).backward()  # gradients are left
    tz.synchronize(model)
    run.check_pools()  # and with that, nothing is left to do for the loop's thread
    if closed:
        tz.close(model)
    dead = [weakref.ref(thing) for thing in (model, run.optimizer, run.engine, model.layers[0], run.engine.units[0])]
    del model, run, loss
    assert collected(*dead), [ref() for ref in dead]


@pytest.mark.parametrize("shape", ["plain", "lora", "checkpoint", "dicts"])
def test_graphs_are_freed(shape: str, tmp_path: Path) -> None:
    """A graph goes with its loss, whether backward ran or not; no saved tensor keeps it."""
    model = make(models.SHAPES[shape])
    with tiered(model, tiers_for(model, "host", tmp_path)):
        model.zero_grad()
        loss_of(model, next(batches(1)))
        tz.synchronize(model)
        gc.collect()
        gc.disable()
        try:
            before = _tensors()
            for ids in batches(5):
                loss_of(model, ids)
            tz.synchronize(model)
            until = time.monotonic() + 10  # the loop's thread holds some in its hands for a moment; a graph stays
            while _tensors() - before > 2 and time.monotonic() < until:
                time.sleep(0.001)
            assert _tensors() - before <= 2
        finally:
            gc.enable()
        for ids in batches(2):
            loss_of(model, ids).backward()
            model.zero_grad()


def _tensors() -> int:
    return sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_memory_does_not_grow(placement: str, tmp_path: Path) -> None:
    """Two hundred steps hold no more than the first ones (R8, R12)."""
    model = make(Net)
    process = psutil.Process()
    with tiered(model, tiers_for(model, placement, tmp_path)) as run:

        def steps(count: int) -> int:
            for ids in batches(count):
                loss_of(model, ids).backward()
                run.step(0.5)
                run.zero_grad()
            tz.synchronize(model)
            gc.collect()
            return process.memory_info().rss

        objects = steps(40) and len(gc.get_objects())
        before = steps(20)
        after = steps(200)
        assert after - before < 8 << 20
        assert len(gc.get_objects()) - objects < 500


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_budgets_hold_and_bytes_add_up(placement: str, tmp_path: Path) -> None:
    """Peaks stay within budgets, bytes moved are what the parameters and gradients weigh, frozen weights are never
    written (P12).
    """
    model = make(models.LoRA, torch.bfloat16)
    plain = Plain(make(models.LoRA, torch.bfloat16))
    tiers = tiers_for(model, placement, tmp_path)
    with tiered(model, tiers) as run:
        train_both([("", run)], plain, 3)
        tz.synchronize(model)
        before = tz.stats(model)
        train_both([("", run)], plain, 4, seed=3)
        tz.synchronize(model)
        after = tz.stats(model)
        grads = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        assert after["d2h"] - before["d2h"] == 4 * grads
        assert after["device_peak"] <= after["device_budget"]
        assert after["host_peak"] <= after["host_budget"]
        writes = after["nvme_written_expected"] - before["nvme_written_expected"]
        engine = run.engine
        changing = sum(r.nbytes for u in engine.units for k, r in u.records.items() if k == "param" and r.on_disk)
        changing += sum(u.layout.state_bytes for u in engine.units if u.state is not None and u.state.on_disk)
        assert writes == 4 * changing
        for key in ("nvme_read", "nvme_written"):
            moved, expected = after[key] - before[key], after[f"{key}_expected"] - before[f"{key}_expected"]
            assert expected <= moved <= expected + 4096 * 400
        assert after["hits"] + after["misses"] > before["hits"] + before["misses"]


def test_everything_is_given_back(tmp_path: Path) -> None:
    """Closing frees device bytes, unlinks the data file and releases the directory for the next run."""
    for _ in range(3):
        model = make(Net)
        with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
            loss_of(model, next(batches(1))).backward()
            run.step()
            loss_of(model, next(batches(1)))
            assert any(unit.residency is not State.REST for unit in run.engine.units)
            assert (tmp_path / "data.bin").exists()
        assert run.engine.metrics.device_used == 0
        assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in run.engine.units)
        assert sorted(os.listdir(tmp_path)) == []
        tz.close(model)  # once more is harmless


def test_close_in_the_middle(tmp_path: Path) -> None:
    """Closing right after a step, a forward or a backward drains what is queued."""
    moments: list[Any] = [
        lambda model, run: None,
        lambda model, run: loss_of(model, next(batches(1))),
        lambda model, run: loss_of(model, next(batches(1))).backward(),
        lambda model, run: (loss_of(model, next(batches(1))).backward(), run.step(), run.zero_grad()),
    ]
    for index, moment in enumerate(moments):
        for placement in PLACEMENTS:
            model = make(Net)
            run = Tiered(model, tiers_for(model, placement, tmp_path / f"{index}{placement}"))
            result = moment(model, run)
            tz.close(model)
            if index == 1:
                with pytest.raises((tz.TierzeroError, RuntimeError)):
                    result.backward()


def test_published_gradients_outlive_the_engine(tmp_path: Path) -> None:
    """A gradient that the user kept is readable after close."""
    model, plain = make(Net), make(Net)
    run = Tiered(model, tiers_for(model, "host", tmp_path))
    ids = next(batches(1))
    for each in (model, plain):
        loss_of(each, ids).backward()
    kept = [param.grad for param in run.model.parameters()]
    tz.close(model)
    assert all(torch.equal(a + 0, p.grad) for a, p in zip(kept, plain.parameters(), strict=True))


def test_many_engines_at_once(tmp_path: Path) -> None:
    """Five models, each with its own store, trained in turns."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        runs = []
        for index in range(5):
            model = make(Net, seed=index)
            tiers = tiers_for(model, PLACEMENTS[index % 3], tmp_path / str(index))
            runs.append((stack.enter_context(tiered(model, tiers)), Plain(make(Net, seed=index))))
        for step in range(3):
            for run, plain in runs:
                train_both([(f"step {step}", run)], plain, 1, seed=step)


class Plenty(nn.Module):
    """Many small blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, models.DIM)
        self.layers = nn.ModuleList([nn.Linear(models.DIM, models.DIM) for _ in range(200)])
        self.head = nn.Linear(models.DIM, models.VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * 0.1
        return self.head(h)


def test_two_hundred_units(tmp_path: Path) -> None:
    """A deep stack under the smallest budgets."""
    model, plain = make(Plenty), Plain(make(Plenty))
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        train_both([("", run)], plain, 3, clip=lambda step, norm: norm * 0.5)
        assert tz.stats(model)["units"] >= 200


def test_a_forked_child_leaves_everything_to_its_parent(tmp_path: Path) -> None:
    """A child ends at once, and a read or a forward in it is a sentence; the parent goes on."""
    code = (
        "import os, sys, torch, tierzero as tz\n"
        "tiers = tz.Tiers(nvme=sys.argv[1], host='64MiB', device='1MiB')\n"
        "model = tz.offload(torch.nn.Sequential(torch.nn.Linear(4, 4)), tiers)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    said = 0\n"
        "    for use in (lambda: model[0].weight.clone(), lambda: model(torch.ones(1, 4))):\n"
        "        try:\n"
        "            use()\n"
        "        except tz.TierzeroError as error:\n"
        "            said += 'forked child' in str(error)\n"
        "    sys.exit(7 if said == 2 else 8)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "assert model(torch.ones(1, 4)).shape == (1, 4)\n"
        "tz.close(model)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path / "store")], check=True, timeout=120)


def test_a_pin_that_nobody_gives_back(tmp_path: Path) -> None:
    """An exception from a signal may come between pinning a unit and doing anything about it."""
    model = make(Net)
    tz.offload(model, tiers_for(model, "nvme", tmp_path / "store"))
    units = engine_of(model).units
    pin = Pin()
    units[0].pins.add(pin)
    units[1].pins.add(Pin())  # gone at once
    assert [len(unit.pins) for unit in units[:2]] == [1, 0]
    (batch,) = batches(1)
    first = loss_of(model, batch)
    assert torch.equal(first, loss_of(model, batch))
    assert len(units[0].pins) == 0
    tz.close(model)


def test_an_eviction_that_meets_a_pin_is_taken_back(tmp_path: Path) -> None:
    """Whoever pins first keeps the bytes; afterwards they may go."""
    with tiered(make(Net), tiers_for(make(Net), "nvme", tmp_path / "store")) as run:
        residency = run.engine.pager.residency
        unit, pin = run.engine.units[0], Pin()
        run.engine.pager.acquire(unit, pin, record=False)
        assert not run.engine.loop.do(lambda: residency._evict(unit))
        assert unit.residency is State.READY
        run.engine.loop.do(lambda: residency.stale(unit))
        assert unit.residency is State.READY
        run.engine.pager.release(unit, pin)
        run.engine.pager.release(unit, pin)  # as often as one likes
        run.engine.pager.mark_stale(unit)
        assert unit.residency is not State.READY or unit.prefetched
