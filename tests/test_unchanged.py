"""Data that did not change is not written: a snapshot takes the extents of the one before it once more."""

from __future__ import annotations

import errno
from pathlib import Path

import models
import pytest
import torch
from oracle import HYPER, Plain, Tiered, assert_same, batches, loss_of, make, tiered, tiers_for, train_both
from torch import nn

import tierzero as tz
from tierzero.tiers.faulty import Fault, FaultyFile

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class Drive(FaultyFile):
    """A faulty drive that the native step still finds its file behind."""

    @property
    def native(self) -> object:
        return self.inner.native  # type: ignore[attr-defined]


class Noted(nn.Module):
    """A model with a buffer beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = models.Net()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(ids)
        return out


def written(run: Tiered) -> int:
    """Bytes written to the data file so far."""
    return int(run.engine.store.file.bytes_written)


def cost(run: Tiered, name: str) -> int:
    """Bytes that a snapshot writes into the data file."""
    tz.synchronize(run.model)
    before = written(run)
    tz.snapshot(run.model, run.optimizer, name)
    return written(run) - before


def one_step(run: Tiered, ids: torch.Tensor) -> None:
    loss_of(run.model, ids).backward()
    run.step()
    run.zero_grad()


@pytest.mark.parametrize("placement", ["nvme", "mixed"])
@pytest.mark.parametrize("shape", ["plain", "lora", "buffers"])
def test_a_second_snapshot_writes_nothing(shape: str, placement: str, tmp_path: Path) -> None:
    factory = Noted if shape == "buffers" else models.SHAPES[shape]
    model, plain = make(factory), Plain(make(factory))
    with tiered(model, tiers_for(model, placement, tmp_path)) as run:
        train_both([("", run)], plain, 2)
        first = cost(run, "one")
        if placement == "mixed":
            assert first > 0
        assert cost(run, "two") == 0
        assert cost(run, "three") == 0
        train_both([("", run)], plain, 1, seed=5)
        cost(run, "four")
        assert cost(run, "five") == 0
    again = tz.offload(make(factory, seed=9), tiers_for(model, placement, tmp_path), resume="five")
    back = Tiered.__new__(Tiered)
    back.model, back.optimizer, back.engine = again, tz.AdamW(again.parameters(), **HYPER), tz.api.engine_of(again)
    try:
        tz.restore(again, back.optimizer)
        assert_same(back, plain, "after resume")
        assert cost(back, "six") == 0  # what was read from the snapshot is still there
        train_both([("", back)], plain, 1, seed=6)
        assert cost(back, "seven") >= 0
        assert_same(back, plain, "and a step")
    finally:
        tz.close(again)


def test_frozen_parameters_in_host_memory_are_written_once(tmp_path: Path) -> None:
    model = make(models.SHAPES["lora"])
    with tiered(model, tz.Tiers(nvme=tmp_path, host="256MiB", device="64MiB", compute="cpu")) as run:
        units = run.engine.units
        frozen = sum(unit.records["frozen"].nbytes for unit in units if "frozen" in unit.records)
        assert frozen
        for ids in batches(1):
            one_step(run, ids)
        everything = cost(run, "one")
        for step, ids in enumerate(batches(3, seed=2)):
            one_step(run, ids)
            assert 0 < cost(run, f"two {step}") <= everything - frozen
        assert run.engine.store.resumed is None


def test_every_way_of_changing_data_is_seen(tmp_path: Path) -> None:
    model = make(Noted)
    with tiered(model, tz.Tiers(nvme=tmp_path, host="256MiB", device="64MiB", compute="cpu")) as run:
        param = model.net.head.weight
        state = run.optimizer.state[param]

        def unsharded() -> None:
            with tz.unsharded(model.net.head, write=True), torch.no_grad():
                model.net.head.weight.add_(1.0)

        def load() -> None:
            model.load_state_dict({**model.state_dict(), "net.head.weight": torch.full(param.shape, 3.0)})

        def buffer() -> None:
            model.seen.data.add_(1.0)  # which no version counter sees

        changes = {
            "unsharded": unsharded,
            "load_state_dict": load,
            "first moment": lambda: state["exp_avg"].copy_(torch.full(param.shape, 0.5)),
            "second moment": lambda: state["exp_avg_sq"].copy_(torch.full(param.shape, 0.25)),
            "step": lambda: one_step(run, next(batches(1))),
            "buffer": buffer,
        }
        cost(run, "start")
        for name, change in changes.items():
            assert cost(run, f"before {name}") == 0
            change()
            assert cost(run, name) > 0, name


def test_a_failed_snapshot_is_not_relied_on(tmp_path: Path) -> None:
    """What a snapshot wrote before it failed is written again, and the snapshot before it stays whole."""
    model, plain = make(Noted), Plain(make(Noted))
    tiers = tz.Tiers(nvme=tmp_path, host="256MiB", device="64MiB", compute="cpu")
    with tiered(model, tiers) as run:
        train_both([("", run)], plain, 1)
        cost(run, "one")
        train_both([("", run)], plain, 1, seed=2)
        store = run.engine.store
        store.file = drive = Drive(store.file)
        for op, nth in (("write", 2), ("sync", 1)):
            drive.counts = dict.fromkeys(drive.counts, 0)
            drive.plan[:] = [Fault(op, nth, code=errno.EIO)]  # type: ignore[arg-type]
            with pytest.raises(OSError, match="injected"):
                tz.snapshot(model, run.optimizer, "broken")
            assert set(store.current) == {name for name, _ in run.engine.disk_records()}
        drive.plan.clear()
        assert cost(run, "two") > 0
        assert cost(run, "three") == 0
        run.engine.run(store.verify())
    again = tz.offload(make(Noted, seed=3), tiers, resume="three")
    try:
        tz.restore(again, optimizer := tz.AdamW(again.parameters(), **HYPER))
        back = Tiered.__new__(Tiered)
        back.model, back.optimizer, back.engine = again, optimizer, tz.api.engine_of(again)
        assert_same(back, plain, "after resume")
    finally:
        tz.close(again)
