"""A store over several directories: data, snapshots and failures as with one, and each drive named that is at fault."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import contents, crash

import tierzero.storage.store
from tierzero.errors import StoreBusyError, StoreCorruptError, StoreError
from tierzero.native import NATIVE
from tierzero.storage.store import Store
from tierzero.tiers.faulty import Fault, FaultyFile

needs_native = pytest.mark.skipif(NATIVE is None, reason="stripes need the native extension")
STRIPE = 1 << 20


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def engine() -> Iterator[Any]:
    from tierzero.tiers.nvme import NativeEngine

    native = NativeEngine(block=1 << 18)
    yield native
    native.close()


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say how fast the drives are."""

    def choose(*values: int) -> None:
        monkeypatch.setattr(tierzero.storage.store, "_weights", lambda directories: list(values))

    return choose


def drives(tmp_path: Path, count: int) -> list[Path]:
    return [tmp_path / f"drive{index}" for index in range(count)]


def names(where: list[Path]) -> list[list[str]]:
    return [sorted(os.listdir(path)) for path in where]


async def check(store: Store, records: dict[str, torch.Tensor]) -> None:
    await store.verify()
    assert store.current.keys() == records.keys()
    for name, data in records.items():
        out = torch.empty_like(data)
        await store.read(name, 0, out)
        assert torch.equal(out, data), name


@needs_native
@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 2, 5), (4, 3, 2, 1)])
def test_a_run_and_its_resumption_in_any_order(
    tmp_path: Path, engine: Any, weights: Any, shares: tuple[int, ...]
) -> None:
    weights(*shares)
    where = drives(tmp_path, len(shares))
    store = Store(where, engine=engine)
    assert store.directories == list(map(str, where))
    sizes = (0, 1, 4095, 4097, 300_000, STRIPE, STRIPE + 1, 7 * STRIPE + 12_345, 3 * STRIPE)
    records = {f"r{size}": some(size, seed) for seed, size in enumerate(sizes)}

    async def fill() -> None:
        for name, data in records.items():
            await store.put(name, data)
        await check(store, records)
        await store.snapshot("s", {"step": 1})
        await store.put("r1", some(9 * STRIPE, 77))  # not in the snapshot

    asyncio.run(fill())
    layout = store.layout
    store.close()
    assert names(where) == [
        ["data.bin", "manifest.json", "member.json"],
        *[["data.bin", "member.json"]] * (len(shares) - 1),
    ]
    lengths = [(path / "data.bin").stat().st_size for path in where]
    cycles = [length / share / STRIPE for length, share in zip(lengths, shares, strict=True)]
    assert max(cycles) - min(cycles) <= 1.0
    weights(*([1] * len(shares)))  # the drives have become alike: what was written stays where it is
    for seed in range(3):
        order = random.Random(seed).sample(where, len(where))
        again = Store(order, engine=engine, resume=True)
        assert again.layout == layout
        assert again.directories == list(map(str, where))

        async def go(again: Store = again, seed: int = seed) -> None:
            await check(again, records)
            records["more"] = some(2 * STRIPE + seed, seed)
            await again.put("more", records["more"])
            await again.snapshot("s", {"step": seed})

        asyncio.run(go())
        again.close()
    fresh = Store(where, engine=engine, overwrite=True)
    assert fresh.layout is not None
    assert layout is not None
    assert fresh.layout.store != layout.store
    assert fresh.layout.weights == (1,) * len(shares)
    fresh.close()
    assert names(where) == [[]] * len(shares)


@needs_native
def test_nothing_is_left_behind(tmp_path: Path, engine: Any) -> None:
    where = drives(tmp_path, 3)
    store = Store(where, engine=engine)
    asyncio.run(store.put("a", some(5 * STRIPE)))
    assert names(where) == [["data.bin", "lock", "member.json"]] * 3
    store.close()
    assert names(where) == [[], [], []]
    store = Store(where, engine=engine)
    asyncio.run(store.put("a", some(5 * STRIPE)))
    store.close(keep=True)  # as a crash leaves it
    with pytest.raises(StoreError, match="left by a run that crashed"):
        Store(where, engine=engine, reclaim=False)
    again = Store(where[::-1], engine=engine)  # nothing was committed: any order will do
    assert again.space.capacity == 0
    again.close()
    assert names(where) == [[], [], []]


