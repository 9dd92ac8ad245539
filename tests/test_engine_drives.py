"""Training over several directories: the same bits as over one, and as in plain PyTorch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import models
import pytest
import torch
from oracle import HYPER, Plain, Tiered, assert_same, make, tiered, tiers_for, train_both

import tierzero as tz
import tierzero.storage.store
from tierzero.api import engine_of
from tierzero.errors import ConfigError, StoreError
from tierzero.native import NATIVE

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_leaks"),
    pytest.mark.skipif(NATIVE is None, reason="stripes need the native extension"),
]


def over(model: torch.nn.Module, where: list[Path], placement: str = "nvme") -> tz.Tiers:
    """The smallest budgets that work, over several directories."""
    one = tiers_for(model, placement, where[0])
    plans = [tz.plan(model, dataclasses.replace(one, nvme=nvme, host="1GiB")) for nvme in (where, where[:1])]
    more = plans[0].host_min - plans[1].host_min
    assert more == (len(where) - 1) * (4 << 20)  # bounce memory
    return dataclasses.replace(one, nvme=where, host=int(one.host) + more)


@pytest.mark.parametrize("placement", ["nvme", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_plain_training(
    tmp_path: Path, dtype: torch.dtype, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tierzero.storage.store, "_weights", lambda directories: [2, 1, 3])
    monkeypatch.setattr("tierzero.storage.members.STRIPE", 4096)  # so that these small records lie on all drives
    where = [tmp_path / f"drive{index}" for index in range(3)]
    plain = Plain(make(models.Net, dtype))
    model = make(models.Net, dtype)
    tiers = over(model, where, placement)
    with tiered(model, tiers) as run:
        train_both([("striped", run)], plain, 3, accumulate=2)
        tz.snapshot(model, run.optimizer, "s", {"step": 3})
        sizes = [(path / "data.bin").stat().st_size for path in where]
        assert all(sizes)
    again = make(models.Net, dtype, seed=5)
    tz.offload(again, dataclasses.replace(tiers, nvme=where[::-1]), resume=True)
    try:
        back = Tiered.__new__(Tiered)
        back.model, back.optimizer, back.engine = again, tz.AdamW(again.parameters(), **HYPER), engine_of(again)
        assert tz.restore(again, back.optimizer) == {"step": 3}
        assert_same(back, plain, "after resume")
        train_both([("resumed", back)], plain, 2, seed=7)
        assert_same(back, plain, "and two steps")
    finally:
        tz.close(again)


def test_directories_are_empty_again(tmp_path: Path) -> None:
    where = [tmp_path / "one", tmp_path / "two"]
    model = make(models.Net)
    with tiered(model, over(model, where)):
        assert [sorted(os.listdir(path)) for path in where] == [["data.bin", "lock", "member.json"]] * 2
    assert [os.listdir(path) for path in where] == [[], []]


def test_directories_that_cannot_be(tmp_path: Path) -> None:
    model = make(models.Net)
    for nvme, error, says in (
        ([], ConfigError, "names no directory"),
        ([tmp_path, tmp_path], StoreError, "given twice"),
        ([tmp_path, tmp_path / "in"], StoreError, "lies inside"),
    ):
        tiers = tz.Tiers(nvme=nvme, host="64MiB", device="64MiB", compute="cpu")
        for use in (tz.plan, tz.offload):
            with pytest.raises(error, match=says):
                use(model, tiers)  # type: ignore[operator]


def test_measured_drives_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile says how the engine runs and, for drives that differ, how the store is striped."""
    from tierzero.hardware import profiles

    monkeypatch.setenv("TIERZERO_PROFILES", str(tmp_path / "profiles"))
    where = [tmp_path / "one", tmp_path / "two"]
    rates = {"read": 2e9, "write": 1e9, "mixed": 3e9, "sustained_write": 1e9}
    shared = {"path": str(tmp_path), "when": "2026-01-01T00:00:00Z", "kernel": "6", **rates}
    model = make(models.Net)
    with tiered(model, over(model, where)) as run:
        assert (run.engine.io.native.block, run.engine.store.layout.weights) == (4 << 20, (1, 1))
    profiles.save(
        profiles.Profile(device=profiles.drive_key(tmp_path), engine="pool", block=1 << 20, depth=5, **shared)
    )
    model = make(models.Net)
    with tiered(model, over(model, where)) as run:
        native = run.engine.io.native
        assert (native.name, native.block, native.depth) == ("pool", 1 << 20, 5)
        assert run.engine.store.layout.weights == (1, 1)  # one drive under both


def test_several_profiles_are_put_together() -> None:
    from tierzero.hardware import profiles
    from tierzero.hardware.tuning import engine_options, weights_of

    rates = {"read": 1.0, "write": 1.0, "sustained_write": 1.0}

    def profile(engine: str, block: int, depth: int, mixed: float) -> profiles.Profile:
        return profiles.Profile(
            device="d", path="p", when="w", kernel="k", engine=engine, block=block, depth=depth, mixed=mixed, **rates
        )

    slow, fast = profile("pool", 1 << 20, 8, 2e9), profile("uring", 4 << 20, 16, 6e9)
    assert weights_of([slow, fast]) == [1, 3]
    assert weights_of([slow, None]) == [1, 1]
    assert engine_options([]) == engine_options([None, None]) == {}
    assert engine_options([slow, fast]) == {"kind": "auto", "block": 4 << 20, "depth": 16}
    assert engine_options([slow, None]) == {"kind": "pool", "block": 1 << 20, "depth": 8}


def test_memory_comes_from_the_drives_own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from tierzero.hardware import drives
    from tierzero.hardware.tuning import numa_node

    assert numa_node([]) == -1
    assert numa_node([tmp_path]) >= -1
    nodes = {"a": [1], "b": [1, 1], "c": [0], "d": []}

    def drive_of(path: str) -> SimpleNamespace:
        return SimpleNamespace(disks=[SimpleNamespace(numa_node=node) for node in nodes[path]])

    monkeypatch.setattr(drives, "drive_of", drive_of)
    assert [numa_node(list(names)) for names in ("a", "ab", "abc", "d", "ad")] == [1, 1, -1, -1, 1]
