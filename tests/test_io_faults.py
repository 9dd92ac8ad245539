"""Drives that are full, fail, go away or do not answer: the error says what and where, and what was committed stays."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drives import LoopDrive, loop_device, loop_drive, memory_drive
from io_store import KINDS, PIECE, abandon, committed, make_engine, reads_back, record

from tierzero import _native


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and _native.probe_uring():
        pytest.skip(f"no io_uring: {_native.probe_uring()}")
    return str(request.param)


@pytest.fixture
def engine(kind: str) -> Iterator[_native.Engine]:
    engine = _native.Engine(kind=KINDS[kind][0], block=PIECE, depth=2, deadline=30)
    yield engine
    engine.close()


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[LoopDrive]:
    with loop_drive(tmp_path) as drive:
        yield drive


def noise(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# ---- a full drive


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "tmpfs":
        with memory_drive(tmp_path / "drive") as where:
            yield where
    else:
        with loop_drive(tmp_path, 8 << 20) as drive:
            yield drive.where


def test_a_full_drive(small: Path, tmp_path: Path, kind: str, engine: _native.Engine) -> None:
    direct = KINDS[kind][1]
    file = _native.File(small / "f", direct=direct)
    data = noise(PIECE)
    tried: list[int] = []

    def fill() -> None:
        for at in range(0, 16 << 20, PIECE):
            tried.append(at)
            engine.write(file, at, data).result()

    with pytest.raises(OSError) as caught:
        fill()
    failed = tried[-1]
    assert failed > 1 << 20
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == file.path
    assert f"at offset {failed}" in str(caught.value)
    back = np.empty_like(data)
    for at in range(0, failed, PIECE):
        engine.read(file, at, back).result()
        assert np.array_equal(back, data)
    again = _native.File(small / "f", direct=direct)
    assert again.direct == file.direct  # a full drive is not one without direct I/O
    again.close()

    both = _native.File([tmp_path / "roomy", small / "tight"], direct=direct, weights=[3, 1], stripe=PIECE)
    both.truncate(PIECE + 100)
    with pytest.raises(OSError, match="No space left on device") as caught:
        both.preallocate(64 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(small / "tight")
    assert both.size() == PIECE + 100
    assert (tmp_path / "roomy").stat().st_size <= PIECE + 100
    both.close()
    file.truncate(0)
    engine.write(file, 0, data).result()
    file.close()


def test_a_full_drive_keeps_what_was_committed(small: Path) -> None:
    engine = make_engine()
    store = committed(small / "store", engine, room=2 << 20)

    async def go() -> None:
        for index in range(60):
            await store.put(f"more{index}", record(index))

    with pytest.raises(OSError) as caught:
        asyncio.run(go())
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == store.path
    store.close()
    engine.close()
    reads_back(small / "store")


# ---- a drive that fails


def test_a_device_that_lost_its_blocks(tmp_path: Path, engine: _native.Engine, kind: str) -> None:
    with loop_device(tmp_path / "image", 1 << 20) as device:
        file = _native.File(device, direct=KINDS[kind][1])
        assert file.size() == 1 << 20
        data, back = noise(1 << 20), np.empty(1 << 20, np.uint8)
        engine.write(file, 0, data).result()
        file.sync()
        engine.read(file, 0, back).result()
        assert np.array_equal(back, data)
        os.truncate(tmp_path / "image", 1 << 19)
        forget_cache(device)
        engine.read(file, 0, back[: 1 << 18]).result()
        with pytest.raises(OSError, match="Input/output error") as caught:
            engine.read(file, 3 << 18, back[:PIECE]).result()
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == device
        assert f"at offset {3 << 18}" in str(caught.value)
        engine.read(file, 0, back[: 1 << 18]).result()
        assert np.array_equal(back[: 1 << 18], data[: 1 << 18])
        file.close()


def forget_cache(path: str) -> None:
    """Have the next buffered read ask the drive."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_a_device_that_takes_no_writes(tmp_path: Path, kind: str, engine: _native.Engine) -> None:
    if kind == "buffered":
        pytest.skip("buffered writes fail when they are flushed")
    with memory_drive(tmp_path / "tight", "size=64k") as tight, loop_device(tight / "image", 1 << 20) as device:
        file = _native.File(device)
        if not file.direct:
            pytest.skip("no direct I/O on this device")
        with pytest.raises(OSError) as caught:
            engine.write(file, 0, noise(1 << 19)).result()
        assert caught.value.errno in (errno.EIO, errno.ENOSPC)
        assert caught.value.filename == device
        assert "at offset" in str(caught.value)
        file.close()


def test_a_store_whose_drive_fails(drive: LoopDrive) -> None:
    engine = make_engine()
    store = committed(drive.where / "store", engine)
    extent = store.current["a"]
    os.sync()
    kept = drive.image.read_bytes()
    forget_cache(store.path)
    os.truncate(drive.image, 4096)
    out = torch.empty(300_000, dtype=torch.uint8)
    with pytest.raises(OSError) as caught:
        asyncio.run(store.read("a", 0, out))
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == store.path
    assert str(extent.offset) in str(caught.value)
    drive.image.write_bytes(kept)  # the drive is back
    abandon(store)
    engine.close()
    reads_back(drive.where / "store")


def test_a_directory_removed_under_it(tmp_path: Path, kind: str, engine: _native.Engine) -> None:
    home = tmp_path / "home"
    home.mkdir()
    file = _native.File(home / "f", direct=KINDS[kind][1])
    data = noise(5 * PIECE)
    ticket = engine.write(file, 0, data)
    shutil.rmtree(home)
    assert ticket.result() == data.size
    back = np.empty_like(data)
    engine.read(file, 0, back).result()  # the file lives as long as it is open
    assert np.array_equal(back, data)
    file.close()
    with pytest.raises(OSError, match="No such file or directory") as caught:
        _native.File(home / "f")
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(home / "f")


def test_a_store_removed_under_it(tmp_path: Path) -> None:
    engine = make_engine()
    store = committed(tmp_path / "store", engine)
    shutil.move(tmp_path / "store", tmp_path / "moved")
    with pytest.raises(OSError) as caught:
        asyncio.run(store.snapshot("t", {"step": 2}))
    assert caught.value.errno == errno.ENOENT
    assert str(tmp_path / "store") in str(caught.value)
    abandon(store)
    engine.close()
    reads_back(tmp_path / "moved")
