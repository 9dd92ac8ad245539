"""What can be wrong with a store: failing writes, a full drive, bad manifests, other holders; a sentence for each."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import committed, contents, crash, faulty, read, some

from tierzero.errors import StoreBusyError, StoreCorruptError, StoreError
from tierzero.native import NATIVE
from tierzero.storage import manifest as manifests
from tierzero.storage.store import Store
from tierzero.tiers.faulty import Fault


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
        OSError, match=r"'big' of 4.9 KiB: 8.0 KiB more is needed and the drive has [0-9.]+ \w+ free"
    ) as caught:
        store.allocate(5000, "big")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == store.path
    with pytest.raises(OSError, match=r"12\.0 KiB more is needed"):
        store.reserve(12_000)
    with pytest.raises(OSError, match="free") as caught:
        store.reserve(1 << 60)
    assert "1048576.00 TiB" in str(caught.value)
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
        (lambda v: v.update(format=99), "reads up to format 2"),
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
    with pytest.raises(StoreBusyError, match="held by another model of this process"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


HOLD = """
import os, sys
from tierzero.native import NATIVE
from tierzero.storage.store import Store
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


@pytest.mark.parametrize("text", [b"", b"\0" * 64])
def test_a_lock_file_without_text_is_an_unknown_holder(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "lock").write_bytes(text)
    store = Store(tmp_path)
    assert "unknown" in str(store.stale)
    store.close()
    (tmp_path / "lock").write_bytes(text)
    (tmp_path / "data.bin").write_bytes(b"mine")
    with pytest.raises(StoreError, match="no store wrote it"):  # such a file vouches for nothing
        Store(tmp_path)
    assert contents(tmp_path) == {"lock": text, "data.bin": b"mine"}


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"my notes",
        b"[" * 100_000,
        b"12345",
        b'{"pid": 0, "host": "", "started": 0, "argv": []}',
        b'{"pid": -4, "host": "", "started": 0, "argv": []}',
        b'{"pid": 4, "host": "", "started": Infinity, "argv": []}',
        b'{"pid": 1e999, "host": "", "started": 0, "argv": []}',
        b'{"name": "somebody"}',
    ],
)
def test_a_lock_file_of_somebody_else_is_left_alone(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "lock").write_bytes(text)
    (tmp_path / "data.bin").write_bytes(b"mine")
    for overwrite in (False, True):
        with pytest.raises(StoreError, match="lock is a file that no store wrote, so it was left alone"):
            Store(tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == {"lock": text, "data.bin": b"mine"}


@pytest.mark.skipif(NATIVE is None, reason="stripes need the native extension")
def test_a_crash_in_one_directory_vouches_for_no_other(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    crash(Store(one))
    two.mkdir()
    (two / "data.bin").write_bytes(b"mine")
    before = contents(one)
    for order in ([one, two], [two, one]):
        with pytest.raises(StoreError, match=r"two/data\.bin exists, but no store wrote it"):
            Store(order)
    assert contents(one) == before
    assert contents(two) == {"data.bin": b"mine"}


def test_a_directory_in_which_no_file_can_be_made() -> None:
    with pytest.raises(StoreError, match=r"cannot lock .*Use a directory|is read-only"):
        Store("/proc/self")


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
    monkeypatch.setattr("tierzero.storage.space._STEP_MIN", 1)
    store = Store(tmp_path / "s")
    taken = [store.allocate(size, f"r{index}") for index in range(60)]
    assert store.space.capacity % 4096 == 0
    assert len({extent.offset for extent in taken}) == len(taken)
    store.close()
