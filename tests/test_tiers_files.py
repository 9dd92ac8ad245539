"""Block files: the same promises from the portable tier, the native one and the faulty one over either."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiofiles
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierzero.native import NATIVE
from tierzero.tiers import portable
from tierzero.tiers.base import BlockFile, aligned_empty, memory_of, open_block_file, settle
from tierzero.tiers.faulty import Fault, FaultyFile
from tierzero.tiers.portable import PortableFile

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


@pytest.fixture
def file(engine: Any, tmp_path: Path) -> Iterator[BlockFile]:
    opened = open_block_file(str(tmp_path / "file"), engine)
    opened.preallocate(1 << 20)
    yield opened
    opened.close()


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40_000)), min_size=1, max_size=4),
    st.integers(0, 70_000),
    st.integers(0, 40_000),
    st.integers(0, 3),
)
def test_reads_give_what_was_written_at_any_offset_and_length(file, writes, start, count, shift) -> None:
    expected = torch.zeros(1 << 20, dtype=torch.uint8)

    async def go() -> None:
        await file.write(0, expected)
        for seed, (page, nbytes) in enumerate(writes):
            data = some(nbytes + shift, seed)[shift:]
            await file.write(4096 * page, data)
            end = -(-nbytes // file.alignment) * file.alignment
            expected[4096 * page : 4096 * page + end] = 0
            expected[4096 * page : 4096 * page + nbytes] = data
        out = torch.full((count + shift,), 7, dtype=torch.uint8)
        await file.read(start, out[shift:])
        assert torch.equal(out[shift:], expected[start : start + count])
        assert (out[:shift] == 7).all()

    asyncio.run(go())


def test_many_operations_at_once(file: BlockFile) -> None:
    parts = [some(30_000 + i, i) for i in range(30)]

    async def go() -> None:
        await asyncio.gather(*(file.write(32768 * i, part) for i, part in enumerate(parts)))
        outs = [torch.empty_like(part) for part in parts]
        await asyncio.gather(*(file.read(32768 * i, out) for i, out in enumerate(outs)))
        assert all(torch.equal(out, part) for out, part in zip(outs, parts, strict=True))
        assert file.bytes_written >= sum(map(len, parts))
        assert file.bytes_read >= sum(map(len, parts))
        await file.sync()

    asyncio.run(go())


def test_reading_past_the_end_names_path_and_offset(file: BlockFile) -> None:
    with pytest.raises(OSError, match="offset 1044480") as caught:
        asyncio.run(file.read((1 << 20) - 4096, torch.empty(8192, dtype=torch.uint8)))
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == file.path
    assert "ends at" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.empty(8, dtype=torch.int8),
        torch.empty(2, 4, dtype=torch.uint8),
        torch.empty(8, dtype=torch.uint8)[::2],
        torch.empty(8, dtype=torch.uint8, device="meta"),
    ],
)
def test_wrong_buffers_are_refused(file: BlockFile, wrong: torch.Tensor) -> None:
    for operation in (file.read, file.write):
        with pytest.raises(ValueError, match="uint8"):
            asyncio.run(operation(0, wrong))


def test_preallocate_grows_and_never_shrinks(file: BlockFile) -> None:
    file.preallocate(2 << 20)
    file.preallocate(4096)
    assert os.stat(file.path).st_size == 2 << 20
    assert os.stat(file.path).st_blocks * 512 >= 2 << 20


def test_preallocating_more_than_the_drive_has_changes_nothing(file: BlockFile) -> None:
    with pytest.raises(OSError, match="file") as caught:
        file.preallocate(1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.filename == file.path
    os.truncate(file.path, 1 << 20)
    asyncio.run(file.read(0, torch.empty(4096, dtype=torch.uint8)))


def test_missing_directory_is_an_oserror_with_the_path(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere") as caught:
        open_block_file(str(tmp_path / "nowhere" / "file"), engine)
    assert caught.value.errno == errno.ENOENT


def test_close_twice_and_use_after_close(file: BlockFile) -> None:
    file.close()
    file.close()
    with pytest.raises((OSError, ValueError)):
        asyncio.run(file.read(0, torch.empty(4096, dtype=torch.uint8)))


def test_memory_of_leaves_the_storage_resizable_and_alive() -> None:
    tensor = some(64)
    memory = memory_of(tensor)
    tensor.untyped_storage().resize_(128)
    tensor = some(64, 3)
    view = memory_of(tensor)
    expected = bytes(view)
    del tensor
    assert bytes(view) == expected
    assert len(memory_of(torch.empty(0, dtype=torch.uint8))) == 0
    assert len(memory) == 64
    assert aligned_empty(5000).data_ptr() % 4096 == 0


def test_settle_waits_for_the_work_before_it_lets_a_cancellation_through() -> None:
    async def go() -> None:
        inner: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(settle(inner))
        await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done()
        inner.set_result(1)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())


class ShortHandle:
    """An aiofiles handle that moves at most 1000 bytes at a time, as the operating system may."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def seek(self, offset: int) -> None:
        await self.handle.seek(offset)

    async def readinto(self, memory: memoryview) -> int:
        return int(await self.handle.readinto(memory[:1000]))

    async def write(self, memory: memoryview) -> int:
        return int(await self.handle.write(memory[:1000]))

    async def close(self) -> None:
        await self.handle.close()


