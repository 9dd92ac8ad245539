"""Frozen units that stay in the file they were loaded from: nothing written, the plain bits, snapshots whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from oracle import HYPER, Plain, Tiered, assert_same, batches, loss_of, make, same, tiers_for, train_both
from safetensors.torch import save_file

import tierzero as tz
from tierzero.checkpoint.weights import load_weights
from tierzero.units.borrowed import FrozenRecord

pytestmark = pytest.mark.usefixtures("no_leaks")
DTYPE = torch.bfloat16


def adapted() -> Any:
    return make(models.LoRA, DTYPE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "base.safetensors"
    save_file({name: value.detach().clone() for name, value in adapted().state_dict().items()}, path)
    return path


def built() -> Any:
    with torch.device("meta"):
        return models.LoRA().to(DTYPE)


@contextmanager
def borrowing(file: Path, directory: Path, placement: str = "nvme", **options: Any) -> Iterator[Tiered]:
    model = built()
    run = Tiered.__new__(Tiered)
    run.model = tz.offload(model, tiers_for(model, placement, directory), **options)
    try:
        if not options:
            load_weights(model, file, in_place=True)
        run.optimizer = tz.AdamW([p for p in model.parameters() if p.requires_grad], **HYPER)
        from tierzero.api import engine_of

        run.engine = engine_of(model)
        yield run
    finally:
        tz.close(model)


def frozen_records(run: Tiered) -> list[FrozenRecord]:
    return [record for unit in run.engine.units for record in unit.records.values() if isinstance(record, FrozenRecord)]


def test_nothing_of_frozen_units_is_written(file: Path, tmp_path: Path) -> None:
    """M15, P12: no state, no bytes written for what is frozen, at loading, in training and at a commit; the drives'
    counters are the expected ones.
    """
    plain = Plain(adapted())
    with borrowing(file, tmp_path / "store") as run:
        store = run.engine.store
        assert store is not None
        frozen = [record.name for record in frozen_records(run)]
        assert frozen
        train_both([("", run)], plain, 3)
        tz.snapshot(run.model, run.optimizer, "a", {})
        train_both([("", run)], plain, 2, seed=7)
        assert_same(run, plain)
        assert not set(frozen) & set(store.current)
        assert not set(frozen) & set(store.snapshots["a"].records)
        stats = tz.stats(run.model)
        trainable = sum(unit.layout.state_bytes + unit.layout.region_bytes("param") for unit in run.engine.units)
        assert 0 < stats["nvme_written_expected"] <= 7 * trainable  # created, and 5 steps, and the guess of one
        assert all(unit.state is None for unit in run.engine.units if not unit.layout.elements)


@pytest.mark.parametrize("placement", ["nvme", "mixed", "host"])
def test_the_bits_are_those_of_a_copy(placement: str, file: Path, tmp_path: Path) -> None:
    plain = Plain(adapted())
    with borrowing(file, tmp_path / "store", placement) as run:
        train_both([("", run)], plain, 3, accumulate=2, clip=lambda step, norm: 0.1)
        assert_same(run, plain)
        out = tz.export(run.model, tmp_path / "out.safetensors")
    fresh = make(models.LoRA, DTYPE, seed=8)
    from safetensors.torch import load_file

    fresh.load_state_dict(load_file(out), strict=True)
    ids = next(batches(1))
    assert same(loss_of(fresh, ids), loss_of(plain.model, ids))


@pytest.mark.parametrize(("first", "second"), [("nvme", "nvme"), ("nvme", "mixed"), ("mixed", "nvme")])
def test_resume(first: str, second: str, file: Path, tmp_path: Path) -> None:
    """A snapshot names the file; it is opened again, under other budgets too, and the run goes on to the bit."""
    plain = Plain(adapted())
    with borrowing(file, tmp_path / "store", first) as run:
        train_both([("", run)], plain, 2)
        tz.snapshot(run.model, run.optimizer, "a", {})
    with borrowing(file, tmp_path / "store", second, resume=True) as run:
        tz.restore(run.model, run.optimizer)
        train_both([("", run)], plain, 2, seed=3)
        tz.snapshot(run.model, run.optimizer, "b", {})
    with borrowing(file, tmp_path / "store", first, resume=True) as run:
        tz.restore(run.model, run.optimizer)
        assert_same(run, plain)


@pytest.mark.parametrize("what", ["gone", "other"])
def test_a_snapshot_misses_its_file(what: str, file: Path, tmp_path: Path) -> None:
    with borrowing(file, tmp_path / "store") as run:
        tz.snapshot(run.model, run.optimizer, "a", {})
    kept = file.read_bytes(), os.stat(file).st_mtime_ns
    if what == "gone":
        file.unlink()
    else:
        file.write_bytes(kept[0][:-2] + b"!!")
        os.utime(file, ns=(1, 1))
    with pytest.raises(tz.StoreCorruptError, match=f"{file}.*start again"):
        tz.offload(built(), tiers_for(built(), "nvme", tmp_path / "store"), resume=True)
    file.write_bytes(kept[0])
    os.utime(file, ns=(kept[1], kept[1]))
    with borrowing(file, tmp_path / "store", resume=True) as run:
        tz.restore(run.model, run.optimizer)
        assert_same(run, Plain(adapted()))


def test_a_file_that_is_changed_is_told(file: Path, tmp_path: Path) -> None:
    """Before its bytes are used for another step."""
    with borrowing(file, tmp_path / "store") as run:
        loss_of(run.model, next(batches(1))).backward()
        run.zero_grad()
        with open(file, "r+b") as out:
            out.seek(-2, os.SEEK_END)
            out.write(b"!!")
        os.utime(file, ns=(5, 5))
        with pytest.raises(tz.StoreCorruptError, match=f"{file} was changed while it is in use"):
            loss_of(run.model, next(batches(1))).backward()
        run.zero_grad()
        tz.reset(run.model)


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.parametrize("placement", ["nvme", "mixed"])
def test_a_file_that_is_removed(
    how: str, placement: str, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on with the open file; a commit copies what its path no longer leads to, and says so."""
    plain = Plain(adapted())
    with borrowing(file, tmp_path / "store", placement) as run:
        train_both([("", run)], plain, 1)
        file.unlink()
        if how == "replaced":
            shutil.copy(__file__, file)
        train_both([("", run)], plain, 1, seed=2)
        tz.snapshot(run.model, run.optimizer, "a", {})
        assert placement != "nvme" or f"{file}, from which frozen parameters are read" in caplog.text
    with borrowing(file, tmp_path / "store", placement, resume=True) as run:
        tz.restore(run.model, run.optimizer)
        assert_same(run, plain)


