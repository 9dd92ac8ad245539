"""Going back when something fails, is in the way, or goes on."""

from __future__ import annotations

import asyncio
import copy
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen import Reader, assert_let_go, contents_of, differing
from models import SHAPES, Net
from oracle import HYPER, Plain, Tiered, assert_same, batches, loss_of, make, same, tiered, tiers_for, train_both
from pairs import pair
from test_rollback import train
from test_unchanged import Drive

import tierzero as tz
from tierzero.checkpoint.frozen import freeze
from tierzero.paging.updates import Update
from tierzero.tiers.faulty import Fault

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.mark.parametrize("placement", ["nvme", "mixed"])
def test_after_an_update_that_failed(placement: str, tmp_path: Path) -> None:
    with pair(tmp_path, placement=placement) as (plain, run):
        train_both([("", run)], plain, 2)
        tz.snapshot(run.model, run.optimizer)
        store = run.engine.store
        taking = store.allocate

        def full(nbytes: int, name: str) -> Any:
            raise OSError(errno.ENOSPC, f"no room for {name} (injected)", store.path)

        store.allocate = full
        loss_of(run.model, next(batches(1))).backward()
        run.step()
        with pytest.raises(OSError, match="injected"):
            tz.synchronize(run.model)
        tz.rollback(run.model, run.optimizer)
        assert_same(run, plain, "back")
        store.allocate = taking
        train_both([("", run)], plain, 2, seed=3)


def test_a_drive_that_fails_while_going_back(tmp_path: Path) -> None:
    """No unit is used with half of its values; called again, it goes on."""
    model, plain = make(Net), Plain(make(Net))
    with tiered(model, tz.Tiers(nvme=tmp_path, host="256MiB", device="64MiB", compute="cpu")) as run:
        train_both([("", run)], plain, 2)
        tz.snapshot(model, run.optimizer)
        train(run, 3)
        store = run.engine.store
        store.file = drive = Drive(store.file)
        drive.plan.append(Fault("read", 3, persistent=True))
        with pytest.raises(OSError, match="injected"):
            tz.rollback(model, run.optimizer)
        with pytest.raises(OSError, match="injected"):
            loss_of(model, next(batches(1)))
        drive.plan[:] = [Fault("read", 1, kind="corrupt", at=5, persistent=True)]
        with pytest.raises(tz.StoreCorruptError, match="does not match its checksum"):
            tz.rollback(model, run.optimizer)
        drive.plan.clear()
        tz.rollback(model, run.optimizer)
        assert_same(run, plain, "back")
        train_both([("", run)], plain, 1, seed=3)
        store.file = drive.inner


class Interrupted(Exception):
    pass


def test_after_a_backward_that_was_cut_short(tmp_path: Path) -> None:
    with pair(tmp_path, placement="mixed") as (plain, run):
        train_both([("", run)], plain, 2)
        tz.snapshot(run.model, run.optimizer)
        train(run, 3)

        def stop(grad: torch.Tensor) -> None:
            raise Interrupted

        hook = run.model.layers[0].up.weight.register_hook(stop)
        with pytest.raises(Interrupted):
            loss_of(run.model, next(batches(1))).backward()
        hook.remove()
        tz.rollback(run.model, run.optimizer)
        assert_same(run, plain, "back")
        train_both([("", run)], plain, 2, seed=3)


@pytest.mark.parametrize("placement", ["nvme", "mixed"])
def test_while_a_save_goes_on(placement: str, tmp_path: Path) -> None:
    """The save is of its own moment, with the update that was queued then."""
    with pair(tmp_path, placement=placement) as (plain, run):
        train_both([("", run)], plain, 2)
        tz.snapshot(run.model, run.optimizer)
        kept = copy.deepcopy(plain)
        train_both([("", run)], plain, 1, seed=2)
        reader = Reader(run.engine, freeze(run.engine))
        tz.rollback(run.model, run.optimizer)
        found = reader.finish()
        for name, param in plain.model.named_parameters():
            assert same(found[name, "param"], param.detach())
            assert same(found[name, "exp_avg"], plain.optimizer.state[plain.masters[param]]["exp_avg"])
        assert_let_go(run.engine)
        plain.__dict__.update(kept.__dict__)
        assert_same(run, plain, "back")
        train_both([("", run)], plain, 1, seed=3)


def test_refusals(tmp_path: Path) -> None:
    model = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "a")) as run:
        with pytest.raises(tz.StoreError, match="no snapshot to go back to"):
            tz.rollback(model, run.optimizer)
        wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
            ((run.optimizer, 5), TypeError, "name of a snapshot is a string, not int"),
            ((run.optimizer, ""), ValueError, "cannot be empty"),
            (("name",), TypeError, "optimizer must be an optimizer, a list of them or None, got str"),
            ((run.optimizer, "a", [1]), TypeError, "are a dict, not list"),
            ((run.optimizer, "a", {"engine": 1}), ValueError, "cannot have the key 'engine'"),
            ((run.optimizer, "a", {"rng": torch.zeros(1)}), TypeError, "must be JSON"),
        ]
        for arguments, error, text in wrong:
            with pytest.raises(error, match=text):
                tz.snapshot(model, *arguments)
        tz.snapshot(model, run.optimizer)
        with pytest.raises(ValueError, match="1 parameter groups and this optimizer 2"):
            tz.rollback(model, [run.optimizer, run.optimizer])
        with pytest.raises(TypeError, match="got int"):
            tz.rollback(model, 3)  # type: ignore[arg-type]
        with tz.unsharded(model.head), pytest.raises(tz.TierzeroError, match="go back outside of it"):
            tz.rollback(model, run.optimizer)
        tz.rollback(model)
    model = make(Net)
    with tiered(model, tiers_for(model, "host", tmp_path / "b")) as run:
        for call in (tz.snapshot, tz.rollback):
            with pytest.raises(tz.StoreError, match="nvme=DIRECTORY"):
                call(model, run.optimizer)


