"""Odd arguments, odd buffers, odd orders of calls: a sentence each time, never a crash, never wrong bytes."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierzero import _native


@pytest.fixture
def engine() -> Iterator[_native.Engine]:
    engine = _native.Engine(block=1 << 16, depth=4)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("paths", "error", "text"),
    [
        ([], ValueError, "at least one path"),
        ("", ValueError, "neither empty"),
        (["a", ""], ValueError, "neither empty"),
        (["a\0b"], ValueError, "null byte"),
        ([1], TypeError, "PathLike"),
        ([["a"]], TypeError, "PathLike"),
        ({"a"}, TypeError, "PathLike"),
        (3, TypeError, "PathLike"),
        (["a", "a"], ValueError, "are the same file: a and a"),
        (["a", b"./a"], ValueError, "are the same file"),
        (["a", "link"], ValueError, "are the same file"),
        ([f"x{i}" for i in range(257)], ValueError, "1 to 256 members, not 257"),
        ([".", "b"], IsADirectoryError, "directory"),
        (["a", "no/such"], FileNotFoundError, "No such file"),
        ("/dev/null", OSError, "not a regular file"),
        (["a", "fifo"], OSError, "not a regular file"),
        ("n" * 300, OSError, "name too long"),
    ],
)
def test_odd_paths(paths: Any, error: type[Exception], text: str, small_heap: None) -> None:
    Path("a").touch()
    os.link("a", "link")
    os.mkfifo("fifo")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=text) as caught:
        _native.File(paths, stripe=4096)
    if isinstance(caught.value, OSError):
        assert caught.value.filename in ([paths] if isinstance(paths, str) else paths)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ([1], ValueError),
        ([1, 2, 3], ValueError),
        ([0, 1], ValueError),
        ([-1, 1], ValueError),
        ([1025, 1], ValueError),
        ([1 << 70, 1], ValueError),
        ([(1 << 32) + 1, 1], ValueError),
        ([1.5, 1], TypeError),
        (["1", "1"], TypeError),
        ("12", TypeError),
        (5, TypeError),
        ([None, 1], TypeError),
        ([[1], [2]], TypeError),
    ],
)
def test_odd_weights(weights: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _native.File(["a", "b"], weights=weights, stripe=4096)


@pytest.mark.parametrize(
    "stripe", [0, -1, 1, 4095, 4097, (1 << 30) + 4096, 1 << 31, 1 << 70, True, 4096.0, None, "4096"]
)
def test_odd_stripes(stripe: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"stripe|incompatible"):
        _native.File(["a", "b"], stripe=stripe)


def test_what_passes_for_weights() -> None:
    for weights in ((x for x in (1, 2)), np.array([1, 2]), (1, 2), range(1, 3), {1: "", 2: ""}):
        file = _native.File(("a", b"b"), weights=weights, stripe=8192)  # type: ignore[arg-type]
        file.truncate(3 * 8192)
        assert (os.path.getsize("a"), os.path.getsize("b")) == (8192, 16384)
        assert file.paths == ["a", "b"]
        file.close()


def test_sizes_beyond_any_file() -> None:
    file = _native.File("a", direct=False)
    for call in (file.truncate, file.preallocate):
        for nbytes in (-1, 1 << 63, 1 << 70):
            with pytest.raises(ValueError):
                call(nbytes)
        for odd in (1.0, "1", b"1"):
            with pytest.raises(TypeError):
                call(odd)  # type: ignore[arg-type]
        with pytest.raises(OSError) as caught:
            call((1 << 63) - 1)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC, errno.EINVAL)
        assert caught.value.filename == "a"
    assert file.size() == 0
    file.close()
    closed: list[Callable[[], object]] = [file.size, file.sync, lambda: file.truncate(0), lambda: file.preallocate(0)]
    for use in closed:
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize(
    "buffer",
    [
        3,
        b"abc",
        "x",
        [1],
        np.zeros(3, np.float32),
        np.zeros((2, 2), np.uint8),
        np.zeros(10, np.uint8)[::2],
        np.frombuffer(b"abcd", np.uint8),
    ],
    ids=lambda b: f"{type(b).__name__}{getattr(b, 'shape', '')}",
)
def test_odd_buffers_are_not_registered(engine: _native.Engine, buffer: Any) -> None:
    with pytest.raises(TypeError, match="buffer"):
        engine.register(buffer)
    with pytest.raises(TypeError, match="buffer"):
        engine.unregister(buffer)


def check(engine: _native.Engine, file: _native.File, memory: np.ndarray[Any, Any], seed: int) -> None:
    """Bytes go from the memory to the file and back, and the file has them."""
    data = np.random.default_rng(seed).integers(0, 256, memory.size, np.uint8)
    memory[:] = data
    engine.write(file, 0, memory).result()
    assert Path(file.path).read_bytes()[: data.size] == data.tobytes()
    memory[:] = 0
    engine.read(file, 0, memory).result()
    assert np.array_equal(memory, data)


def test_memory_that_cannot_be_registered_still_works(engine: _native.Engine) -> None:
    file = _native.File("f")
    mapped = np.memmap("mapped", np.uint8, "w+", shape=(1 << 20,))
    check(engine, file, np.zeros(4096, np.uint8), 0)
    engine.register(mapped)
    check(engine, file, mapped, 1)
    engine.unregister(mapped)
    assert engine.register(np.empty(0, np.uint8)) is False
    many = [_native.Slab(8192).array() for _ in range(100)]  # more than the kernel is given places for
    for array in many:
        engine.register(array)
    for seed, array in enumerate(many):
        check(engine, file, array, seed)
    for array in many:
        engine.unregister(array)
        engine.unregister(array)
    file.close()


def test_registered_twice_and_unregistered_once(engine: _native.Engine) -> None:
    """The kernel knows registered pages by address: it must forget them before the address is used again."""
    file = _native.File("f")
    check(engine, file, np.zeros(4096, np.uint8), 0)
    for round_ in range(20):
        slab = _native.Slab(1 << 21)
        whole = slab.array()
        for part in (whole, whole, whole[:4096], whole[: 1 << 16]):
            engine.register(part)
        check(engine, file, whole, round_)
        engine.unregister(whole)
        address = slab.address
        del slab, whole, part
        gc.collect()
        again = _native.Slab(1 << 21)
        check(engine, file, again.array(), 100 + round_)
        if again.address == address:
            break
    file.close()


def test_unregistering_leaves_the_neighbour(engine: _native.Engine) -> None:
    file = _native.File("f")
    check(engine, file, np.zeros(4096, np.uint8), 0)
    whole = _native.Slab(1 << 20).array()
    halves = whole[: 1 << 19], whole[1 << 19 :]
    for half in halves:
        engine.register(half)
    engine.unregister(halves[0])
    for seed, half in enumerate(halves):
        check(engine, file, half, seed)
    file.close()


def test_unregistering_under_requests_on_their_way(engine: _native.Engine) -> None:
    """The ring had them by the buffer's number, the kernel did not yet, and the number was gone: EFAULT."""
    file = _native.File("f")
    data = np.arange(1 << 17, dtype=np.uint32).view(np.uint8)
    check(engine, file, data, 0)
    want = np.empty_like(data)
    engine.read(file, 0, want).result()
    room = _native.Slab(1 << 19).array()
    for _ in range(500):
        engine.register(room)
        tickets = [engine.read(file, at, room[at : at + 4096]) for at in range(0, 1 << 17, 4096)]
        engine.unregister(room)
        for ticket in tickets:
            ticket.result()
    assert np.array_equal(room[: 1 << 17], want[: 1 << 17])
    file.close()