@needs_native
def test_a_store_that_cannot_be_opened_leaves_nothing(tmp_path: Path, engine: Any) -> None:
    where = drives(tmp_path, 2)

    def opener(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files", str(where[1] / "data.bin"))

    with pytest.raises(StoreError, match=r"drive1/data\.bin cannot be opened: Too many open files"):
        Store(where, engine=engine, opener=opener)
    assert names(where) == [[], []]
    (where[1] / "data.bin").mkdir()
    with pytest.raises(StoreError, match="no store wrote it"):
        Store(where, engine=engine)
    assert names(where) == [[], ["data.bin"]]


def test_without_the_extension(tmp_path: Path) -> None:
    where = drives(tmp_path, 2)
    with pytest.raises(StoreError, match="cannot be striped over 2 directories without the native extension"):
        Store(where)
    assert names(where) == [[], []]


@needs_native
def test_every_directory_is_locked(tmp_path: Path, engine: Any) -> None:
    where = drives(tmp_path, 2)
    store = Store(where, engine=engine)
    for other in (where[:1], where[1:], where[::-1], [where[1], tmp_path / "third"]):
        with pytest.raises(StoreBusyError, match="held by another model of this process"):
            Store(other, engine=engine)
    store.close()
    assert names(where) == [[], []]
    assert os.listdir(tmp_path / "third") == []


def committed(where: list[Path], engine: Any) -> dict[str, torch.Tensor]:
    records = {"a": some(6 * STRIPE + 5, 1), "b": some(70_000, 2)}
    store = Store(where, engine=engine)

    async def go() -> None:
        for name, data in records.items():
            await store.put(name, data)
        await store.snapshot("s", {"step": 4})

    asyncio.run(go())
    store.close()
    return records


@needs_native
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_member_that_is_gone_or_short_is_named(tmp_path: Path, engine: Any, index: int) -> None:
    where = drives(tmp_path, 3)
    records = committed(where, engine)
    path = where[index] / "data.bin"
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(StoreCorruptError, match=rf"drive{index}/data\.bin of snapshot 's' is missing"):
        Store(where, engine=engine, resume=True)
    assert not path.exists()
    path.write_bytes(data[: len(data) - STRIPE - 4096])
    with pytest.raises(StoreCorruptError, match=rf"drive{index}/data\.bin ends at .* it was truncated"):
        Store(where, engine=engine, resume=True)
    path.write_bytes(data)
    flipped = bytearray(data)
    flipped[100] ^= 1
    path.write_bytes(flipped)
    store = Store(where, engine=engine, resume=True)
    with pytest.raises(StoreCorruptError, match="does not match its checksum"):
        asyncio.run(store.verify())
    store.close()
    path.write_bytes(data)
    store = Store(where, engine=engine, resume=True)
    asyncio.run(check(store, records))
    store.close()


@needs_native
def test_what_does_not_belong_is_refused(tmp_path: Path, engine: Any) -> None:
    where = drives(tmp_path, 2)
    committed(where, engine)
    before = names(where)
    for given, says in (
        ([where[0]], "member 1 of the 2"),
        ([where[1]], "is member 1 of 2 of a striped store"),
        ([where[0], tmp_path / "new"], "new is no member of the striped store in"),
        ([where[1], tmp_path / "new"], "is member 1 of 2 of a striped store"),
        ([*where, tmp_path / "new"], "new is no member of the striped store in"),
        ([where[0], where[0]], "given twice"),
        ([where[0], where[0] / "in"], "lies inside"),
    ):
        for resume in (True, False):
            with pytest.raises(StoreError, match=says):
                Store(given, engine=engine, resume=resume)
    with pytest.raises(StoreError, match=r"holds the snapshot 's' of step 4: resume it"):
        Store(where, engine=engine)
    assert names(where) == before
    Store(where[1:], engine=engine, overwrite=True).close()
    assert os.listdir(where[1]) == []


@needs_native
def test_a_failing_commit_keeps_the_one_before(tmp_path: Path, engine: Any) -> None:
    where = drives(tmp_path, 2)
    records = committed(where, engine)
    plan: list[Fault] = []

    def opener(paths: Any, engine: Any, **options: Any) -> Any:
        return FaultyFile(tierzero.storage.store.open_block_file(paths, engine, **options), plan)

    store = Store(where, engine=engine, resume=True, opener=opener)
    asyncio.run(store.put("a", some(9 * STRIPE, 9)))
    plan.append(Fault("sync", 1))
    with pytest.raises(OSError, match="injected"):
        asyncio.run(store.snapshot("t", {}))
    store.close()
    again = Store(where, engine=engine, resume="s")
    asyncio.run(check(again, records))
    again.close()


@needs_native
def test_a_manifest_is_missed_from_the_first_commit_on_and_not_before(tmp_path: Path, engine: Any) -> None:
    where = drives(tmp_path, 3)
    for _ in range(2):  # killed before its first commit, a run starts again by itself
        store = Store(where, engine=engine)
        asyncio.run(store.put("a", some(3 * STRIPE)))
        crash(store)
    store = Store(where, engine=engine)
    asyncio.run(store.put("a", some(3 * STRIPE)))
    asyncio.run(store.snapshot("s", {}))
    store.close()
    kept = (where[0] / "manifest.json").read_bytes()
    os.unlink(where[0] / "manifest.json")
    before = [contents(path) for path in where]
    for given in (where, where[::-1]):
        for resume in (False, True):
            with pytest.raises(StoreCorruptError, match=r"manifest\.json is gone.*overwrite=True"):
                Store(given, engine=engine, resume=resume)
    assert [contents(path) for path in where] == before
    (where[0] / "manifest.json").write_bytes(kept)
    store = Store(where, engine=engine, resume=True)
    asyncio.run(check(store, {"a": some(3 * STRIPE)}))
    asyncio.run(store.snapshot("t", {}))
    store.close()
    os.unlink(where[0] / "manifest.json")
    Store(where, engine=engine, overwrite=True).close()
    assert names(where) == [[], [], []]
