"""The engine over a drive that fails, and across snapshots: nothing is lost, everything stays bit-equal."""

from __future__ import annotations

import copy
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from oracle import (
    PLACEMENTS,
    Plain,
    Tiered,
    assert_same,
    batches,
    loss_of,
    make,
    same,
    tiered,
    tiers_for,
    train_both,
)
from pairs import backward_both, in_groups, pair

import tierzero as tz
from tierzero.native import NATIVE
from tierzero.tiers.faulty import Fault, FaultyFile

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class Drive(FaultyFile):
    """A faulty drive that the native step still finds its file behind."""

    @property
    def native(self) -> Any:
        return self.inner.native  # type: ignore[attr-defined]


def faulty(run: Tiered) -> Drive:
    """Put a faulty drive under the engine's store."""
    store = run.engine.store
    store.file = Drive(store.file)
    return store.file


# -- a drive that fails ------------------------------------------------------------------------------------------------


def attempt(run: Tiered, ids: torch.Tensor) -> OSError | None:
    try:
        loss_of(run.model, ids)
    except OSError as error:
        return error
    return None


class NoRoom:
    """A store that has no room for one unit's new versions."""

    def __init__(self, allocate: Any, code: int) -> None:
        self.allocate, self.code = allocate, code

    def __call__(self, nbytes: int, name: str) -> Any:
        if "layers.1" in name:
            raise OSError(self.code, "the drive is broken (injected)", "/somewhere")
        return self.allocate(nbytes, name)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize(
    "native", [pytest.param(True, marks=pytest.mark.skipif(NATIVE is None, reason="no extension")), False]
)
def test_an_update_that_fails(native: bool, code: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """step() has returned; the next use raises the drive's error, and once the drive works again the same update is
    done after all.
    """
    if not native:
        request.getfixturevalue("portable")
    with pair(tmp_path) as (plain, run):
        train_both([("", run)], plain, 2)
        for round_ in range(3):
            backward_both(plain, run, next(batches(1, seed=round_)))
            max_norm = plain.norm() * 0.5
            plain.step(max_norm)
            if native:
                run.engine.store.allocate = NoRoom(run.engine.store.allocate, code)
                run.step(max_norm)
            else:
                drive = faulty(run)
                drive.plan = [Fault("write", 1 + round_, code=code, persistent=True)]
                run.step(max_norm)
            run.zero_grad()
            plain.zero_grad()
            error = attempt(run, next(batches(1)))
            assert error is not None
            assert error.errno == code
            with pytest.raises(OSError, match="injected"):
                tz.synchronize(run.model)
            with pytest.raises(OSError, match="injected"):
                run.model.layers[1].up.weight.read()
            if native:
                del run.engine.store.allocate
            else:
                run.engine.store.file = drive.inner
            assert_same(run, plain, f"round {round_}")
            train_both([(f"round {round_}", run)], plain, 1, seed=10 + round_)


def several_losses(run: Tiered, count: int) -> None:
    for ids in batches(count):
        loss_of(run.model, ids).backward()


@pytest.mark.parametrize("position", range(1, 12))
def test_a_fetch_that_fails(position: int, tmp_path: Path) -> None:
    """A read error in forward or backward is an OSError with its errno and path, and the next attempt is right."""
    with pair(tmp_path) as (plain, run):
        train_both([("", run)], plain, 1)
        tz.synchronize(run.model)
        drive = faulty(run)
        drive.plan = [Fault("read", position, persistent=True)]
        with pytest.raises(OSError, match="injected") as caught:
            several_losses(run, 6)
        assert caught.value.errno == errno.EIO
        assert caught.value.filename
        drive.plan = []
        run.model.zero_grad()
        train_both([("", run)], plain, 2)


def test_a_prefetch_that_fails_once(tmp_path: Path) -> None:
    """An error that only a prefetch saw, and that has gone when the demand comes, is not the user's concern."""
    with pair(tmp_path, placement="nvme") as (plain, run):
        drive = faulty(run)
        failures = 0
        for round_ in range(8):
            drive.plan = [Fault("read", drive.counts["read"] + 1 + round_)]
            try:
                loss_of(run.model, next(batches(1))).backward()
            except OSError:
                failures += 1
            run.model.zero_grad()
        drive.plan = []
        assert failures <= 8
        train_both([("", run)], plain, 2)


def test_work_that_raises(tmp_path: Path) -> None:
    """Whatever an update raises reaches the next use of that unit, and only of that unit; then it is done again."""
    with pair(tmp_path, placement="host") as (plain, run):
        train_both([("", run)], plain, 1)
        tz.synchronize(run.model)
        update = run.engine.streamed.compute
        tries = 0

        async def failing(unit: Any, *args: Any) -> Any:
            nonlocal tries
            tries += 1
            if unit.name == "layers.2":
                raise ValueError("no luck today")
            return await update(unit, *args)

        run.engine.streamed.compute = failing
        backward_both(plain, run, next(batches(1)))
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()
        assert same(run.model.layers[0].up.weight.read(), plain.model.layers[0].up.weight)
        for _ in range(2):
            with pytest.raises(ValueError, match="no luck"):
                loss_of(run.model, next(batches(1)))
        with pytest.raises(ValueError, match="no luck"):
            tz.synchronize(run.model)
        run.engine.streamed.compute = update
        train_both([("", run)], plain, 2)


def test_a_gradient_that_arrives_behind_a_failed_update(tmp_path: Path) -> None:
    """New gradients never overwrite those that a failed update still needs."""
    with pair(tmp_path, placement="host") as (plain, run):
        backward_both(plain, run, next(batches(1)))
        plain.step()
        update = run.engine.streamed.compute

        async def failing(unit: Any, *args: Any) -> Any:
            raise ValueError("no luck today")

        run.engine.streamed.compute = failing
        run.step()
        plain.zero_grad()
        run.zero_grad()
        values = [torch.randn(param.shape) for param in plain.model.parameters()]
        for param, value in zip(run.model.parameters(), values, strict=True):
            param.grad = value.clone()
        with pytest.raises(ValueError, match="no luck"):
            run.step()
        run.engine.streamed.compute = update
        for param, value in zip(plain.model.parameters(), values, strict=True):
            param.grad = value
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()


def test_closing_with_a_broken_drive(tmp_path: Path) -> None:
    """close() raises what the last updates raised, and still gives everything back."""
    model = make(Net)
    run = Tiered(model, tiers_for(model, "nvme", tmp_path))
    loss_of(model, next(batches(1))).backward()

    async def failing(unit: Any, *args: Any) -> Any:
        raise OSError(errno.EIO, "injected", "/dev/nowhere")

    run.engine.streamed.compute = failing
    run.step()
    run.zero_grad()
    with pytest.raises(OSError, match="injected"):
        tz.close(model)
    tz.close(model)
    assert not list(tmp_path.glob("**/data.bin"))


def test_offload_that_fails_leaves_the_model_alone(tmp_path: Path) -> None:
    """A path that is a file, and a full drive: the model trains on as it was."""
    target = tmp_path / "file"
    target.write_text("not a directory")
    plain, model = Plain(make(Net)), make(Net)
    with pytest.raises(tz.StoreError, match="is a file"):
        tz.offload(model, tz.Tiers(nvme=target, host="64MiB", device="64MiB", compute="cpu"))
    for ids in batches(2):
        assert same(loss_of(model, ids), loss_of(plain.model, ids))
    with tiered(model, tiers_for(model, "nvme", tmp_path / "dir")) as run:
        train_both([("", run)], plain, 1)
        assert_same(run, plain)


# -- snapshots ---------------------------------------------------------------------------------------------------------


@contextmanager
def resumed(
    directory: Path, placement: str, dtype: torch.dtype, *, meta: bool, groups: Any = None
) -> Iterator[tuple[Tiered, dict[str, Any]]]:
    model = make(Net, dtype, seed=77)
    if meta:
        model = model.to("meta")
    tiers = tiers_for(model, placement if placement != "host" else "mixed", directory)
    if placement == "host":
        tiers = tz.Tiers(directory, "64MiB", "64MiB", compute="cpu")
    tz.offload(model, tiers, resume=True)
    run = Tiered.__new__(Tiered)
    run.model = model
    try:
        from oracle import HYPER

        run.optimizer = tz.AdamW(list(model.parameters()) if groups is None else groups(model), **HYPER)
        run.engine = tz.api.engine_of(model)  # type: ignore[attr-defined]
        yield run, tz.restore(model, run.optimizer)
        run.check_pools()
    finally:
        tz.close(model)


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("first", ["nvme", "mixed"])
@pytest.mark.parametrize("second", PLACEMENTS)
def test_resume(first: str, second: str, dtype: torch.dtype, meta: bool, tmp_path: Path) -> None:
    """Five steps, a snapshot, three more that are lost, and five after resuming in another placement equal ten (S12,
    S15).
    """
    plain = Plain(make(Net, dtype), in_groups)
    model = make(Net, dtype)
    with tiered(model, tiers_for(model, first, tmp_path), groups=in_groups) as run:
        train_both([("first", run)], plain, 4)
        tz.snapshot(model, run.optimizer, "step-4", {"step": 4, "note": "x"})
        lost = Plain(copy.deepcopy(plain.model), in_groups)
        for ids in batches(2, seed=9):
            loss_of(lost.model, ids)
            loss_of(model, ids).backward()
            run.step(0.5)
            run.zero_grad()
    with resumed(tmp_path, second, dtype, meta=meta, groups=in_groups) as (again, found):
        assert found == {"step": 4, "note": "x"}
        assert_same(again, plain, "after resuming")
        train_both([("second", again)], plain, 4, seed=5, clip=lambda step, norm: norm * 0.5)
        assert_same(again, plain)
        tz.snapshot(again.model, again.optimizer, "later", {"step": 8})
    with resumed(tmp_path, first, dtype, meta=meta, groups=in_groups) as (again, found):
        assert found == {"step": 8}
        train_both([("third", again)], plain, 2, seed=6)
        assert_same(again, plain)


def test_snapshots_that_cannot_be_resumed(tmp_path: Path) -> None:
    """Another model, no snapshot, a snapshot in the way: each says so, and the model is as it was."""
    model = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        tz.snapshot(model, run.optimizer, "one", {"step": 1})
    other = make(lambda: Net(blocks=2))
    with pytest.raises(tz.StoreError, match="written by another model"):
        tz.offload(other, tiers_for(other, "nvme", tmp_path), resume=True)
    loss_of(other, next(batches(1)))
    again = make(Net)
    tiers = tiers_for(again, "nvme", tmp_path)
    with pytest.raises(tz.StoreError, match="holds the snapshot 'one'"):
        tz.offload(again, tiers)
    with pytest.raises(tz.StoreError, match="no snapshot 'two'"):
        tz.offload(again, tiers, resume="two")
    with pytest.raises(tz.TierzeroError, match="resume"):
        tz.offload(again, tz.Tiers(host="64MiB", device="64MiB", compute="cpu"), resume=True)
    with tiered(again, tiers_for(again, "nvme", tmp_path / "fresh")):
        with pytest.raises(tz.StoreError, match="resume=True"):
            tz.restore(again, None)
    last = make(Net)
    tz.offload(last, tiers, overwrite=True)
    tz.close(last)
    with pytest.raises(tz.StoreError, match="nothing to resume"):
        tz.offload(make(Net), tiers, resume=True)


def test_snapshot_fails_and_training_goes_on(tmp_path: Path) -> None:
    """A failed snapshot leaves the snapshot before it and the run as they were."""
    with pair(tmp_path) as (plain, run):
        train_both([("", run)], plain, 1)
        tz.snapshot(run.model, run.optimizer, "good", {"step": 1})
        train_both([("", run)], plain, 1, seed=2)
        drive = faulty(run)
        drive.plan = [Fault("sync", 1)]
        with pytest.raises(OSError, match="injected"):
            tz.snapshot(run.model, run.optimizer, "bad", {"step": 2})
        run.engine.store.file = drive.inner
        assert list(run.engine.store.snapshots) == ["good"]
        train_both([("", run)], plain, 2, seed=3)
        tz.snapshot(run.model, run.optimizer, "better", {"step": 3})
        assert list(run.engine.store.snapshots) == ["better"]
