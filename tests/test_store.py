"""The store: records, copy on write, snapshots, and a sentence for everything that can be wrong with its directory."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tierzero import blocks
from tierzero import manifest as manifests
from tierzero.checksum import checksum
from tierzero.errors import StoreBusyError, StoreCorruptError, StoreError
from tierzero.native import NATIVE
from tierzero.store import Store
from tierzero.tiers.base import BlockFile, open_block_file
from tierzero.tiers.faulty import Fault, FaultyFile

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


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(store: Store, name: str) -> torch.Tensor:
    out = torch.empty(store.current[name].nbytes, dtype=torch.uint8)
    asyncio.run(store.read(name, 0, out))
    return out


def crash(store: Store) -> None:
    """Leave everything as a killed process would."""
    store.file.close()
    store._lock.release(remove=False)
    store._closed = True


def faulty(plan: list[Fault]) -> Callable[[str, Any], BlockFile]:
    return lambda path, engine: FaultyFile(open_block_file(path, engine), plan)


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


def test_a_failing_write_leaves_no_trace(tmp_path: Path) -> None:
    plan: list[Fault] = []
    store = Store(tmp_path, opener=faulty(plan))

    async def go() -> None:
        await store.put("a", some(9000, 1))
        await store.snapshot("s", {"step": 1})
        for kind in ("error", "short"):
            plan[:] = [Fault("write", 1, kind, errno.ENOSPC, persistent=True)]  # type: ignore[arg-type]
            for operation in (lambda: store.put("a", some(9000, 2)), lambda: store.write("a", 5, some(7))):
                with pytest.raises(OSError, match=r"data\.bin") as caught:
                    await operation()
                assert caught.value.errno == errno.ENOSPC
        plan[:] = [Fault("sync", 1, persistent=True)]
        with pytest.raises(OSError, match="durable"):
            await store.snapshot("t", {})
        plan.clear()
        assert len(store.space.live()) == 1
        await store.verify()
        await store.put("a", some(9000, 3))
        await store.snapshot("t", {})

    asyncio.run(go())
    assert torch.equal(read(store, "a"), some(9000, 3))
    store.close()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_full_drive_is_a_sentence_and_nothing_changes(tmp_path: Path, nth: int) -> None:
    store = Store(tmp_path, opener=faulty([Fault("preallocate", 1, code=errno.ENOSPC, persistent=True)]))
    with pytest.raises(
        OSError, match=r"'big' of 5000 bytes: 8192 more bytes are needed and the drive has \d+ free"
    ) as caught:
        store.allocate(5000, "big")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == store.path
    with pytest.raises(OSError, match="12288 more bytes"):
        store.reserve(12_000)
    with pytest.raises(OSError, match="free") as caught:
        store.reserve(1 << 60)
    assert str(1 << 60) in str(caught.value)
    assert os.stat(store.path).st_size == 0
    store.close()


def test_growth_falls_back_to_what_is_needed(tmp_path: Path) -> None:
    store = Store(tmp_path, opener=faulty([Fault("preallocate", 1, code=errno.ENOSPC)]))
    assert store.allocate(5000, "a").nbytes == 5000
    assert os.stat(store.path).st_size == 8192
    store.close()


def test_discarding_twice_is_an_error(tmp_path: Path) -> None:
    store = Store(tmp_path)
    extent = store.allocate(5000, "a")
    store.discard(extent)
    with pytest.raises(ValueError, match="not in use"):
        store.discard(extent)
    with pytest.raises(StoreError, match="no record 'nope'"):
        store.remove("nope")
    store.create("a", 10)
    store.remove("a")
    assert store.space.live() == []
    store.close()


# -- corruption ------------------------------------------------------------------------------------------


def committed(path: Path) -> Store:
    """A closed store with one snapshot of two records."""
    store = Store(path)
    asyncio.run(store.put("a", some(10_000, 1)))
    asyncio.run(store.put("b", some(10_000, 2)))
    asyncio.run(store.snapshot("s", {"step": 1}))
    store.close()
    return store


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


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


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def reseal(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Change the payload and make the manifest's own hash right again."""

    def apply(value: dict[str, Any]) -> None:
        import hashlib

        change(value["payload"])
        value["sha256"] = hashlib.sha256(manifests._canonical(value["payload"]).encode()).hexdigest()

    return apply


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.update(format=99), "reads up to format 1"),
        (lambda v: v["payload"].update(epoch=5), "does not match its own sha256"),
        (lambda v: v.pop("payload"), "not a tierzero manifest"),
        (lambda v: v.update(format="x"), "not a tierzero manifest"),
        (reseal(lambda p: p.update(checksum="crc")), "checksums of kind 'crc'"),
        (reseal(lambda p: p.update(data="../other")), "something odd"),
        (reseal(lambda p: p.pop("snapshots")), "lacks something"),
        (reseal(lambda p: p["snapshots"]["s"]["records"].update(a=[5, 5, "0" * 32])), "something odd"),
        (reseal(lambda p: p["snapshots"]["s"]["records"].update(a=[0, 5, "zz"])), "something odd"),
        (reseal(lambda p: p["snapshots"]["s"]["records"].update(a=[12_288, 4097, "0" * 32])), "lies over another one"),
        (reseal(lambda p: p["snapshots"]["s"]["records"].update(a=[1 << 40, 5, "0" * 32])), "was truncated"),
    ],
)
def test_a_bad_manifest_is_a_sentence_and_nothing_is_deleted(tmp_path: Path, change: Any, says: str) -> None:
    committed(tmp_path)
    edit(tmp_path / manifests.NAME, change)
    before = contents(tmp_path)
    for resume in (True, False):
        with pytest.raises(StoreError, match=says if resume else None) as caught:
            Store(tmp_path, resume=resume)
        assert str(tmp_path) in str(caught.value)
        assert contents(tmp_path) == before


