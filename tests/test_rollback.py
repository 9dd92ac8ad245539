"""Going back to the latest snapshot in a running process: the steps after it are those of the first time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed
from frozen import contents_of, differing
from models import SHAPES, Net
from oracle import HYPER, Plain, Tiered, assert_same, batches, loss_of, make, same, tiered, tiers_for, train_both
from other_optimizers import Lion, fitted
from pairs import pair
from test_overlap import tiers_of
from test_state_formats import FORMATS
from test_state_formats import tiers as format_tiers
from test_unchanged import Noted
from torch import optim

import tierzero as tz
from tierzero.native import NATIVE

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
native = pytest.mark.skipif(NATIVE is None, reason="needs the native extension")


def train(run: Any, seed: int, steps: int = 3, accumulate: int = 1) -> list[torch.Tensor]:
    """The losses of a loop that clips every other step."""
    losses: list[torch.Tensor] = []
    data = batches(steps * accumulate, seed)
    for step in range(steps):
        for _ in range(accumulate):
            loss = loss_of(run.model, next(data))
            loss.backward()
            losses.append(loss.detach())
        run.step(0.5 if step % 2 else None)
        run.zero_grad()
    return losses


def check(run: Any, **options: Any) -> None:
    """Train, snapshot, train, and go back, twice: the steps are the same ones, and so is everything they leave."""
    train(run, 1, **options)
    tz.snapshot(run.model, run.optimizer, "here", {"step": 3, "list": [1, 2]})
    at = contents_of(run)
    losses = train(run, 2, **options)
    after = contents_of(run)
    for round_ in range(2):
        loss_of(run.model, next(batches(1, 7))).backward()
        if round_:  # a queued step is given up, and what has been accumulated
            run.step()
            loss_of(run.model, next(batches(1, 8))).backward()
        meta = tz.rollback(run.model, run.optimizer)
        assert meta == {"step": 3, "list": [1, 2]}
        meta["list"].clear()
        assert all(param.grad is None for param in run.model.parameters())
        assert differing(contents_of(run), at) == []
        assert all(map(same, train(run, 2, **options), losses))
        assert differing(contents_of(run), after) == []
    run.engine.run(run.engine.store.verify())


@native
@pytest.mark.parametrize(
    ("overlap", "placement", "accumulate"),
    crossed(["eager", "auto", "deferred"], ["nvme", "cached", "mixed"], two=(1, 2)),
)
def test_the_same_steps_again(overlap: str, placement: str, accumulate: int, tmp_path: Path) -> None:
    model = make(SHAPES["tied"], torch.float32 if accumulate == 1 else torch.bfloat16)
    with tiered(model, tiers_of(model, placement, tmp_path), overlap=overlap) as run:
        check(run, accumulate=accumulate)


def test_everything_in_host_memory(tmp_path: Path) -> None:
    model = make(SHAPES["lora"], torch.bfloat16)
    with tiered(model, tz.Tiers(nvme=tmp_path, host="256MiB", device="64MiB", compute="cpu")) as run:
        assert not any(unit.state is not None and unit.state.on_disk for unit in run.engine.units)
        check(run)


@native
@pytest.mark.parametrize("placement", ["nvme", "cached", "host"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_state_format(name: str, placement: str, tmp_path: Path) -> None:
    model = make(Net, torch.bfloat16)
    with tiered(model, format_tiers(model, placement, tmp_path, name), **FORMATS[name]) as run:
        check(run)


@pytest.mark.parametrize("placement", ["nvme", "mixed"])
@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, Lion])
def test_wrapped_optimizers(cls: Any, placement: str, tmp_path: Path) -> None:
    hyper = {"lr": 0.05, "momentum": 0.9} if cls is optim.SGD else {"lr": 1e-2}
    run = fitted(lambda: make(Net, torch.bfloat16), placement, tmp_path, cls, **hyper)
    try:
        tz.snapshot(run.model, run.optimizer)  # before there is any state
        first = train(run, 5)
        tz.rollback(run.model, run.optimizer)
        assert not run.optimizer.state
        assert all(map(same, train(run, 5), first))
        check(run)
        run.check_pools()
    finally:
        run.engine.close()


def test_the_portable_engine(portable: None, tmp_path: Path) -> None:
    for placement in ("nvme", "mixed"):
        model = make(Net)
        with tiered(model, tiers_for(model, placement, tmp_path / placement)) as run:
            check(run)


@pytest.mark.parametrize("placement", ["nvme", "mixed"])
def test_another_learning_rate_from_there(placement: str, tmp_path: Path) -> None:
    """A loss spike: back, and on with half the rate, as the plain loop does from a copy."""
    with pair(tmp_path, factory=Noted, placement=placement) as (plain, run):
        train_both([("", run)], plain, 2)
        tz.snapshot(run.model, run.optimizer, "good", {"step": 2})
        kept = copy.deepcopy(plain)
        run.model.seen.add_(1.0)
        for group in run.optimizer.param_groups:
            group["lr"] = 10.0
        train(run, 3)
        tz.rollback(run.model, run.optimizer)
        plain.__dict__.update(kept.__dict__)
        assert_same(run, plain, "back")
        for each in (plain, run):
            for group in each.optimizer.param_groups:
                assert group["lr"] == HYPER["lr"]
                group["lr"] *= 0.5
        train_both([("", run)], plain, 3, seed=4)


@pytest.mark.parametrize("placement", ["nvme", "mixed", "all"])
def test_only_what_lies_in_host_memory_is_read(placement: str, tmp_path: Path) -> None:
    """The counters: no byte for what is on NVMe, none written, none at all when nothing has changed; and a snapshot
    writes what has changed in host memory and nothing else.
    """
    model = make(Noted)
    tiers = tz.Tiers(nvme=tmp_path, host="256MiB", device="64MiB", compute="cpu")
    with tiered(model, tiers if placement == "all" else tiers_for(model, placement, tmp_path)) as run:
        train(run, 1)
        tz.snapshot(model, run.optimizer, "one")
        train(run, 2)
        tz.synchronize(model)
        units, homes = run.engine.units, run.engine.homes
        changed = homes.host_bytes(units, changed=True)
        assert (changed == 0) == (placement == "nvme")
        before = moved(run)
        tz.rollback(model, run.optimizer)
        read, written, expected = (now - then for now, then in zip(moved(run), before, strict=True))
        cached = [u for u in units if u.host_flat is not None and u.state.on_disk]  # parameters without their masters
        masters = sum(u.records["fp32"].nbytes for u in cached)
        buffers = run.engine.store.latest.records["buffers"][0].nbytes
        assert expected == changed + masters + buffers
        assert expected <= read < expected + 4096 * (1 + 2 * len(units))  # pages
        assert written == 0
        before = moved(run)
        tz.rollback(model, run.optimizer)
        assert moved(run)[2] - before[2] == buffers
        assert moved(run)[1] == before[1]
        train(run, 3)
        tz.synchronize(model)
        changed, before = homes.host_bytes(units, changed=True), moved(run)
        tz.snapshot(model, run.optimizer, "two")
        assert moved(run)[1] - before[1] == changed


def moved(run: Tiered) -> tuple[int, int, float]:
    """(bytes read from the data file, bytes written to it, bytes that should have been read), after fetches."""
    file = run.engine.store.file
    return file.bytes_read, file.bytes_written, tz.stats(run.model)["nvme_read_expected"]


def test_an_optimizer_that_is_younger_than_the_snapshot(tmp_path: Path) -> None:
    for placement in ("nvme", "mixed"):
        for dtype in (torch.float32, torch.bfloat16):
            model, plain = make(Net, dtype), Plain(make(Net, dtype))
            tz.offload(model, tiers_for(model, placement, tmp_path / f"{placement} {dtype}"))
            tz.snapshot(model)
            run = Tiered.__new__(Tiered)
            run.model, run.optimizer, run.engine = model, tz.AdamW(model.parameters(), **HYPER), tz.api.engine_of(model)
            try:
                train(run, 2)
                tz.rollback(model)
                assert_same(run, plain, "back")
                train_both([("", run)], plain, 2)
                assert_same(run, plain)
                run.check_pools()
            finally:
                tz.close(model)
