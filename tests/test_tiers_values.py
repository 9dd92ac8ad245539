"""Every value of `Tiers`: one that works, or a sentence that names it."""

from __future__ import annotations

import os
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import tierzero as tz
from tierzero.errors import ConfigError, StoreError
from tierzero.storage.store import Store

NO_PATHS: list[Any] = [
    [None],
    ["a", None],
    [],
    (),
    {},
    set(),
    5,
    5.0,
    True,
    b"abc",
    [b"a", b"b"],
    [1, 2],
    "",
    " ",
    [""],
    ["a", ""],
    [["a"], ["b"]],
    (path for path in ["a", "b"]),
    {"a", "b"},
    {"a": 1, "b": 2},
    "a\0b",
    ["a\0b", "c"],
    object(),
    bytearray(b"x"),
    np.array(["a", "b"]),
]


def name_of(value: Any) -> str:
    """The same in every process, as a set's order is not."""
    return "a set" if isinstance(value, set) and value else repr(value)[:20].replace("\0", "0")


@pytest.mark.parametrize("value", NO_PATHS, ids=name_of)
def test_what_is_no_path(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nvme"):
        tz.Tiers(nvme=value, compute="cpu").check()
    with pytest.raises((ConfigError, StoreError)):
        Store(value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["a", Path("a"), ["a"], ("a",), ["a", Path("b")]])
def test_what_is_a_path_is_the_same_each_time(value: Any) -> None:
    tiers = tz.Tiers(nvme=value, compute="cpu")
    assert tiers.directories() == tiers.directories()
    assert all(isinstance(path, Path) for path in tiers.directories())


NO_SIZES: list[Any] = [
    [],
    {},
    b"1PB",
    True,
    float("nan"),
    float("inf"),
    -1,
    "nan",
    "1e400PB",
    "",
    10**400,
    "9" * 5000,
    complex(1),
    Decimal(5),
    object(),
]


@pytest.mark.parametrize("name", ["host", "device", "nvme_tbw", "activations"])
@pytest.mark.parametrize("value", NO_SIZES, ids=lambda value: repr(value)[:20])
def test_what_is_no_size(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        tz.Tiers(**{"compute": "cpu", name: value}).check()
    assert len(str(caught.value)) < 12_000


@pytest.mark.parametrize("name", ["host", "device", "activations"])
def test_no_budget_is_no_size(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        tz.Tiers(**{"compute": "cpu", name: None}).check()


@pytest.mark.parametrize("value", [np.int64(10**9), np.float32(10**9), np.float64(1e9), Fraction(10**9), 1e9, "1GB"])
def test_numbers_of_every_kind_are_sizes(value: Any) -> None:
    tiers = tz.Tiers(host=value, device=value, nvme_tbw=value, compute="cpu")
    assert (tiers.host_bytes(), tiers.device_bytes(), tiers.rated_bytes()) == (10**9,) * 3


def test_activations_are_a_part_of_the_host_budget() -> None:
    assert tz.Tiers(host="1GiB", activations="25%", compute="cpu").activation_bytes() == 1 << 28
    assert tz.Tiers(host="1GiB", activations=5e6, compute="cpu").activation_bytes() == 5_000_000
    assert tz.Tiers(host="1GiB", compute="cpu").activation_bytes() == 0
    with pytest.raises(ConfigError, match="activations='2GiB' is more than the host budget of 1073741824 bytes"):
        tz.Tiers(host="1GiB", activations="2GiB", compute="cpu").check()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1.0, [], b"5", None, True, -1, "many", "9" * 5000])
def test_what_is_no_depth(value: Any) -> None:
    with pytest.raises(ConfigError, match="prefetch"):
        tz.Tiers(prefetch=value, compute="cpu").check()


def test_numbers_of_every_kind_are_depths() -> None:
    assert [tz.Tiers(prefetch=depth, compute="cpu").depth() for depth in (3, np.int64(3), "3")] == [3, 3, 3]


def test_a_machine_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", nothing)
    with pytest.raises(ConfigError, match=r"/proc/meminfo: No such file or directory.: mount /proc"):
        tz.Tiers(compute="cpu").check()


def test_a_relative_path_in_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for given in ("a", ["a", "b"]):
        with pytest.raises(StoreError, match="working directory, which no longer exists"):
            Store(given)
    monkeypatch.chdir(tmp_path)


def test_links_that_lead_to_themselves(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for given in (loop, loop / "in", [loop, tmp_path / "b"]):
        with pytest.raises(StoreError, match="loop"):
            Store(given)


@pytest.mark.parametrize("value", [0, -1, 257, True, 1.0, "many", None, "9" * 5000])
def test_what_is_no_number_of_threads(value: Any) -> None:
    with pytest.raises(ConfigError, match="update_threads"):
        tz.Tiers(update_threads=value, compute="cpu").check()


@pytest.mark.parametrize("value", [5, "89", [0.0], [None], [-1], [100_000], [10**30]])
def test_what_are_no_cores(value: Any) -> None:
    with pytest.raises(ConfigError, match="update_cores"):
        tz.Tiers(update_cores=value, compute="cpu").check()


def test_threads_are_as_many_as_cores_and_at_most_eight() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert 1 <= tz.Tiers(compute="cpu").crew()[0] <= min(8, len(cores))
    assert tz.Tiers(compute="cpu", update_cores=cores[:1] * 3).crew() == (1, (cores[0],))
    assert tz.Tiers(compute="cpu", update_cores=[np.int64(cores[0])], update_threads=np.int64(3)).crew()[0] == 3


def test_the_step_computes_on_its_cores_alone(tmp_path: Path) -> None:
    """All of its threads do, and nobody else is moved."""
    before = {int(thread): os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
    core = min(os.sched_getaffinity(0))
    model = torch.nn.Linear(8, 8)
    tiers = tz.Tiers(nvme=tmp_path, host="64MiB", device="64MiB", compute="cpu", update_cores=[core], update_threads=3)
    tz.offload(model, tiers)
    tz.AdamW(model.parameters())
    try:
        after = {int(thread): os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
        assert {thread: after[thread] for thread in before if thread in after} == {
            thread: cores for thread, cores in before.items() if thread in after
        }
        kept = [thread for thread in after if thread not in before and after[thread] == {core}]
        assert len(kept) >= 3
        names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in kept]
        assert names.count("tz-step") == 1
        assert names.count("tz-adam") == 2
    finally:
        tz.close(model)
    for _ in range(1000):  # one that has ended is listed for another moment
        left = set(kept) & {int(thread) for thread in os.listdir("/proc/self/task")}
        if not left:
            break
        time.sleep(0.01)
    assert not left, "threads outlive close()"
