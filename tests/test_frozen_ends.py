"""How a save beside training ends, and what waits for it: failures, close, a full drive, other changes."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen import Reader, assert_let_go, contents_of, differing, read_unit
from hypothesis import given
from hypothesis import strategies as st
from models import Net
from oracle import Tiered, batches, loss_of, make, same, tiered, tiers_for, train_both
from pairs import backward_both, pair
from test_overlap import tiers_of
from test_unchanged import Drive

import tierzero as tz
from tierzero.checkpoint.frozen import Frozen, freeze
from tierzero.checkpoint.frozen_unit import Unread
from tierzero.tiers.faulty import Fault, FaultyFile

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
PLACES = pytest.mark.parametrize("placement", ["nvme", "host"])


@PLACES
def test_a_reader_that_fails_lets_training_go_on(placement: str, tmp_path: Path) -> None:
    with pair(tmp_path, placement=placement) as (plain, run):
        train_both([("", run)], plain, 2)
        frozen = freeze(run.engine)

        async def fail() -> None:
            with frozen:
                await read_unit(next(iter(frozen)))
                raise OSError(errno.EIO, "the other drive failed")

        with pytest.raises(OSError, match="other drive"):
            run.engine.run(fail())
        assert_let_go(run.engine)
        train_both([("", run)], plain, 2, seed=2)


def test_a_drive_that_fails_under_a_reader(tmp_path: Path) -> None:
    """The reader gets the error, training does not."""
    with pair(tmp_path) as (plain, run):
        train_both([("", run)], plain, 1)
        tz.synchronize(run.model)
        store = run.engine.store
        store.file = drive = FaultyFile(store.file)
        frozen = freeze(run.engine)
        drive.plan.append(Fault("read", drive.counts["read"] + 1))
        with pytest.raises(OSError, match="injected"), frozen:
            run.engine.run(read_unit(frozen.units[0]))
        store.file = drive.inner
        assert_let_go(run.engine)
        train_both([("", run)], plain, 1, seed=2)


def test_a_failed_update_fails_the_save_of_its_unit_and_training_goes_on(tmp_path: Path) -> None:
    with pair(tmp_path) as (plain, run):
        train_both([("", run)], plain, 1)
        tz.synchronize(run.model)
        store = run.engine.store
        taking = store.allocate

        def full(nbytes: int, name: str) -> Any:
            raise OSError(errno.ENOSPC, f"no room for {name}", store.path)

        store.allocate = full
        backward_both(plain, run, next(batches(1)))
        plain.step(), run.step()
        run.engine.run(_finished(run))
        frozen = freeze(run.engine)
        with pytest.raises(tz.TierzeroError, match=r"update of unit .* has failed"), frozen:
            run.engine.run(read_unit(frozen.units[0]))
        store.allocate = taking
        assert_let_go(run.engine)
        plain.zero_grad(), run.zero_grad()
        train_both([("", run)], plain, 1, seed=2)


async def _finished(run: Tiered) -> None:
    for unit in run.engine.units:
        if unit.pending is not None:
            await unit.pending.finished.wait()


@PLACES
def test_what_is_dropped_holds_nothing(placement: str, tmp_path: Path) -> None:
    with pair(tmp_path, placement=placement) as (plain, run):
        frozen = freeze(run.engine)
        with pytest.raises(tz.TierzeroError, match="going on already"):
            freeze(run.engine)
        assert any(unit.gate is not None for unit in run.engine.units)
        del frozen
        gc.collect()
        run.engine.run(asyncio.sleep(0))
        assert_let_go(run.engine)
        with freeze(run.engine) as again:
            one = next(iter(again))
            again.unit_done(one)
            with pytest.raises(tz.TierzeroError, match="too late"):
                run.engine.run(read_unit(one))
            again.unit_done(one)
        again.release()
        train_both([("", run)], plain, 2)


def test_a_gate_opens_when_all_it_protects_has_been_read(tmp_path: Path) -> None:
    """Parameters in host memory, states on the drive: training waits for the first alone."""
    model = make(Net, torch.bfloat16)
    with tiered(model, tiers_of(model, "cached", tmp_path)) as run:
        loss_of(model, next(batches(1))).backward()
        tz.synchronize(model)
        before = contents_of(run)
        frozen = freeze(run.engine)
        for one in frozen:
            host = [source for source in one.sources if source.in_host]
            assert {source.part for source in host} == {"param", "grad"}
            for source in host:
                half = torch.empty(source.numel // 2, dtype=source.dtype)
                rest = torch.empty(source.numel - half.numel(), dtype=source.dtype)
                for _ in range(3):
                    assert one.gate.holds(None) or source.part == "grad"
                    run.engine.run(source.read(half.numel(), rest))
                run.engine.run(source.read(0, half))
                assert same(torch.cat([half, rest]).view(source.shape), before[source.name, source.part])
            assert not one.in_host
            with pytest.raises(tz.TierzeroError, match="too late"):
                run.engine.run(host[0].read(0, torch.empty(1, dtype=host[0].dtype)))
        run.step()
        run.zero_grad()
        loss_of(model, next(batches(1))).backward()
        assert tz.stats(model)["stall_save_s"] == 0
        for one in frozen.units:
            for source in one.sources:
                if not source.in_host:
                    found = torch.empty(source.numel, dtype=source.dtype)
                    run.engine.run(source.read(0, found))
                    assert same(found.view(source.shape), before[source.name, source.part])
        frozen.release()
        tz.synchronize(model)
        assert_let_go(run.engine)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=12), st.integers(1, 20))
def test_unread(reads: list[tuple[int, int]], count: int) -> None:
    """As a set of elements would tell."""
    unread, left = Unread(count), set(range(count))
    for first, length in reads:
        left -= set(range(first, first + length))
        assert unread.over(first, length) == (not left)


@PLACES
def test_close_cuts_a_save_short(placement: str, tmp_path: Path) -> None:
    model = make(Net)
    run = Tiered(model, tiers_for(model, placement, tmp_path))
    loss_of(model, next(batches(1))).backward()
    run.step()
    reader = Reader(run.engine, freeze(run.engine))
    loss = loss_of(model, next(batches(1)))
    del loss
    tz.close(model)
    assert_let_go(run.engine)
    assert not reader.found or isinstance(reader.error, tz.TierzeroError)


def test_what_else_changes_host_memory_waits(tmp_path: Path) -> None:
    """Every way in: weights, states, masters, optimizers that come later. Nothing of it is in the save."""
    model = make(Net, torch.bfloat16)
    tiers = tz.Tiers(nvme=tmp_path, host="256MiB", device="64MiB", compute="cpu")
    with tiered(model, tiers) as run:
        loss_of(model, next(batches(1))).backward()
        run.step()
        head, state = model.head.weight, run.optimizer.state[model.head.weight]

        def unsharded() -> None:
            with tz.unsharded(model.head, write=True), torch.no_grad():
                model.head.weight.add_(1.0)

        def edit_gradient() -> None:
            head.grad.mul_(0.5)

        def keep_gradient() -> None:
            head.grad.detach().data.mul_(0.5)

        def replace_gradient() -> None:
            head.grad = torch.ones(head.shape, dtype=head.dtype)
            tz.clip_grad_norm_(model.parameters(), 1.0)

        changes: dict[str, Callable[[], Any]] = {
            "unsharded": unsharded,
            "load_state_dict": lambda: model.load_state_dict(
                {**model.state_dict(), "head.weight": torch.full(head.shape, 3.0)}
            ),
            "moment": lambda: state["exp_avg"].copy_(torch.full(head.shape, 0.5)),
            "master": lambda: state["master"].copy_(torch.full(head.shape, 0.25)),
            "gradient": edit_gradient,
            "kept gradient": keep_gradient,
            "zeroed gradient": lambda: run.optimizer.zero_grad(set_to_none=False),
            "another gradient": replace_gradient,
        }
        for name, change in changes.items():
            before = contents_of(run)
            waited = tz.stats(model)["stall_save_s"]
            reader = Reader(run.engine, freeze(run.engine))
            change()
            assert differing(reader.finish(), before) == [], name
            assert reader.waited, name
            assert tz.stats(model)["stall_save_s"] > waited, name
            assert differing(contents_of(run), before), name
        assert_let_go(run.engine)


def test_a_full_drive_makes_training_wait_instead(tmp_path: Path) -> None:
    """Without room for versions beside those that are held, updates wait for the save, and no step fails."""
    with pair(tmp_path) as (plain, run):
        train_both([("", run)], plain, 2)
        tz.synchronize(run.model)
        store = run.engine.store
        store.space.trim()
        room = store.space.capacity + run.engine.room.working

        class Full(Drive):
            def preallocate(self, nbytes: int) -> None:
                if nbytes > room:
                    raise OSError(errno.ENOSPC, "no space left on device", self.path)
                super().preallocate(nbytes)

        store.file = store.space.file = Full(store.file)
        before = contents_of(run)
        capacity = store.space.capacity
        reader = Reader(run.engine, freeze(run.engine))
        assert store.space.capacity == capacity
        train_both([("", run)], plain, 3, seed=2)
        tz.synchronize(run.model)
        assert reader.waited
        assert differing(reader.finish(), before) == []
        assert_let_go(run.engine)
        assert store.space.capacity <= room


def test_refusals(tmp_path: Path) -> None:
    with torch.device("meta"):
        blank = Net()
    tz.offload(blank, tiers_for(blank, "nvme", tmp_path / "blank"))
    try:
        with pytest.raises(tz.TierzeroError, match="never given a value"):
            freeze(tz.api.engine_of(blank))
    finally:
        tz.close(blank)
    with pair(tmp_path / "in use", spare=1 << 16) as (_, run):
        with tz.unsharded(run.model.head), pytest.raises(tz.TierzeroError, match="save outside"):
            freeze(run.engine)
        frozen: Frozen = freeze(run.engine)
        source = frozen.units[0].sources[0]
        for out in (torch.empty(source.numel + 1), torch.empty(1, dtype=torch.int8), torch.empty(1, 1)):
            with pytest.raises(ValueError, match="is read into"):
                run.engine.run(source.read(0, out))
        frozen.release()
        assert_let_go(run.engine)