def test_changing_frozen_values_makes_a_copy(file: Path, tmp_path: Path) -> None:
    """load_state_dict, `unsharded` and a second load work as ever; the file is never written."""
    before = file.read_bytes()
    other = make(models.LoRA, DTYPE, seed=4)
    with borrowing(file, tmp_path / "store") as run:
        with tz.unsharded(run.model.head, write=True), torch.no_grad():  # type: ignore[arg-type]
            run.model.head.weight.mul_(2)  # type: ignore[union-attr,operator]
        expected = adapted()
        with torch.no_grad():
            expected.head.weight.mul_(2)
        assert_same(run, Plain(expected))
        run.model.load_state_dict(other.state_dict())
        assert_same(run, Plain(other))
        assert not any(record.borrowed for record in frozen_records(run))
        load_weights(run.model, file, in_place=True)
        assert_same(run, Plain(adapted()))
        assert all(record.borrowed for record in frozen_records(run))
        load_weights(run.model, file)
        assert not any(record.borrowed for record in frozen_records(run))
        assert_same(run, Plain(adapted()))
    assert file.read_bytes() == before


def test_another_dtype_is_copied(tmp_path: Path) -> None:
    """A float32 file under a bfloat16 model is cast, which needs a place of its own."""
    path = tmp_path / "base.safetensors"
    save_file({name: value.detach().float() for name, value in adapted().state_dict().items()}, path)
    with borrowing(path, tmp_path / "store") as run:
        assert frozen_records(run)
        assert all(record.owned for record in frozen_records(run))
        assert_same(run, Plain(adapted()))


def test_reads_at_any_offset(tmp_path: Path) -> None:
    """Direct and buffered reads give the file's bytes wherever they begin and end, and EIO behind its end."""
    from tierzero.tiers.readonly import ReadOnlyFile

    raw = os.urandom((5 << 20) + 777)
    (tmp_path / "file").write_bytes(raw)
    for buffered in (False, True):
        with ReadOnlyFile(tmp_path / "file") as file:
            if buffered and file.direct:
                os.close(file._direct)
                file._direct = -1
            for offset, count in ((0, 1), (1, 4095), (4095, 2), (4096, 4096), (7, 5 << 20), (len(raw) - 3, 3), (9, 0)):
                out = torch.empty(count, dtype=torch.uint8)
                file.read(offset, out)
                assert bytes(out.tolist() if count < 10000 else out.numpy()) == raw[offset : offset + count]
            with pytest.raises(OSError, match="the file ends before"):
                file.read(len(raw) - 1, torch.empty(2, dtype=torch.uint8))