CHILD = """
import os, signal, sys
import torch
sys.path.insert(0, sys.argv[2])
from models import Net
from oracle import Tiered, make, tiers_for
from test_rollback import train
import tierzero as tz
torch.set_num_threads(1)
model = make(Net)
run = Tiered(model, tiers_for(model, "mixed", sys.argv[1]))
train(run, 1)
tz.snapshot(model, run.optimizer, "here", {"step": 3})
train(run, 2)
if sys.argv[3] != "before":
    tz.rollback(model, run.optimizer)
if sys.argv[3] == "after more":
    train(run, 3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["before", "after more"])
def test_a_kill_around_it_keeps_the_snapshot(when: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parent), when]
    killed = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    plain = Plain(make(Net))
    train(plain, 1)
    model = make(Net, seed=5)
    tz.offload(model, tiers_for(model, "mixed", tmp_path), resume=True)
    try:
        run = Tiered.__new__(Tiered)
        run.model, run.optimizer, run.engine = model, tz.AdamW(model.parameters(), **HYPER), tz.api.engine_of(model)
        assert tz.restore(model, run.optimizer) == {"step": 3}
        assert_same(run, plain)
        train(run, 4)
        assert tz.rollback(model, run.optimizer) == {"step": 3}  # to what was opened
        assert_same(run, plain)
    finally:
        tz.close(model)


@pytest.mark.parametrize("host", [True, False])
def test_frozen_parameters_that_stay_in_their_file(host: bool, tmp_path: Path) -> None:
    """They are not read again, and changed ones go back to the file."""
    from safetensors.torch import save_file

    plain = make(SHAPES["lora"])
    save_file({name: value.contiguous() for name, value in plain.state_dict().items()}, tmp_path / "base.safetensors")
    with torch.device("meta"):
        model = SHAPES["lora"]()
    tiers = tz.Tiers(nvme=tmp_path / "store", host="256MiB", device="64MiB", compute="cpu")
    tz.offload(model, tiers if host else tiers_for(plain, "nvme", tmp_path / "store"))
    run = Tiered.__new__(Tiered)
    try:
        tz.load(model, tmp_path / "base.safetensors", in_place=True)
        run.model, run.optimizer, run.engine = model, tz.AdamW(model.parameters(), **HYPER), tz.api.engine_of(model)
        train(run, 1)
        tz.snapshot(model, run.optimizer)
        assert not any(name.endswith("/frozen") for name in run.engine.store.latest.records)
        at = contents_of(run)
        train(run, 2)
        tz.rollback(model, run.optimizer)
        assert differing(contents_of(run), at) == []
        name, weight = next((n, p) for n, p in model.named_parameters() if not p.requires_grad)
        weight.data = torch.full(weight.shape, 2.0)
        assert differing(contents_of(run), at) == [(name, "param")]
        for _ in range(2):
            tz.rollback(model, run.optimizer)
            assert differing(contents_of(run), at) == []
        tz.snapshot(model, run.optimizer)
        assert not any(name.endswith("/frozen") for name in run.engine.store.latest.records)
        train(run, 2)
    finally:
        tz.close(model)


class Gated:
    """Work of an update that is done when it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def compute(self, due: int, ready: Callable[[], None]) -> None:
        await self.go.wait()

    def publish(self, fresh: None) -> None:
        pass

    def discard(self, fresh: None) -> None:
        pass

    async def restore(self) -> None:
        pass


@pytest.mark.parametrize("wait", ["settled", "readable"])
def test_whoever_waits_for_a_dropped_update_waits_for_the_way_back(wait: str, tmp_path: Path) -> None:
    """A fetch that had waited for a step's update must not read between the end of it and that of the rollback."""
    with pair(tmp_path) as (_, run):
        engine, unit = run.engine, run.engine.units[1]

        async def both() -> None:
            first, back = Gated(), Gated()

            async def go_back() -> None:
                await engine.updates.drop(unit)
                engine.updates.replace(Update(unit, back))

            engine.updates.replace(Update(unit, first))
            going = asyncio.ensure_future(go_back())
            await asyncio.sleep(0)
            waiter = asyncio.ensure_future(getattr(engine.updates, wait)(unit, urgent=True))
            await asyncio.sleep(0)
            first.go.set()
            await going
            for _ in range(10):
                await asyncio.sleep(0)
            early = waiter.done()
            back.go.set()
            await waiter
            assert not early
            assert unit.pending is None

        engine.run(both())
