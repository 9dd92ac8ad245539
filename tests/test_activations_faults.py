"""Activations on their way when something fails: errors are sentences, the next step is right, nothing is left."""

from __future__ import annotations

import dataclasses
import errno
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from activations import PAGE, moved_all, pair, usage, with_activations
from drives import memory_drive
from models import Net
from oracle import Plain, Tiered, batches, loss_of, make, same, tiered, train_both
from test_engine_errors import Trapped
from test_engine_signals import Alarm, Interrupt, interrupted, trial
from torch import nn

import tierzero as tz
from tierzero.errors import TierzeroError
from tierzero.native import NATIVE
from tierzero.tiers.base import open_block_file
from tierzero.tiers.faulty import Fault, FaultyFile

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_leaks", "small_activations_too"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_exceptions_at_random_points(checkpointed: bool, tmp_path: Path) -> None:
    """Fifty steps, two of three of them cut short in forward or backward; the others are the plain loop's."""
    rng = random.Random(3)
    with pair(tmp_path, lambda: Trapped(checkpointed)) as (plain, run):
        for step in range(50):
            where, position = rng.choice([("forward", 9), ("backward", 18)])
            error = rng.choice([ValueError, KeyboardInterrupt])
            at = rng.randrange(1, position + 1) if rng.random() < 0.66 else -1
            raised = []
            for each in (plain, run):
                trap: Any = each.model.trap
                trap.error = error
                setattr(trap, f"{where}_in", at)
                try:
                    loss_of(each.model, next(batches(1, seed=step))).backward()
                    raised.append(False)
                except error:
                    raised.append(True)
                trap.forward_in = trap.backward_in = -1
            assert raised[0] == raised[1]
            if raised[0]:
                if error is KeyboardInterrupt or rng.random() < 0.5:  # what it left is in the plain model's way
                    tz.reset(run.model)
                plain.zero_grad()
                run.zero_grad()
            else:
                plain.step(0.5)
                run.step(0.5)
                plain.zero_grad()
                run.zero_grad()
                run.check_pools()
        train_both([("at last", run)], plain, 1)


@pytest.fixture
def alarms() -> Iterator[list[type[BaseException]]]:
    """What the SIGALRM handler raises, in a list of one."""
    chosen: list[type[BaseException]] = [Alarm]

    def handler(*_: object) -> None:
        raise chosen[0]

    before = signal.signal(signal.SIGALRM, handler)
    yield chosen
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
@pytest.mark.parametrize("shape", ["plain", "checkpoint"])
def test_alarms_at_random_moments(shape: str, alarms: list[type[BaseException]], tmp_path: Path) -> None:
    """Signal handlers that raise anywhere; the pools are empty after each step."""
    rng = random.Random(shape)
    with pair(tmp_path, models.SHAPES[shape]) as (plain, run):
        data = batches(1000)
        train_both([("", run)], plain, 3)
        hits = 0
        for _ in range(120):
            alarms[0] = rng.choice([Alarm, Interrupt])
            hits += trial(
                plain, run, next(data), rng.uniform(1e-5, 0.05), 0 if shape == "checkpoint" else rng.choice([0, 1, 2])
            )
            if hits == 25:
                break
        assert hits > 5
        assert not interrupted(lambda: None, 10)


def spill_through(run: Tiered, plan: list[Fault]) -> list[FaultyFile]:
    """Put a faulty drive under the activations' file, before it is made."""
    assert run.engine.activations is not None
    spill = run.engine.activations.pool.spill
    assert spill is not None
    made: list[FaultyFile] = []

    def opened(*args: Any, **options: Any) -> FaultyFile:
        made.append(FaultyFile(open_block_file(*args, **options), plan))
        return made[-1]

    spill._opener = opened
    return made


@pytest.mark.parametrize("op", ["write", "read", "preallocate"])
def test_a_drive_that_fails(op: Any, tmp_path: Path) -> None:
    """The error has errno, a sentence and the path; nothing is left of that step, and when the drive works again the
    next one is right.
    """
    code = errno.ENOSPC if op == "preallocate" else errno.EIO
    plan = [Fault(op, 1, code=code, persistent=True)]
    with pair(tmp_path) as (plain, run):
        drive = spill_through(run, plan)
        for round_ in range(3):
            with pytest.raises(OSError, match="injected") as caught:
                loss_of(run.model, next(batches(1))).backward()
            assert caught.value.errno == code
            assert caught.value.filename
            del caught
            run.zero_grad()
            tz.reset(run.model)
            run.check_pools()
            plan.clear()
            train_both([(f"round {round_}", run)], plain, 1, seed=round_)
            run.check_pools()
            plan.append(
                Fault(op, 1, code=code, persistent=True) if op != "preallocate" else Fault("write", 1, persistent=True)
            )
            code = plan[0].code
        assert drive
        plan.clear()


def test_a_prefetch_that_fails_is_done_again(tmp_path: Path) -> None:
    """A read ahead of use that fails once costs time only."""
    plan: list[Fault] = []
    with pair(tmp_path, lambda: models.Shared(8, "non-reentrant")) as (plain, run):
        drive = spill_through(run, plan)
        train_both([("", run)], plain, 1)
        reads = drive[0].counts["read"]
        assert reads > 2
        lost = 0
        for nth in range(1, reads):
            plan[:] = [Fault("read", drive[0].counts["read"] + nth)]
            loss = loss_of(run.model, next(batches(1)))
            with suppress(OSError):  # it was one that backward waited for
                loss.backward()
                lost += 1
            plan.clear()
            run.zero_grad()
            del loss
        assert lost
        train_both([("", run)], plain, 2)


