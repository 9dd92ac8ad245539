"""A store over several directories when a drive is full or the process is killed."""

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
from test_store_members import check, committed, drives, needs_native

from tierzero.storage.store import Store


@pytest.fixture
def engine() -> Iterator[Any]:
    from tierzero.tiers.nvme import NativeEngine

    native = NativeEngine()
    yield native
    native.close()


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
    with pytest.raises(OSError, match=r"MiB more is needed and the drive has [0-9.]+ \w+ free, as much as") as caught:
        store.reserve(64 << 20)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, scarce)

    async def put_many() -> None:
        for index in range(100):
            await store.put(f"r{index}", torch.full((3 << 20,), index, dtype=torch.uint8))

    async def go() -> None:
        with pytest.raises(OSError, match=r"'r\d+' of 3\.0 MiB") as caught:
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
from tierzero.storage.store import Store
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
        _, committed = kill_a_child(CHILD, order, draw.randrange(1, 25), committed, tmp_path / "errors")
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
