"""Engines that come and go: forks and exits under load, many processes, and hundreds of them without a trace."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from io_process import PRELUDE, run
from io_store import KINDS

from tierzero import _native


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and _native.probe_uring():
        pytest.skip(f"no io_uring: {_native.probe_uring()}")
    return str(request.param)


FORKS = """
kind, direct = sys.argv[2], sys.argv[3] == "True"
engine = n.Engine(kind=kind, block=65536, depth=4)
file = n.File(sys.argv[1], direct=direct)
slab = n.Slab(8 << 20)
memory = slab.array()
engine.register(memory)
stepper = n.Stepper(engine, n.Slab(14 * 2048 * 3).array(), 2048)

def refused(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert "parent" in str(error), error
    else:
        raise AssertionError("a forked child used its parent's engine")

children = []
for turn in range(8):
    memory[:] = noise(8 << 20, turn)
    tickets = [engine.write(file, at, memory[at : at + (1 << 20)]) for at in range(0, 8 << 20, 1 << 20)]
    for child in range(2):
        pid = os.fork()
        if pid == 0:
            if turn % 4 == 0:
                for call in (engine.describe, engine.counters, engine.reap):
                    refused(call)
                refused(lambda: engine.read(file, 0, memory))
                refused(lambda: engine.register(memory))
                refused(lambda: engine.unregister(memory))
                refused(lambda: stepper.submit(1024, [], memory[:0], state=np.zeros(3072, np.float32)))
                waiting = [ticket for ticket in tickets if not ticket.done()]
                if waiting:
                    refused(waiting[-1].wait)
                own = n.Engine(kind=kind)
                round_trip(own, n.File(f"{sys.argv[1]}-{os.getpid()}", direct=direct))
                own.close()
            if turn % 4 == 1:
                file.close()
                engine.close()
                stepper.close()
            if turn % 4 == 2:
                del engine, file, stepper, tickets, memory, slab
                gc.collect()
            memory = None
            sys.exit(7) if turn % 4 == 3 else os._exit(7)
        children.append(pid)
    memory_now = memory.tobytes()
    assert [ticket.result() for ticket in tickets] == [1 << 20] * 8
    back = np.zeros(8 << 20, np.uint8)
    engine.read(file, 0, back).result()
    assert back.tobytes() == memory_now
    engine.read(file, 0, memory).result()  # pages that were shared with the children
    assert memory.tobytes() == memory_now
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert len(engine.describe()["drives"]) == 1
"""


def test_forks_during_requests(tmp_path: Path, kind: str) -> None:
    assert run(FORKS, tmp_path / "f", *KINDS[kind]) == ""


@pytest.mark.parametrize("ending", ["", "del engine, file, tickets", "file.close()"])
def test_ends_with_requests_in_flight(tmp_path: Path, kind: str, ending: str) -> None:
    code = """
engine = n.Engine(kind=sys.argv[2], block=65536, depth=4)
file = n.File(sys.argv[1], direct=sys.argv[3] == "True")
data = noise(1 << 20)
engine.register(data)
tickets = [engine.write(file, at << 20, data) for at in range(32)]
back = [engine.read(file, 0, np.empty(1, np.uint8)) for _ in range(3)]
"""
    assert run(code + ending, tmp_path / "f", *KINDS[kind]) == ""
    want = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
    assert (tmp_path / "f").read_bytes() == want * 32


def test_many_processes_at_once(tmp_path: Path) -> None:
    code = (
        PRELUDE
        + """
for kind in ("auto", "pool"):
    for turn in range(5):
        engine, file = n.Engine(kind=kind, depth=2), n.File(sys.argv[1])
        round_trip(engine, file, seed=turn)
        engine.close()
"""
    )
    running = [
        subprocess.Popen([sys.executable, "-P", "-c", code, str(tmp_path / f"f{i}")], stderr=subprocess.PIPE, text=True)
        for i in range(12)
    ]
    for process in running:
        _, said = process.communicate(timeout=120)
        assert (process.returncode, said) == (0, "")


def facts() -> tuple[int, int, int]:
    """Open files, threads and resident KiB."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def test_hundreds_of_engines_leave_nothing(tmp_path: Path, kind: str, small_heap: None) -> None:
    name, direct = KINDS[kind]
    paths = [tmp_path / "a", tmp_path / "b"]
    memory = _native.Slab(1 << 20).array()
    memory[:] = 1

    def once() -> None:
        engine = _native.Engine(kind=name, depth=2, block=1 << 16)
        file = _native.File(paths, direct=direct, stripe=8192)
        engine.register(memory)
        engine.write(file, 0, memory[:50_000])
        engine.read(file, 0, np.empty(1000, np.uint8))
        engine.write(file, 4096, np.zeros(100, np.uint8))

    for _ in range(40):
        once()
    files, threads, before = facts()
    for _ in range(int(os.environ.get("TIERZERO_ENGINES", "100"))):
        once()
    for _ in range(10_000):  # the kernel lists a joined thread for a moment more
        if facts()[:2] == (files, threads):
            break
        os.sched_yield()
    after = facts()
    assert after[:2] == (files, threads)
    assert after[2] - before < 8 << 10, f"{after[2] - before} KiB more are resident"


def test_engines_dropped_in_any_order(tmp_path: Path, kind: str, small_heap: None) -> None:
    """Tickets, files, engines and steppers hold what they need of each other."""
    name, direct = KINDS[kind]
    for order in range(6):
        engine = _native.Engine(kind=name, block=1 << 16, depth=2)
        file = _native.File(tmp_path / "f", direct=direct)
        data = np.random.default_rng(order).integers(0, 256, 1 << 20, np.uint8)
        want = data.tobytes()
        stepper = _native.Stepper(engine, _native.Slab(14 * 2048 * 3).array(), 2048)
        things = {
            "ticket": engine.write(file, 0, data),
            "engine": engine,
            "file": file,
            "stepper": stepper,
            "data": data,
        }
        del engine, file, stepper, data
        names = sorted(things)
        for index in range(len(names)):
            del things[names[(index * 2 + order) % len(names)]]
            gc.collect()
        assert (tmp_path / "f").read_bytes() == want