class Growing(nn.Module):
    """Saves a little more in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(24)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def test_a_drive_that_is_full(tmp_path: Path) -> None:
    """A real file system that runs out of space: ENOSPC says how much is missing and where, and a smaller batch goes
    on.
    """
    with memory_drive(tmp_path / "drive", "size=6m") as where:
        model, plain = make(Growing), make(Growing)
        with tiered(model, with_activations(model, "nvme", where / "tz", 1 << 20)) as run:
            for _ in range(2):
                with pytest.raises(OSError, match="no room for the record 'activations'") as caught:
                    model(torch.randn(16384, 8)).backward()
                assert caught.value.errno == errno.ENOSPC
                assert str(where) in str(caught.value.filename)
                del caught
                run.zero_grad()
                tz.reset(model)
                run.check_pools()
            small = torch.randn(4096, 8)
            loss, expected = model(small), plain(small)
            moved_all(run)
            assert usage(run)["activations_nvme"] > 0
            loss.backward()
            expected.backward()
            assert same(loss, expected)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert same(ours.grad.plain, theirs.grad)
            del loss
        assert list((where / "tz").iterdir()) == []


def test_shapes_that_change_reuse_the_space(tmp_path: Path) -> None:
    """Many steps of random batches take no more than the largest one did."""
    rng = random.Random(1)
    model = make(Growing)
    with tiered(model, with_activations(model, "nvme", tmp_path, 8 * PAGE)) as run:
        model(torch.randn(1024, 8)).backward()
        most = tz.stats(model)["activations_offloaded"] + 8 * PAGE  # how many of them spill is a matter of time
        assert run.engine.activations is not None
        file = run.engine.activations.pool.spill.file  # type: ignore[union-attr]
        assert file is not None
        size = file.size()
        for _ in range(30):
            model(torch.randn(rng.randrange(1, 1025), 8)).backward()
            run.engine.run(run.engine.activations.pool.drained())
        assert usage(run)["activations_nvme_peak"] <= most
        assert file.size() == size
        assert usage(run)["activations_host_peak"] <= 8 * PAGE


def test_backward_after_close(tmp_path: Path) -> None:
    """A graph that outlives the engine says what was wrong."""
    model = make(Net)
    with tiered(model, with_activations(model, "nvme", tmp_path, 2 * PAGE)) as run:
        graph = torch.tanh(loss_of(model, next(batches(1))))
        moved_all(run)
        run.check_pools = lambda: None  # type: ignore[method-assign]
    with pytest.raises(TierzeroError, match=r"closed by tierzero\.close"):
        graph.backward()


class Resized(Net):
    """Takes the bytes of a saved tensor away."""

    def body(self, h: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](h).exp()
        Resized.last = h
        return self.layers[1](h * 2)

    last: Any = None


def test_a_storage_that_is_resized(tmp_path: Path) -> None:
    """Reading its bytes would crash: it is a sentence, whether its copy was made or not."""
    with pair(tmp_path, Resized) as (plain, run):
        loss = loss_of(run.model, next(batches(1)))
        Resized.last.untyped_storage().resize_(0)
        try:
            loss.backward()  # its copy was made, and serves
        except TierzeroError as error:
            assert "was resized since" in str(error)  # noqa: PT017
        run.zero_grad()
        del loss
        Resized.last = None
        train_both([("", run)], plain, 1)
        Resized.last = None


@pytest.mark.skipif(NATIVE is None, reason="stripes need the native extension")
def test_several_drives(tmp_path: Path) -> None:
    """Activations are striped as the store is, and leave nothing."""
    model, plain = make(models.Checkpointed), Plain(make(models.Checkpointed))
    where = [tmp_path / "one", tmp_path / "two"]
    tiers = with_activations(model, "nvme", where[0], 2 * PAGE)
    tiers = dataclasses.replace(tiers, nvme=where, host=int(tiers.host) + (4 << 20))
    with tiered(model, tiers) as run:
        train_both([("striped", run)], plain, 2)
        assert tz.stats(model)["activations_read"] > 0
        assert run.engine.activations is not None
        assert len(run.engine.activations.pool.spill.paths) == 2  # type: ignore[union-attr]
    assert [list(path.iterdir()) for path in where] == [[], []]


def test_what_is_too_large_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor that all the host memory for activations cannot hold is said once, and costs device memory only."""
    with pair(tmp_path, lambda: models.Net(block=Fat)) as (plain, run):
        train_both([("", run)], plain, 2)
        assert tz.stats(run.model)["activations_kept"] > 0
    said = [record.message for record in caplog.records if "stays on the device" in record.message]
    assert len(said) == 1
    assert "24.0 KiB" in said[0]
    assert "8.0 KiB" in said[0]


class Fat(models.Block):
    """Saves something large in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + self.inner(x) + torch.tanh(x.sum() + torch.ones(6144)).sum()


def test_a_crash_leaves_nothing(tmp_path: Path) -> None:
    """What the portable tier of a killed process left is gone when the next run begins."""
    model = make(Net)
    (tmp_path / "activations.tmp").write_bytes(b"left")
    with tiered(model, with_activations(model, "nvme", tmp_path, 2 * PAGE)):
        assert not (tmp_path / "activations.tmp").exists()


def test_without_the_extension(portable: None, tmp_path: Path) -> None:
    with pair(tmp_path, models.Checkpointed) as (plain, run):
        train_both([("", run)], plain, 2)
        assert tz.stats(run.model)["activations_read"] > 0
        assert (tmp_path / "activations.tmp").exists()
    assert not (tmp_path / "activations.tmp").exists()