def test_the_engine_keeps_what_is_registered() -> None:
    engine = _native.Engine()
    slab = _native.Slab(1 << 20)
    slab.array()[:] = 1

    class Owner(np.ndarray[Any, Any]):
        """An array that can be watched."""

    array = slab.array().view(Owner)
    alive = weakref.ref(array)
    engine.register(array)
    del array, slab
    gc.collect()
    kept = alive()
    assert kept is not None
    engine.unregister(kept)
    del kept
    gc.collect()
    assert alive() is None
    other = np.zeros(1 << 16, np.uint8).view(Owner)
    alive = weakref.ref(other)
    engine.register(other)
    del other
    engine.close()
    assert alive() is None


def test_describe_and_register_from_threads(engine: _native.Engine) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def pester(number: int) -> None:
        try:
            memory = _native.Slab(1 << 16).array()
            while not stop.is_set():
                engine.register(memory)
                assert engine.describe()["block"] == 1 << 16
                engine.counters()
                engine.unregister(memory)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=pester, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for seed in range(100):
            file = _native.File(f"f{seed % 7}")
            check(engine, file, np.zeros(100_000, np.uint8), seed)
            file.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_odd_calls_on_a_closed_engine() -> None:
    engine = _native.Engine()
    file = _native.File("f")
    memory = np.zeros(4096, np.uint8)
    engine.write(file, 0, memory).result()
    engine.close()
    engine.close()
    assert engine.register(memory) is False
    engine.unregister(memory)
    assert engine.describe()["drives"]
    assert engine.counters()["writes"] == 1
    with pytest.raises(ValueError, match="closed"):
        engine.write(file, 0, memory)
    file.close()
