"""How a save finds its pace: what it does about training that waits for the drive, on a clock that the test sets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from models import Net
from oracle import batches, loss_of, make, tiered, tiers_for

import tierzero as tz
from tierzero.checkpoint.pace import SHARE, Pace
from tierzero.monitoring.metrics import DriveTotals, Metrics


class Beside:
    """Training whose waits and whose drive's busy seconds are told."""

    def __init__(self) -> None:
        self.now, self.busy, self.waiting = 100.0, 0.0, 0
        self.metrics = Metrics()
        self.metrics.drives = lambda: DriveTotals(read_ns=int(self.busy * 1e9))
        self.pace = Pace(self.metrics, lambda: bool(self.waiting), now=lambda: self.now)

    def window(self, *, waits: float, busy: float) -> float:
        """A second in which training waits and its drive is busy for these shares; the rest after it."""
        self.now += 1.0
        self.metrics.add("stall_update_s", waits)
        self.busy += busy
        self.pace.judge()
        return self.pace.rest


def test_the_drive_is_the_bottleneck() -> None:
    """It begins slowly, stays so, goes to full speed when training waits no more, and rests again when it does."""
    beside, most = Beside(), pytest.approx((1 - SHARE) / SHARE)
    assert beside.pace.rest == most
    assert [beside.window(waits=0.6, busy=0.9) for _ in range(3)] == [most] * 3
    faster = [beside.window(waits=0.0, busy=0.9) for _ in range(12)]
    assert faster == sorted(faster, reverse=True)
    assert faster[-1] == 0
    slower = [beside.window(waits=0.6, busy=0.9) for _ in range(8)]
    assert slower == sorted(slower)
    assert slower[0] >= 1
    assert slower[-1] == slower[-2] == most


@pytest.mark.parametrize(("waits", "busy"), [(0.0, 1.0), (0.01, 1.0), (0.9, 0.1)])
def test_what_is_no_business_of_a_save(waits: float, busy: float) -> None:
    """A busy drive that nobody waits for, and waits for something else."""
    beside = Beside()
    assert [beside.window(waits=waits, busy=busy) for _ in range(12)][-1] == 0


def test_somebody_waits_for_the_save() -> None:
    """Then it does not rest, however long it should have."""
    beside = Beside()
    for _ in range(8):
        beside.window(waits=1.0, busy=1.0)
    beside.waiting = 1
    asyncio.run(beside.pace.after(1e9, 1e9, 1))


@pytest.mark.parametrize(("limited", "expected"), [(False, 5.0), (True, 2.0)])
def test_a_limit_is_not_the_drives_time(limited: bool, expected: float) -> None:
    """What a buffer is taken to cost: its reading and writing, or its reading twice where its writing is held."""
    beside = Beside()
    pace = Pace(beside.metrics, lambda: False, limited, now=lambda: beside.now)
    pace.rest = 1.0
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        beside.now += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierzero.checkpoint.pace.asyncio.sleep", sleep)
        patch.setattr(pace, "judge", lambda: None)
        asyncio.run(pace.after(1.0, 4.0, 8 << 20))
    assert sum(slept) == pytest.approx(expected)


def test_beside_training(tmp_path: Path) -> None:
    """A save that rests while steps are taken is whole, and waiting for it ends the rest."""
    model = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        for ids in batches(2):
            loss_of(model, ids).backward()
            run.step()
            run.zero_grad()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        saving = tz.save(model, tmp_path / "save", run.optimizer)
        for ids in batches(3, seed=1):
            loss_of(model, ids).backward()
            run.step()
            run.zero_grad()
        tz.load(model, saving.result(), run.optimizer)
        assert all((model.state_dict()[name].clone() == value).all() for name, value in expected.items())
