"""The store when the process or the drive gives out: kill -9, a crash in a commit, a full or read-only drive."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import kill_a_child

from tierzero.errors import StoreError
from tierzero.native import NATIVE
from tierzero.storage.store import Store

RECORDS = 6
CHILD = """
import asyncio, sys, torch
from tierzero.native import NATIVE
from tierzero.storage.store import Store

def record(index, step):
    return torch.full((50_000 + index,), (7 * index + step) % 251, dtype=torch.uint8)

async def main():
    engine = None
    if sys.argv[2] == "native":
        from tierzero.tiers.nvme import NativeEngine
        engine = NativeEngine(threads=2)
    try:
        store = Store(sys.argv[1], engine=engine, resume=True)
        step = store.resumed.meta["step"]
    except Exception as error:
        assert "nothing to resume" in str(error), error
        store, step = Store(sys.argv[1], engine=engine), 0
    print("step", step, flush=True)
    while True:
        step += 1
        for index in range(6):
            await store.put(f"r{index}", record(index, step))
            print("put", flush=True)
        await store.snapshot("last", {"step": step})
        print("step", step, flush=True)

asyncio.run(main())
"""


def record(index: int, step: int) -> torch.Tensor:
    return torch.full((50_000 + index,), (7 * index + step) % 251, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["portable", "native"])
def test_kill_9_at_random_moments(tmp_path: Path, kind: str) -> None:
    if kind == "native" and NATIVE is None:
        pytest.skip("no native extension")
    draw = random.Random(kind)
    committed = 0
    for _ in range(int(os.environ.get("TIERZERO_KILLS", "4"))):
        pid, committed = kill_a_child(
            CHILD, [tmp_path / "store", kind], draw.randrange(1, 40), committed, tmp_path / "errors"
        )
        if not committed:
            Store(tmp_path / "store").close()
            continue
        store = Store(tmp_path / "store", resume=True)
        assert store.resumed is not None
        step = store.resumed.meta["step"]
        assert step in (committed, committed + 1)  # the commit may have been done and not yet told
        assert store.stale is not None
        assert store.stale.pid == pid

        async def check(store: Store = store, step: int = step) -> None:
            await store.verify()
            for index in range(RECORDS):
                out = torch.empty(50_000 + index, dtype=torch.uint8)
                await store.read(f"r{index}", 0, out)
                assert torch.equal(out, record(index, step))

        asyncio.run(check())
        assert os.stat(store.path).st_size <= 3 * RECORDS * 53_248  # no stale disk use
        store.close()


class Crash(BaseException):
    """Stands for the end of the process."""


def test_a_crash_at_every_system_call_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    asyncio.run(store.put("a", record(0, 1)))
    asyncio.run(store.snapshot("s", {"step": 1}))
    step = 1
    outcomes = set()
    for at in range(1, 100):
        asyncio.run(store.put("a", record(0, step + 1)))
        calls = 0

        def count(function: Any, at: int = at) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at:
                    raise Crash
                return function(*args, **kwargs)

            return counted

        with monkeypatch.context() as patch:
            for name in ("fsync", "fdatasync", "replace", "open", "unlink"):
                patch.setattr(os, name, count(getattr(os, name)))
            patch.setattr("builtins.open", count(open))
            try:
                asyncio.run(store.snapshot("s", {"step": step + 1}))
                done = True
            except Crash:
                done = False
        assert not done or calls < at
        store.file.close()
        store._lock.release(remove=False)
        store = Store(tmp_path, resume=True)
        assert store.resumed is not None
        found = store.resumed.meta["step"]
        assert found in (step, step + 1)
        outcomes.add((done, found - step))
        step = found
        asyncio.run(store.verify())
        out = torch.empty(50_000, dtype=torch.uint8)
        asyncio.run(store.read("a", 0, out))
        assert torch.equal(out, record(0, step))
        if done:
            break
    assert outcomes == {(False, 0), (False, 1), (True, 1)}
    store.close()


def test_an_error_at_every_system_call_of_a_commit_and_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    asyncio.run(store.put("a", record(0, 0)))
    asyncio.run(store.snapshot("s", {"step": 0}))
    step = 0
    path = tmp_path / "manifest.json"
    for at in range(1, 100):
        before = path.read_bytes()
        step += 1
        asyncio.run(store.put("a", record(0, step)))
        calls = 0

        def count(function: Any, at: int = at) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at:
                    raise OSError(errno.ENOSPC, "no space (injected)")
                return function(*args, **kwargs)

            return counted

        with monkeypatch.context() as patch:
            for name in ("fsync", "fdatasync", "replace"):
                patch.setattr(os, name, count(getattr(os, name)))
            patch.setattr("builtins.open", count(open))
            try:
                asyncio.run(store.snapshot("s", {"step": step}))
                failure = ""
            except OSError as error:
                failure = str(error)
        done = not failure
        assert done or str(tmp_path) in failure
        assert not (tmp_path / "manifest.json.new").exists()
        # two of the three versions at most stay pinned, whatever failed, and the manifest's own is one of them
        assert len(store.space.live()) <= 3
        for other in range(100, 104):
            asyncio.run(store.put("a", record(0, other)))  # must not reuse what the manifest names
        store.file.close()
        store._lock.release(remove=False)
        if not done:  # after a power failure the manifest before may be there again, and must be whole
            after = path.read_bytes()
            path.write_bytes(before)
            data = Path(store.path).read_bytes()
            store = Store(tmp_path, resume=True)
            asyncio.run(store.verify())
            store.file.close()
            store._lock.release(remove=False)
            Path(store.path).write_bytes(data)
            path.write_bytes(after)
        store = Store(tmp_path, resume=True)
        asyncio.run(store.verify())
        if done:
            break
    assert done
    assert at > 4
    asyncio.run(store.put("a", record(0, step)))
    asyncio.run(store.snapshot("s", {"step": step}))
    assert len(store.space.live()) == 1
    store.close()


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "drive"
    path.mkdir()
    try:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tierzero-test", str(path)], capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if made.returncode:
        pytest.skip("mounting is not permitted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> None:
    """Write until the drive has no byte left."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            continue