def test_portable_continues_short_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = aiofiles.open

    async def opener(path: str, mode: str, buffering: int) -> ShortHandle:
        return ShortHandle(await plain(path, mode, buffering=buffering))

    monkeypatch.setattr(portable.aiofiles, "open", opener)
    file = PortableFile(str(tmp_path / "file"))
    data, out = some(10_500), torch.empty(10_500, dtype=torch.uint8)

    async def go() -> None:
        await file.write(4096, data)
        await file.read(4096, out)

    asyncio.run(go())
    assert torch.equal(data, out)
    file._idle.clear()
    file.close()


def test_portable_reports_a_write_error_with_path_and_offset(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    os.symlink("/dev/full", tmp_path / "full")
    file = PortableFile(str(tmp_path / "full"))
    with pytest.raises(OSError, match="write 10 bytes at offset 0") as caught:
        asyncio.run(file.write(0, some(10)))
    assert caught.value.errno == errno.ENOSPC
    file.close()


@pytest.mark.parametrize("op", ["read", "write", "sync", "preallocate"])
def test_faults_strike_when_planned(file: BlockFile, op: str) -> None:
    faulty = FaultyFile(file, [Fault(op, 2, code=errno.ENOSPC)])  # type: ignore[arg-type]
    buffer = some(8192)

    async def once() -> None:
        if op == "read":
            await faulty.read(0, buffer)
        elif op == "write":
            await faulty.write(0, buffer)
        elif op == "sync":
            await faulty.sync()
        else:
            faulty.preallocate(4096)

    async def go() -> None:
        await once()
        with pytest.raises(OSError, match="injected") as caught:
            await once()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == file.path
        await once()
        faulty.plan = [Fault(op, 1, persistent=True)]  # type: ignore[arg-type]
        for _ in range(3):
            with pytest.raises(OSError, match="injected"):
                await once()

    asyncio.run(go())
    assert faulty.counts[op] == 6


def test_short_and_corrupt_faults(file: BlockFile) -> None:
    data, out = some(8192), torch.zeros(8192, dtype=torch.uint8)

    async def go() -> None:
        await file.write(0, torch.zeros(8192, dtype=torch.uint8))
        faulty = FaultyFile(
            file, [Fault("write", 1, "short"), Fault("write", 2, "corrupt", at=5), Fault("read", 3, "corrupt", at=9)]
        )
        with pytest.raises(OSError, match="injected"):
            await faulty.write(0, data)
        await faulty.read(0, out)
        assert torch.equal(out[:4096], data[:4096])
        assert not out[4096:].any()
        await faulty.write(0, data)
        await faulty.read(0, out)
        assert (out != data).nonzero().tolist() == [[5]]
        await faulty.read(0, out)
        assert (out != data).nonzero().tolist() == [[5], [9]]
        assert (faulty.bytes_read, faulty.bytes_written) == (file.bytes_read, file.bytes_written)

    asyncio.run(go())


def test_a_held_write_goes_on_when_its_gate_opens(file: BlockFile) -> None:
    fault = Fault("write", 1, "hold")
    faulty = FaultyFile(file, [fault])

    async def go() -> None:
        task = asyncio.ensure_future(faulty.write(0, some(4096)))
        await asyncio.to_thread(fault.reached.wait)
        assert not task.done()
        fault.gate.set()
        await task

    asyncio.run(go())


@pytest.mark.skipif(NATIVE is None, reason="no native extension")
def test_native_engine_serves_one_loop_at_a_time_and_closes_from_any_thread(tmp_path: Path) -> None:
    from tierzero.tiers.nvme import NativeEngine, NativeFile

    engine = NativeEngine(threads=2, block=1 << 16)
    file = NativeFile(str(tmp_path / "file"), engine)
    file.preallocate(1 << 20)
    assert engine.name in ("uring", "pool")

    async def write() -> None:
        await asyncio.gather(*(file.write(65536 * i, some(65536, i)) for i in range(16)))

    asyncio.run(write())
    asyncio.run(write())  # the first loop is closed: the engine follows to the new one
    assert engine.counters()["bytes_written"] >= 2 << 20

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(write(), loop).result()

    async def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await write()

    asyncio.run(elsewhere())
    pending = [asyncio.run_coroutine_threadsafe(file.write(0, some(1 << 20)), loop) for _ in range(4)]
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
    engine.close()
    engine.close()
    for future in pending:
        assert future.result() is None
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    file.close()


@pytest.mark.skipif(NATIVE is None, reason="no native extension")
def test_a_cancelled_native_write_has_ended_when_the_cancellation_is_seen(tmp_path: Path) -> None:
    from tierzero.tiers.nvme import NativeEngine, NativeFile

    engine = NativeEngine(threads=1, block=1 << 16)
    file = NativeFile(str(tmp_path / "file"), engine)
    file.preallocate(8 << 20)
    data = some(8 << 20)

    async def go() -> None:
        task = asyncio.ensure_future(file.write(0, data))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine._waiting
        out = torch.empty_like(data)
        await file.read(0, out)
        assert torch.equal(out, data)

    asyncio.run(go())
    engine.close()
    file.close()
