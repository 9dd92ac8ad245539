"""A store over several directories: data, snapshots and failures as with one, and each drive named that is at fault."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero.store
from tierzero.errors import StoreBusyError, StoreCorruptError, StoreError
from tierzero.native import NATIVE
from tierzero.store import Store
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
        monkeypatch.setattr(tierzero.store, "_weights", lambda directories: list(values))

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
        with pytest.raises(StoreBusyError, match="is held by a living process"):
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
        return FaultyFile(tierzero.store.open_block_file(paths, engine, **options), plan)

    store = Store(where, engine=engine, resume=True, opener=opener)
    asyncio.run(store.put("a", some(9 * STRIPE, 9)))
    plan.append(Fault("sync", 1))
    with pytest.raises(OSError, match="injected"):
        asyncio.run(store.snapshot("t", {}))
    store.close()
    again = Store(where, engine=engine, resume="s")
    asyncio.run(check(again, records))
    again.close()


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(path)], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@needs_native
@pytest.mark.parametrize("first", [True, False])
def test_one_full_drive_is_named(tmp_path: Path, small_drive: Path, engine: Any, first: bool) -> None:
    """The scarcest member decides, and what was committed before stays whole (S22)."""
    where = [small_drive / "store", tmp_path / "large"] if first else [tmp_path / "large", small_drive / "store"]
    scarce = str(small_drive / "store" / "data.bin")
    records = committed(where, engine)
    store = Store(where, engine=engine, resume=True)
    with pytest.raises(OSError, match=r"more bytes are needed and the drive has \d+ free, as much as") as caught:
        store.reserve(64 << 20)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, scarce)

    async def put_many() -> None:
        for index in range(100):
            await store.put(f"r{index}", torch.full((3 << 20,), index, dtype=torch.uint8))

    async def go() -> None:
        with pytest.raises(OSError, match=r"'r\d+' of 3145728 bytes") as caught:
            await put_many()
        count = len(store.current) - len(records)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, scarce)
        assert count >= 3  # 16 MiB on each of two drives, less what was there
        with open(small_drive / "filler", "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                continue
        if first:  # the manifest lies there
            with pytest.raises(OSError, match="the snapshot before it still stands"):
                await store.snapshot("t", {"step": 5})
        for name, data in records.items():
            out = torch.empty_like(data)
            await store.read(name, 0, out)
            assert torch.equal(out, data)
        os.unlink(small_drive / "filler")
        for index in range(count):
            store.remove(f"r{index}")
        await store.snapshot("t", {"step": 5})

    asyncio.run(go())
    store.close()
    again = Store(where, engine=engine, resume=True)
    asyncio.run(check(again, records))
    again.close()


CHILD = """
import asyncio, sys, torch
from tierzero.errors import StoreError
from tierzero.store import Store
from tierzero.tiers.nvme import NativeEngine

async def main():
    engine = NativeEngine()
    try:
        store = Store(sys.argv[1:], engine=engine, resume=True)
        step = store.resumed.meta["step"]
    except StoreError as error:
        assert "nothing to resume" in str(error), error
        store, step = Store(sys.argv[1:], engine=engine), 0
    print("step", step, flush=True)
    while True:
        step += 1
        for index in range(3):
            await store.put(f"r{index}", torch.full((1_500_000 + index,), (7 * index + step) % 251, dtype=torch.uint8))
            print("put", flush=True)
        await store.snapshot("last", {"step": step})
        print("step", step, flush=True)

asyncio.run(main())
"""


@needs_native
def test_kill_9_at_random_moments(tmp_path: Path, engine: Any) -> None:
    draw, committed, where = random.Random(3), 0, drives(tmp_path, 3)
    for _ in range(int(os.environ.get("TIERZERO_KILLS", "4"))):
        order = draw.sample(where, 3)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, *map(str, order)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(draw.randrange(1, 25)):
            word, *rest = process.stdout.readline().split()
            if word == "step":
                committed = int(rest[0])
        process.kill()
        for line in process.stdout:  # what it had committed before the signal arrived
            if line.startswith("step"):
                committed = int(line.split()[1])
        process.wait()
        if not committed:
            Store(draw.sample(where, 3), engine=engine).close()
            continue
        store = Store(draw.sample(where, 3), engine=engine, resume=True)
        assert store.resumed is not None
        step = store.resumed.meta["step"]
        assert step in (committed, committed + 1)  # the commit may have been done and not yet told
        assert store.stale is not None
        expected = {f"r{i}": torch.full((1_500_000 + i,), (7 * i + step) % 251, dtype=torch.uint8) for i in range(3)}
        asyncio.run(check(store, expected))
        store.close()