@pytest.mark.parametrize("kind", ["portable", "native"])
def test_a_full_drive(small_drive: Path, kind: str) -> None:
    engine: Any = None
    if kind == "native":
        if NATIVE is None:
            pytest.skip("no native extension")
        from tierzero.tiers.nvme import NativeEngine

        engine = NativeEngine(threads=2, block=1 << 16)
    store = Store(small_drive / "store", engine=engine)

    async def put_many() -> None:
        for index in range(100):
            await store.put(f"r{index}", torch.full((300_000,), index, dtype=torch.uint8))

    async def go() -> None:
        await store.put("a", record(0, 1))
        await store.snapshot("s", {"step": 1})
        with pytest.raises(OSError, match=r"MiB more is needed and the drive has [0-9.]+ \w+ free") as caught:
            store.reserve(64 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == store.path
        with pytest.raises(OSError, match=r"'r\d+' of 293\.0 KiB"):
            await put_many()
        count = len(store.current) - 1
        assert count >= 15
        fill(small_drive / "filler")
        with pytest.raises(OSError, match="the snapshot before it still stands") as caught:
            await store.snapshot("t", {"step": 2})
        assert caught.value.errno == errno.ENOSPC
        await store.verify()
        os.unlink(small_drive / "filler")
        for index in range(count):
            store.remove(f"r{index}")
        await store.put("a", record(0, 2))
        await store.snapshot("t", {"step": 2})

    asyncio.run(go())
    store.close()
    if engine is not None:
        engine.close()
    again = Store(small_drive / "store", resume=True)
    assert again.resumed is not None
    assert again.resumed.meta == {"step": 2}
    asyncio.run(again.verify())
    again.close()


def test_a_drive_without_any_space(small_drive: Path) -> None:
    fill(small_drive / "filler")
    with pytest.raises(StoreError, match="No space left on device") as caught:
        Store(small_drive / "store")
    assert str(small_drive) in str(caught.value)


def test_a_read_only_drive(small_drive: Path) -> None:
    (small_drive / "store").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_drive)], check=True)
    with pytest.raises(StoreError, match="is read-only here"):
        Store(small_drive / "store")
    with pytest.raises(StoreError, match=r"cannot be made: Read-only file system"):
        Store(small_drive / "other")
