"""Engine and Ticket: every byte, every size, every alignment, and every error as an exception."""

from __future__ import annotations

import errno
import gc
import os
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierzero import _native

BLOCK = 8192


@pytest.fixture(scope="module", params=["auto", "pool"])
def engine(request: pytest.FixtureRequest) -> Iterator[_native.Engine]:
    engine = _native.Engine(kind=request.param, threads=3, block=BLOCK)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _native.File:
    return _native.File(tmp_path_factory.mktemp("io") / "data.bin", direct=request.param)


def shifted(nbytes: int, shift: int) -> np.ndarray:
    """A uint8[nbytes] whose address is `shift` bytes past a multiple of 4096."""
    room = np.zeros(nbytes + 2 * 4096, np.uint8)
    start = -room.ctypes.data % 4096 + shift
    return room[start : start + nbytes]


# ---- transfers


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.one_of(st.integers(0, 20_000), st.sampled_from([4095, 4096, 4097, BLOCK, 2 * BLOCK, 2 * BLOCK + 1])),
    shift=st.one_of(st.sampled_from([0, 1, 512, 4095]), st.integers(0, 4095)),
    page=st.one_of(st.integers(0, 20), st.integers(2**20, 2**20 + 40)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_address_and_offset(
    engine: _native.Engine, file: _native.File, size: int, shift: int, page: int, seed: int
) -> None:
    """Pages from 2**20 on lie past 4 GiB of a sparse file; the bytes around the request stay as they were."""
    offset = page * 4096
    data = shifted(size, shift)
    data[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    guard = np.full(3 * 4096, 0xEE, np.uint8)
    end = -(-size // 4096) * 4096
    if page:
        engine.write(file, offset - 4096, guard[:4096]).result()
    engine.write(file, offset + end, guard[:4096]).result()

    before = engine.counters()
    assert engine.write(file, offset, data).result() == size
    whole = shifted(size + 32, 4096 - shift)
    whole[:] = 0xAA
    into = whole[16 : 16 + size]
    assert engine.read(file, offset, into).result() == size
    after = engine.counters()
    assert np.array_equal(into, data)
    assert (whole[:16] == 0xAA).all()
    assert (whole[16 + size :] == 0xAA).all()
    moved = end if file.direct else size
    assert after["bytes_written"] - before["bytes_written"] == moved
    assert after["bytes_read"] - before["bytes_read"] == moved
    assert (after["reads"] - before["reads"], after["writes"] - before["writes"]) == (1, 1)

    edge = np.zeros(4096, np.uint8)
    if page:
        engine.read(file, offset - 4096, edge).result()
        assert (edge == 0xEE).all()
    engine.read(file, offset + end, edge).result()
    assert (edge == 0xEE).all()
    if file.direct and size % 4096:
        tail = np.full(4096, 1, np.uint8)
        engine.read(file, offset + end - 4096, tail).result()
        assert not tail[size % 4096 :].any()
    engine.reap()


def test_what_lies_on_disk_is_what_was_written(engine: _native.Engine, tmp_path: Path) -> None:
    file = _native.File(tmp_path / "f")
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    tickets = [engine.write(file, 4096 * i, data[4096 * i : 4096 * (i + 1)]) for i in reversed(range(256))]
    for ticket in tickets:
        ticket.wait()
    file.sync()
    assert Path(file.path).read_bytes() == data.numpy().tobytes()


def test_end_of_file(engine: _native.Engine, tmp_path: Path) -> None:
    for direct in (True, False):
        path = tmp_path / f"short-{direct}"
        path.write_bytes(bytes(range(250)) * 20)
        file = _native.File(path, direct=direct)
        exact = np.zeros(5000, np.uint8)
        assert engine.read(file, 0, exact).result() == 5000
        assert exact.tobytes() == path.read_bytes()
        for offset, size in ((0, 5001), (4096, 4096), (8192, 1), (1 << 41, 3), (0, 20_000)):
            ticket = engine.read(file, offset, np.zeros(size, np.uint8))
            with pytest.raises(OSError, match="ends at") as caught:
                ticket.result()
            assert caught.value.errno == errno.EIO
            assert caught.value.filename == str(path)
            assert str(offset) in str(caught.value)
            with pytest.raises(OSError, match="ends at"):
                ticket.result()


def test_write_errors_carry_errno(engine: _native.Engine, tmp_path: Path) -> None:
    import resource

    file = _native.File(tmp_path / "f")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        with pytest.raises(OSError) as caught:
            engine.write(file, 8192, np.ones(4096, np.uint8)).result()
        assert caught.value.errno == errno.EFBIG
        assert caught.value.filename == file.path
        assert "8192" in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


# ---- tickets and completions


def test_reap_and_eventfd(tmp_path: Path) -> None:
    engine = _native.Engine(threads=2)
    file = _native.File(tmp_path / "f")
    assert engine.name == ("pool" if _native.probe_uring() else "uring")
    assert engine.reap() == []
    tickets = [engine.write(file, 4096 * i, torch.full((4096,), i, dtype=torch.uint8)) for i in range(20)]
    seen: list[_native.Ticket] = []
    while len(seen) < 20:
        ready, _, _ = select.select([engine.eventfd], [], [], 30)
        assert ready
        seen += engine.reap()
    assert all(t.done() and t.result() == 4096 for t in seen)
    assert {id(t) for t in seen} == {id(t) for t in tickets}
    assert select.select([engine.eventfd], [], [], 0)[0] == []
    engine.close()


def test_buffers_live_as_long_as_the_request(tmp_path: Path) -> None:
    engine = _native.Engine(threads=1)
    file = _native.File(tmp_path / "f")
    data = np.arange(4096, dtype=np.uint16).view(np.uint8)
    count = sys.getrefcount(data)
    engine.write(file, 0, data)  # the ticket is dropped at once
    assert sys.getrefcount(data) > count
    for i in range(50):
        engine.write(file, 8192 * (i + 1), data.copy())
    gc.collect()
    engine.close()
    assert sys.getrefcount(data) == count
    assert len(engine.reap()) == 51
    assert Path(file.path).read_bytes() == data.tobytes() * 51


def test_wait_lets_other_threads_run_and_times_out(tmp_path: Path) -> None:
    fifo_free = _native.Engine(threads=1)
    file = _native.File(tmp_path / "f")
    ticket = fifo_free.write(file, 0, np.zeros(1 << 22, np.uint8))
    try:
        ticket.wait(0)
    except TimeoutError:
        ticket.wait(None)
    assert ticket.done()
    ticket.wait(0)
    ticket.wait(timeout=1e12)
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError):
            ticket.wait(bad)
    fifo_free.close()


def test_many_threads_share_one_engine(engine: _native.Engine, file: _native.File) -> None:
    failures: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            for i in range(20):
                data = np.full(9000, lane * 20 + i, np.uint8)
                back = np.zeros_like(data)
                engine.write(file, lane << 16, data).result()
                engine.read(file, lane << 16, back).result()
                assert np.array_equal(back, data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- bad arguments and closing


def test_bad_arguments_raise(engine: _native.Engine, tmp_path: Path) -> None:
    file = _native.File(tmp_path / "f")
    good = np.zeros(4096, np.uint8)
    frozen = good.copy()
    frozen.flags.writeable = False
    if file.direct:
        for offset in (1, 512, 4095):
            with pytest.raises(ValueError, match="multiple of 4096"):
                engine.read(file, offset, good)
    for offset in (-1, -4096, 1 << 63, 1 << 80, (1 << 63) - 4096):
        with pytest.raises(ValueError):
            engine.write(file, offset, good)
    with pytest.raises(TypeError):
        engine.read(file, 1.5, good)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="read-only"):
        engine.read(file, 0, frozen)
    engine.write(file, 0, frozen).result()
    bad_buffers: tuple[Any, ...] = (
        good[::2],
        good.view(np.float32),
        good.reshape(64, 64),
        torch.zeros(4),
        b"bytes",
        None,
        [1, 2],
        3,
    )
    for bad in (*bad_buffers, torch.zeros(4, dtype=torch.uint8, device="meta")):
        with pytest.raises(TypeError):
            engine.read(file, 0, bad)
        if not isinstance(bad, bytes):
            with pytest.raises(TypeError):
                engine.write(file, 0, bad)
    with pytest.raises(TypeError):
        engine.read(file.path, 0, good)  # type: ignore[arg-type]
    file.close()
    for call in (engine.read, engine.write):
        with pytest.raises(ValueError, match="closed"):
            call(file, 0, good)
    for wrong in (
        {"threads": 257},
        {"threads": -1},
        {"block": 0},
        {"block": 4095},
        {"block": 1 << 40},
        {"block": -4096},
        {"depth": 0},
        {"depth": 257},
        {"deadline": 0.0},
        {"deadline": float("nan")},
        {"kind": "aio"},
    ):
        with pytest.raises(ValueError):
            _native.Engine(**wrong)
    with pytest.raises(TypeError):
        _native.Ticket()


def test_closing_a_file_under_requests_is_safe(tmp_path: Path) -> None:
    engine = _native.Engine(threads=1, block=4096)
    file = _native.File(tmp_path / "f")
    tickets = [engine.write(file, i << 16, np.full(1 << 16, i, np.uint8)) for i in range(30)]
    file.close()
    assert [t.result() for t in tickets] == [1 << 16] * 30
    engine.close()
    assert os.path.getsize(tmp_path / "f") == 30 << 16


def test_closed_engine(tmp_path: Path) -> None:
    engine = _native.Engine(threads=2)
    file = _native.File(tmp_path / "f")
    ticket = engine.write(file, 0, np.ones(100_000, np.uint8))
    engine.close()
    engine.close()
    assert ticket.done()
    assert ticket.result() == 100_000
    with pytest.raises(ValueError, match="closed"):
        engine.read(file, 0, np.ones(1, np.uint8))
    assert engine.reap() == [ticket]