def test_a_truncated_manifest_at_every_length(tmp_path: Path) -> None:
    committed(tmp_path)
    path = tmp_path / manifests.NAME
    text = path.read_bytes()
    for length in [*range(0, len(text) - 2, 7), len(text) - 2]:
        path.write_bytes(text[:length])
        with pytest.raises(StoreCorruptError, match=r"manifest\.json is truncated or damaged"):
            Store(tmp_path, resume=True)
    Store(tmp_path, overwrite=True).close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("missing", [True, False])
def test_a_missing_or_short_data_file(tmp_path: Path, missing: bool) -> None:
    store = committed(tmp_path)
    if missing:
        os.unlink(store.path)
    else:
        os.truncate(store.path, 13_000)
    before = contents(tmp_path)
    with pytest.raises(StoreCorruptError, match="is missing" if missing else "ends at 13000, before the record 'b'"):
        Store(tmp_path, resume=True)
    assert contents(tmp_path) == before


def test_files_that_no_store_wrote_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    for overwrite in (False, True):
        with pytest.raises(StoreCorruptError, match="not a tierzero manifest"):
            Store(tmp_path, overwrite=overwrite)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "data.bin").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(StoreError, match="no store wrote it"):
            Store(tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == {"data.bin": b"mine"}


# -- directory and lock ----------------------------------------------------------------------------------


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        with pytest.raises(StoreError, match="file is a file: give the path of a directory"):
            Store(path)
    os.symlink(tmp_path / "gone", tmp_path / "link")
    with pytest.raises(StoreError, match="link is a dangling link"):
        Store(tmp_path / "link")


def test_a_path_that_cannot_be_made() -> None:
    with pytest.raises(StoreError, match="cannot be made"):
        Store("/proc/tierzero/store")


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nothing to resume"):
        Store(tmp_path, resume=True)
    assert os.listdir(tmp_path) == []


def test_a_second_store_in_this_process(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(StoreBusyError, match=f"held by a living process .pid {os.getpid()} "):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


HOLD = """
import os, sys
from tierzero.store import Store
store = Store(sys.argv[1])
child = os.fork() if sys.argv[2:] == ["fork"] else 0
if sys.argv[2:] != ["fork"] or child:
    print(os.getpid(), flush=True)
sys.stdin.read()
if child == 0 and sys.argv[2:] == ["fork"]:
    store.close()
    os._exit(0)
"""


def holder(path: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(path), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    return process


@pytest.mark.parametrize("fork", [False, True])
def test_a_store_held_by_a_living_process_and_then_by_a_dead_one(tmp_path: Path, fork: bool) -> None:
    process = holder(tmp_path, *(["fork"] if fork else []))
    with pytest.raises(StoreBusyError, match=f"pid {process.pid} .*{sys.executable}.*stop that run"):
        Store(tmp_path)
    process.kill()
    process.wait()  # with fork, its child is still there
    with pytest.raises(StoreError, match=f"left by a run that crashed .pid {process.pid} "):
        Store(tmp_path, reclaim=False)
    with pytest.raises(StoreError, match="nothing to resume"):
        Store(tmp_path, resume=True)
    store = Store(tmp_path)
    assert store.stale is not None  # refused openings have not hidden it
    assert store.stale.pid == process.pid
    assert f"pid {process.pid}" in str(store.stale)
    assert process.stdin is not None
    process.stdin.close()
    store.close()


def test_an_unreadable_lock_file_is_an_unknown_holder(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("{")
    (tmp_path / "data.bin").write_bytes(b"x" * 100_000)
    store = Store(tmp_path)
    assert "unknown" in str(store.stale)
    assert os.stat(store.path).st_size == 0
    store.close()


def test_a_crash_leaves_space_that_is_reused(tmp_path: Path) -> None:
    for _ in range(3):
        store = Store(tmp_path)
        asyncio.run(store.put("a", some(100_000)))
        crash(store)
    assert sum(entry.stat().st_size for entry in tmp_path.iterdir()) < 20 << 20
    store = Store(tmp_path)
    store.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [1, 4096, 5000, 12288, 100_001])
def test_the_file_grows_by_whole_pages_whatever_its_size(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of the file, the growth step, is not a whole number of pages for most sizes."""
    monkeypatch.setattr("tierzero.space._STEP_MIN", 1)
    store = Store(tmp_path / "s")
    taken = [store.allocate(size, f"r{index}") for index in range(60)]
    assert store.space.capacity % 4096 == 0
    assert len({extent.offset for extent in taken}) == len(taken)
    store.close()
