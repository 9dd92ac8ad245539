"""A forward waits for its parameters alone, not for the optimizer state that is still being written."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drives import LoopDrive, loop_drive, memory_drive
from models import Net
from oracle import Plain, Tiered, assert_same, batches, loss_of, make, same, tiered
from pairs import backward_both, step_both
from torch import nn

import tierzero as tz
from tierzero.native import NATIVE

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="the portable step has one stage"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[LoopDrive]:
    with memory_drive(tmp_path / "memory", "size=96m") as memory, loop_drive(memory, 64 << 20) as drive:
        yield drive


@contextmanager
def states_on(
    directory: Path, overlap: str, dtype: torch.dtype = torch.bfloat16, factory: Any = Net
) -> Iterator[tuple[Plain, Tiered]]:
    """The plain loop, and one with its states on the drive and everything else in host memory."""
    plain, model = Plain(make(factory, dtype)), make(factory, dtype)
    ample = tz.plan(model, tz.Tiers(nvme=directory, host="1GiB", device="1GiB", compute="cpu"))
    host = ample.grad_bytes + ample.param_host + ample.buffer_bytes
    tiers = tz.Tiers(nvme=directory, host=host, device=ample.device_needed, compute="cpu")
    with tiered(model, tiers, overlap=overlap) as run:
        placement = run.engine.placement
        assert all(placement.param_host)
        assert not any(placement.state_host)
        yield plain, run
        assert_same(run, plain)


class Two(nn.Module):
    """Fewer units than updates that may be on their way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().sum()


def input_of(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("overlap", ["deferred", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_drive_that_takes_no_writes(drive: LoopDrive, overlap: str, dtype: torch.dtype) -> None:
    """Forwards go on while it does not; the next backward waits for it."""
    with states_on(drive.where, overlap, dtype, Two) as (plain, run):
        for seed in range(3):
            for each in (plain, run):
                each.model(input_of(seed, dtype)).backward()
                each.step()
                each.zero_grad()
        tz.synchronize(run.model)
        drive.freeze()
        watchdog = threading.Timer(20, drive.thaw)  # what waits for the drive would wait for ever
        watchdog.start()
        for each in (plain, run):
            each.model(input_of(3, dtype)).backward()
            each.step()
            each.zero_grad()
        losses = [each.model(input_of(4, dtype)) for each in (plain, run)]
        assert same(losses[0].detach(), losses[1].detach())
        watchdog.cancel()
        assert drive.frozen, "something waited for the drive"
        assert all(unit.pending is not None for unit in run.engine.units if unit.state is not None)
        drive.thaw()
        for each, loss in zip((plain, run), losses, strict=True):
            loss.backward()
            each.step()
            each.zero_grad()


class Fails:
    """The native update of one unit, which fails `times` times when everything is computed and written."""

    def __init__(self, run: Tiered, name: str, times: int) -> None:
        self.inner, self.name, self.times = run.engine.streamed._native, name, times

    async def __call__(self, unit: Any, *args: Any, **where: Any) -> Any:
        sums = await self.inner(unit, *args, **where)
        if unit.name == self.name and self.times:
            self.times -= 1
            raise OSError(errno.EIO, "the drive is broken (injected)", "/somewhere")
        return sums


@pytest.mark.parametrize("overlap", ["deferred", "eager"])
def test_writing_fails_once(tmp_path: Path, overlap: str) -> None:
    """The forward has gone on with the new parameters; whoever comes for the gradient buffer does the update again."""
    with states_on(tmp_path, overlap) as (plain, run):
        step_both(plain, run, next(batches(1)))
        tz.synchronize(run.model)
        run.engine.streamed._native = fails = Fails(run, "layers.1", 1)
        for seed in range(3):
            step_both(plain, run, next(batches(1, seed=seed)))
        tz.synchronize(run.model)
        assert not fails.times


@pytest.mark.parametrize("overlap", ["deferred", "eager"])
def test_writing_fails_until_it_is_mended(tmp_path: Path, overlap: str) -> None:
    """The drive's error comes out where the state is needed, as often as that is tried, and nothing is lost."""
    with states_on(tmp_path, overlap) as (plain, run):
        step_both(plain, run, next(batches(1)))
        tz.synchronize(run.model)
        backward_both(plain, run, next(batches(1)))
        tz.synchronize(run.model)
        run.engine.streamed._native = fails = Fails(run, "layers.1", 1000)
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()
        ids = next(batches(1, seed=3))
        for _ in range(2):
            with pytest.raises(OSError, match="injected"):
                loss_of(run.model, ids).backward()
            run.model.zero_grad()
            with pytest.raises(OSError, match="injected"):
                tz.synchronize(run.model)
        assert fails.times < 1000
        fails.times = 0
        step_both(plain, run, ids)


class Slow:
    """Native updates whose ends come late, long after their parameters."""

    def __init__(self, run: Tiered) -> None:
        self.inner = run.engine.streamed._native

    async def __call__(self, *args: Any, **where: Any) -> Any:
        sums = await self.inner(*args, **where)
        await asyncio.sleep(0.05)
        return sums


def write_parameters(plain: Plain, run: Tiered) -> None:
    with tz.unsharded(run.model.layers[1], write=True), torch.no_grad():
        for param, other in zip(run.model.layers[1].parameters(), plain.model.layers[1].parameters(), strict=True):
            other.mul_(0.5)
            plain.masters[other].copy_(other)
            param.copy_(other)


def load_parameters(plain: Plain, run: Tiered) -> None:
    values = {name: value * 0.5 for name, value in plain.model.state_dict().items()}
    plain.model.load_state_dict(values)
    for param, master in plain.masters.items():
        master.data.copy_(param.detach())
    run.model.load_state_dict(values)


@pytest.mark.parametrize("overlap", ["deferred", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", [write_parameters, load_parameters])
def test_parameters_changed_while_states_are_written(
    tmp_path: Path, change: Any, dtype: torch.dtype, overlap: str
) -> None:
    with states_on(tmp_path, overlap, dtype) as (plain, run):
        for seed in range(2):
            step_both(plain, run, next(batches(1, seed=seed)))
        run.engine.streamed._native = Slow(run)
        for seed in range(3):
            step_both(plain, run, next(batches(1, seed=seed)))
            change(plain, run)
        assert_same(run, plain)
        step_both(plain, run, next(batches(1, seed=9)))
