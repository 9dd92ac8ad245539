"""The native extension and its process: exit and fork with requests in flight, Ctrl-C, and what the module links."""

from __future__ import annotations

import importlib.metadata
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tierzero import _native

PRELUDE = """
import os, sys, gc, numpy as np
from tierzero import _native as n
path = sys.argv[1]
engine = n.Engine(threads=2, block=1 << 16)
file = n.File(path)
data = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
tickets = [engine.write(file, i << 22, data.copy()) for i in range(8)]
stepper = n.Stepper(engine, n.Slab(14 * 2048 * 3).array(), 2048)
state = np.zeros(3 * 64 * 1024, np.float32)
stepper.submit(64 * 1024, [], np.empty(0, np.uint8), state=state, out_file=(file, 64 << 20, 128 * 1024))
"""


def run(tmp_path: Path, code: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", PRELUDE + code, str(tmp_path / "f")]
    return subprocess.run(command, check=check, timeout=120, text=True, capture_output=True)


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "del tickets, data; gc.collect()",
        "del engine; gc.collect()",
        "sys.exit(0)",
        "del stepper, engine, file, state; gc.collect()",
        "loop = [engine, stepper]; loop.append(loop); del engine, stepper",
        "import threading; threading.Thread(target=lambda: tickets[-1].wait(), daemon=True).start()",
    ],
)
def test_exit_with_requests_in_flight(tmp_path: Path, ending: str) -> None:
    done = run(tmp_path, ending)
    assert done.stderr == ""
    assert (tmp_path / "f").stat().st_size == (64 << 20) + 128 * 1024


def test_exit_by_exception_and_hard_exit(tmp_path: Path) -> None:
    assert run(tmp_path, "raise SystemExit(3)", check=False).returncode == 3
    assert run(tmp_path, "os._exit(5)", check=False).returncode == 5


def test_forked_child_neither_hangs_nor_crashes(tmp_path: Path) -> None:
    code = """
def refused(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert "parent" in str(error) or "closed" in str(error), error
    else:
        raise AssertionError("a forked child used its parent's engine")

for how in range(3):
    pid = os.fork()
    if pid == 0:
        if how == 0:
            refused(lambda: engine.read(file, 0, data))
            refused(lambda: stepper.submit(1024, [], data[:0], state=np.zeros(3072, np.float32)))
            refused(engine.reap)
            refused(lambda: n.Stepper(engine, n.Slab(14 * 2048 * 3).array(), 2048))
            late = engine.write
            own = n.Engine(threads=1)
            assert own.read(file, 0, data[:4096].copy()).result() == 4096
            own.close()
        if how == 1:
            del stepper, engine, tickets, file, data
            gc.collect()
        if how == 2:
            engine.close(), stepper.close()
        sys.exit(40 + how)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 40 + how
assert [t.result() for t in tickets] == [4 << 20] * 8
assert len(engine.reap()) >= 8
"""
    assert run(tmp_path, code).stderr == ""


def test_forked_child_cannot_wait_for_its_parents_request(tmp_path: Path) -> None:
    code = """
pid = os.fork()
if pid == 0:
    for ticket in tickets:
        try:
            ticket.wait()
        except RuntimeError as error:
            assert "parent" in str(error)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    assert run(tmp_path, code).stderr == ""


def test_a_signal_interrupts_a_wait(tmp_path: Path) -> None:
    code = """
import signal
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
read_end, write_end = os.pipe()
signal.setitimer(signal.ITIMER_REAL, 0.001)
big = np.zeros(512 << 20, np.uint8)
try:
    while True:
        engine.write(file, 0, big).wait()
except Stop:
    print("stopped")
"""
    assert run(tmp_path, code).stdout == "stopped\n"
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_version_and_features() -> None:
    assert _native.__version__ == importlib.metadata.version("tierzero")
    features = _native.cpu_features()
    assert all(isinstance(k, str) and isinstance(v, bool) for k, v in features.items())
    assert _native.adam_isa() in ("scalar", "avx2", "avx512", "neon")


def test_module_links_no_accelerator_or_aio_library() -> None:
    needed = re.findall(rb"lib[\w+-]+\.so[.\d]*", Path(_native.__file__).read_bytes())
    names = {name.decode().split(".so")[0] for name in needed}
    assert names <= {"libstdc++", "libm", "libgcc_s", "libc", "libpthread"}


def test_stub_names_everything() -> None:
    stub = Path(__file__).parents[1] / "tierzero" / "_native.pyi"
    text = stub.read_text()
    for name in [n for n in dir(_native) if not n.startswith("_")]:
        assert re.search(rf"^(class|def) {name}\b", text, re.M), name
        member = getattr(_native, name)
        if isinstance(member, type):
            for attribute in [a for a in vars(member) if not a.startswith("_")]:
                assert re.search(rf"^    def {attribute}\(", text, re.M), f"{name}.{attribute}"
