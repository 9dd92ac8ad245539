"""A drive that does not answer, for real: a frozen file system, on which every write blocks until it is thawed."""

from __future__ import annotations

import asyncio
import errno
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drives import LoopDrive, loop_drive, memory_drive
from io_store import KINDS, PIECE, committed, make_engine, reads_back, record

from tierzero import _native


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and _native.probe_uring():
        pytest.skip(f"no io_uring: {_native.probe_uring()}")
    return str(request.param)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[LoopDrive]:
    with memory_drive(tmp_path / "memory", "size=48m") as memory, loop_drive(memory) as drive:
        yield drive  # nothing but the freeze makes it slow


def make(kind: str, drive: LoopDrive, deadline: float = 0.5) -> tuple[_native.Engine, _native.File]:
    engine = _native.Engine(kind=KINDS[kind][0], block=PIECE, depth=2, deadline=deadline)
    file = _native.File(drive.where / "f", direct=KINDS[kind][1])
    file.preallocate(8 * PIECE)
    engine.write(file, 0, noise(4 * PIECE, 1)).result()
    file.sync()
    engine.reap()
    return engine, file


def noise(nbytes: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, but not for ever: the drive has to be thawed and unmounted whatever happens."""
    for _ in range(30_000):
        if condition():
            return
        time.sleep(0.002)
    raise AssertionError("it did not come about")


def test_a_frozen_drive_and_its_thaw(drive: LoopDrive, kind: str) -> None:
    engine, file = make(kind, drive)
    elsewhere = _native.File(drive.image.parent / "other", direct=KINDS[kind][1])
    data = noise(4 * PIECE, 2)
    count = sys.getrefcount(data)
    drive.freeze()
    ticket = engine.write(file, PIECE, data)
    with pytest.raises(TimeoutError, match="has not answered for") as caught:
        ticket.result()
    assert caught.value.errno == errno.ETIMEDOUT
    assert caught.value.filename == file.path
    for part in (" bytes at offset ", "the deadline is 0.5 s", "pending there:"):
        assert part in str(caught.value)
    assert engine.reap() == [ticket]
    assert sys.getrefcount(data) > count  # the drive may still read it
    with pytest.raises(TimeoutError, match="overdue and may still land"):
        engine.write(file, 0, data[:1].copy()).result()
    engine.write(elsewhere, 0, data).result()
    back = np.empty_like(data)
    engine.read(elsewhere, 0, back).result()
    assert np.array_equal(back, data)
    engine.reap()
    drive.thaw()
    until(lambda: not engine.reap() and sys.getrefcount(data) == count)
    data = noise(4 * PIECE, 3)
    engine.write(file, PIECE, data).result()
    engine.read(file, PIECE, back).result()
    assert np.array_equal(back, data)
    engine.close()
    file.close()
    elsewhere.close()


@pytest.mark.parametrize("reaped", [True, False])
def test_closing_while_frozen_keeps_the_memory(drive: LoopDrive, kind: str, reaped: bool) -> None:
    """Everybody has let go of a buffer when the drive at last reads it."""
    engine, file = make(kind, drive)
    want = noise(2 * PIECE, 4)
    drive.freeze()
    room = np.empty(2 * PIECE + 4096, np.uint8)
    start = -room.ctypes.data % 4096
    room[start : start + 2 * PIECE] = want
    ticket = engine.write(file, 0, room[start : start + 2 * PIECE])
    until(ticket.done)
    if reaped:
        assert engine.reap() == [ticket]
    engine.close()
    file.close()
    del ticket, room, engine
    gc.collect()
    other = [np.full(2 * PIECE + 4096, 0xEE, np.uint8) for _ in range(50)]  # where it may have been
    drive.thaw()
    del other
    # what was in flight lands as it was; what was queued behind it is given up
    until(lambda: (drive.where / "f").read_bytes()[:PIECE] == want[:PIECE].tobytes())
    rest = (drive.where / "f").read_bytes()[PIECE : 2 * PIECE]
    assert rest in (want[PIECE:].tobytes(), noise(4 * PIECE, 1)[PIECE : 2 * PIECE].tobytes())


def test_a_stepper_on_a_frozen_drive(drive: LoopDrive, kind: str) -> None:
    engine, file = make(kind, drive)
    stepper = _native.Stepper(engine, _native.Slab(14 * 2048 * 4).array(), 2048)
    state = np.zeros(3 * 4096, np.float32)
    nothing = np.empty(0, np.uint8)

    def submit() -> Any:
        segment = (0, 4096, -1, "f32", 0, "bf16", *[0.0] * 8)
        return stepper.submit(4096, [segment], nothing, state=state, out_file=(file, 0, 8192))  # type: ignore[list-item]

    submit().result()
    drive.freeze()
    tickets = [submit() for _ in range(3)]
    for ticket in tickets:
        with pytest.raises(TimeoutError, match="at offset") as caught:
            ticket.result()
        assert caught.value.filename == file.path
    with pytest.raises(TimeoutError, match="does not answer"):
        submit()
    engine.close()
    drive.thaw()
    stepper.close()
    file.close()


EXIT = """
import sys, numpy as np
from tierzero import _native
engine = _native.Engine(kind=sys.argv[2], block=65536, depth=2, deadline=0.5)
file = _native.File(sys.argv[1], direct=sys.argv[3] == "True")
print("ready", flush=True)
sys.stdin.readline()
ticket = engine.write(file, 0, np.full(131072, 9, np.uint8))
try:
    ticket.result()
except TimeoutError as error:
    print("late", flush=True)
"""


def test_the_interpreter_ends_after_the_thaw(drive: LoopDrive, kind: str) -> None:
    name, direct = KINDS[kind]
    command = [sys.executable, "-P", "-c", EXIT, str(drive.where / "f"), name, str(direct)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        drive.freeze()
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "late\n"
        drive.thaw()
        assert child.communicate(timeout=60) == ("", "")
        assert child.returncode == 0


def test_a_store_on_a_frozen_drive(drive: LoopDrive, kind: str) -> None:
    if kind == "buffered":
        pytest.skip("a store does direct I/O where it can")
    engine = make_engine(KINDS[kind][0], deadline=0.5)
    store = committed(drive.where / "store", engine)
    drive.freeze()
    with pytest.raises(TimeoutError, match="has not answered for") as caught:
        asyncio.run(store.put("a", record(3)))
    assert caught.value.errno == errno.ETIMEDOUT
    assert caught.value.filename == store.path
    assert "at offset" in str(caught.value)
    drive.thaw()
    store.close()
    engine.close()
    reads_back(drive.where / "store")
