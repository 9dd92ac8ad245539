"""The store: records, copy on write and snapshots."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import committed, faulty, read, some

from tierzero.errors import StoreCorruptError, StoreError
from tierzero.native import NATIVE
from tierzero.storage import blocks
from tierzero.storage.checksum import checksum
from tierzero.storage.store import Store
from tierzero.tiers.faulty import Fault

KINDS = ["portable", pytest.param("native", marks=pytest.mark.skipif(NATIVE is None, reason="no native extension"))]


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "portable":
        yield None
        return
    from tierzero.tiers.nvme import NativeEngine

    native = NativeEngine(threads=2, block=1 << 16)
    yield native
    native.close()


def test_a_run_and_its_resumption(tmp_path: Path, engine: Any) -> None:
    store = Store(tmp_path / "deep" / "er", engine=engine)
    assert store.stale is None
    assert store.resumed is None
    store.reserve(1 << 20)
    assert store.space.capacity == 1 << 20

    async def go() -> None:
        await store.put("a", some(10_000, 1))
        await store.put("empty", some(0))
        await store.snapshot("first", {"step": 3, "lr": 0.1, "7": None})
        await store.put("a", some(20_000, 2))
        await store.put("b", some(5, 3))
        await store.verify()

    asyncio.run(go())
    assert torch.equal(read(store, "a"), some(20_000, 2))
    assert store.checksum_of("b") == checksum(some(5, 3))
    store.close()
    store.close()
    assert sorted(os.listdir(store.directory)) == ["data.bin", "manifest.json"]

    again = Store(store.directory, engine=engine, resume=True)
    assert again.resumed is not None
    assert again.resumed.meta == {"step": 3, "lr": 0.1, "7": None}
    assert sorted(again.current) == ["a", "empty"]
    assert torch.equal(read(again, "a"), some(10_000, 1))
    assert read(again, "empty").numel() == 0
    asyncio.run(again.verify())
    assert os.stat(again.path).st_size == 12_288  # nothing but what the snapshot holds
    again.close()
    with pytest.raises(StoreError, match="closed"):
        again.allocate(1, "x")


def test_without_a_snapshot_nothing_stays(tmp_path: Path, engine: Any) -> None:
    store = Store(tmp_path / "store", engine=engine)
    asyncio.run(store.put("a", some(100)))
    store.close()
    assert os.listdir(store.directory) == []
    store = Store(tmp_path / "store", engine=engine)
    store.close(keep=True)
    assert sorted(os.listdir(store.directory)) == ["data.bin", "lock"]
    Store(tmp_path / "store", engine=engine).close()


def test_partial_writes_and_reads(tmp_path: Path, engine: Any) -> None:
    store = Store(tmp_path, engine=engine)
    expected = some(30_001, 1)

    async def go() -> None:
        store.create("a", 30_001)
        await store.write("a", 0, expected)
        for seed, (offset, nbytes) in enumerate(
            [
                (0, 1),
                (1, 4095),
                (4096, 4096),
                (5000, 12_000),
                (8191, 2),
                (29_999, 2),
                (30_001, 0),
                (0, 30_000),
                (12_288, 17_713),
            ]
        ):
            piece = some(nbytes, 10 + seed)
            expected[offset : offset + nbytes] = piece
            await store.write("a", offset, piece)
            out = torch.empty(nbytes, dtype=torch.uint8)
            await store.read("a", offset, out)
            assert torch.equal(out, piece)
            assert torch.equal(await whole(), expected)
        for offset, nbytes in [(-1, 2), (30_000, 2), (30_002, 0)]:
            with pytest.raises(ValueError, match="not inside the record 'a'"):
                await store.write("a", offset, some(nbytes))

    async def whole() -> torch.Tensor:
        out = torch.empty(30_001, dtype=torch.uint8)
        await store.read("a", 0, out)
        return out

    asyncio.run(go())
    assert store.checksum_of("a") is None
    snapshot = asyncio.run(store.snapshot("s", {}))
    assert snapshot.records["a"][1] == checksum(expected) == store.checksum_of("a")

    # now it is pinned: a change goes to a copy
    before = store.current["a"]
    asyncio.run(store.write("a", 7, some(3, 99)))
    assert store.current["a"] != before
    store.close()
    again = Store(tmp_path, engine=engine, resume="s")
    assert torch.equal(read(again, "a"), expected)
    again.close()


def test_a_reader_keeps_the_version_it_began_with(tmp_path: Path) -> None:
    hold = Fault("read", 1, "hold")
    store = Store(tmp_path, opener=faulty([hold]))
    out = torch.empty(50_000, dtype=torch.uint8)

    async def go() -> None:
        await store.put("a", some(50_000, 1))
        reading = asyncio.ensure_future(store.read("a", 0, out))
        await asyncio.to_thread(hold.reached.wait)
        for seed in range(2, 6):
            await store.put("a", some(50_000, seed))
        hold.gate.set()
        await reading

    asyncio.run(go())
    assert torch.equal(out, some(50_000, 1))
    assert len(store.space.live()) == 1
    store.close()


def test_a_snapshot_waits_for_a_write_in_place_and_holds_one_moment(tmp_path: Path) -> None:
    hold = Fault("write", 2, "hold")
    store = Store(tmp_path, opener=faulty([hold]))

    async def go() -> None:
        await store.put("a", some(50_000, 1))
        writing = asyncio.ensure_future(store.write("a", 0, some(9, 2)))
        await asyncio.to_thread(hold.reached.wait)
        committing = asyncio.ensure_future(store.snapshot("s", {}))
        await asyncio.sleep(0)
        with pytest.raises(StoreError, match="being written already"):
            await store.snapshot("t", {})
        later = asyncio.ensure_future(store.write("a", 9, some(9, 3)))
        hold.gate.set()
        await asyncio.gather(writing, committing, later)

    asyncio.run(go())
    store.close()
    again = Store(tmp_path, resume=True)
    asyncio.run(again.verify())
    expected = some(50_000, 1)
    expected[:9] = some(9, 2)
    assert torch.equal(read(again, "a"), expected)
    again.close()


def test_several_snapshots(tmp_path: Path, engine: Any) -> None:
    store = Store(tmp_path, engine=engine)

    async def go() -> None:
        for step in range(4):
            await store.put("a", some(9000, step))
            await store.snapshot(f"s{step}", {"step": step}, keep={f"s{step - 1}"} if step else ())

    asyncio.run(go())
    assert sorted(store.snapshots) == ["s2", "s3"]
    assert len(store.space.live()) == 2
    with pytest.raises(StoreError, match="no snapshot 's0' to keep"):
        asyncio.run(store.snapshot("x", {}, keep={"s0"}))
    with pytest.raises(TypeError):
        asyncio.run(store.snapshot("x", {"bad": object()}))
    asyncio.run(store.snapshot("s3", {"step": 33}, keep={"s2", "s3"}))
    store.close()
    for name, step in (("s2", 2), ("s3", 3)):
        again = Store(tmp_path, engine=engine, resume=name)
        assert torch.equal(read(again, "a"), some(9000, step))
        again.close()
    with pytest.raises(StoreError, match="no snapshot 's0' to resume; it has 's2', 's3'"):
        Store(tmp_path, resume="s0")
    with pytest.raises(StoreError, match=r"snapshot 's3' of step 33.*overwrite=True"):
        Store(tmp_path)
    store = Store(tmp_path, overwrite=True)
    assert store.current == {}
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "lock"]
    store.close()
    assert os.listdir(tmp_path) == []


def test_a_changed_byte_is_found_and_named(tmp_path: Path, engine: Any) -> None:
    store = committed(tmp_path)
    extent = store.current["b"]
    with open(store.path, "r+b") as file:
        file.seek(extent.offset + 9_999)
        byte = file.read(1)
        file.seek(extent.offset + 9_999)
        file.write(bytes([byte[0] ^ 1]))
    again = Store(tmp_path, engine=engine, resume=True)
    seen: list[tuple[int, int]] = []
    asyncio.run(again.verify(["a"], lambda done, total: seen.append((done, total))))
    assert seen == [(10_000, 10_000)]
    with pytest.raises(StoreCorruptError, match=f"'b' .10000 bytes at offset {extent.offset} of .*data.bin"):
        asyncio.run(again.verify())
    again.close()


def test_records_of_many_blocks(tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 8192)
    plan: list[Fault] = []
    store = Store(tmp_path, engine=engine, opener=faulty(plan))
    expected = some(8192 * 5 + 17, 1)

    async def go() -> None:
        await store.put("a", expected)
        await store.snapshot("s", {})
        await store.write("a", 9000, some(9, 2))  # copies all blocks
        expected[9000:9009] = some(9, 2)
        assert (await store.snapshot("t", {})).records["a"][1] == checksum(expected)
        for nth in range(1, 7):
            store.file.counts["read"] = 0  # type: ignore[attr-defined]
            plan[:] = [Fault("read", nth, persistent=True)]
            with pytest.raises(OSError, match=f"offset {store.current['a'].offset + 8192 * (nth - 1)}: .*injected"):
                await store.verify()
            plan[:] = [Fault("read", nth, "corrupt", at=16)]
            store.file.counts["read"] = 0  # type: ignore[attr-defined]
            with pytest.raises(StoreCorruptError, match="'a'"):
                await store.verify()
        plan.clear()
        await store.verify()

    asyncio.run(go())
    assert torch.equal(read(store, "a"), expected)
    store.close()
