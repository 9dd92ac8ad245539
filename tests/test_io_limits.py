"""What a process may lack: io_uring, locked memory, descriptors, threads, whole transfers, peace from signals."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from io_process import NOBODY, build_shim, run

from tierzero import _native

SETUP, ENTER, REGISTER = 425, 426, 427  # io_uring's system calls

needs_uring = pytest.mark.skipif(bool(_native.probe_uring()), reason=f"no io_uring: {_native.probe_uring()}")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def nobodys() -> Iterator[Path]:
    """A directory where a process without any rights may write."""
    path = Path(tempfile.mkdtemp(prefix="tierzero-test-"))
    path.chmod(0o755)
    os.chown(path, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


# ---- io_uring forbidden


@needs_uring
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter names system calls by number")
@pytest.mark.parametrize(
    ("call", "code", "where"),
    [
        (SETUP, errno.EPERM, "io_uring_setup"),
        (SETUP, errno.ENOSYS, "io_uring_setup"),
        (ENTER, errno.EPERM, "io_uring_enter"),
    ],
)
def test_io_uring_forbidden(tmp_path: Path, call: int, code: int, where: str) -> None:
    said = run(
        """
deny(int(sys.argv[2]), int(sys.argv[3]))
try:
    n.Engine(kind="uring")
except OSError as error:
    assert "use the pool" in str(error), error
else:
    raise AssertionError("io_uring was forbidden")
engine = n.Engine()
file = n.File(sys.argv[1])
round_trip(engine, file)
facts = engine.describe()
assert engine.name == facts["engine"] == facts["drives"][0]["engine"] == "pool", facts
assert facts["reason"] == n.probe_uring() == facts["drives"][0]["reason"], facts
print(facts["reason"])
""",
        tmp_path / "f",
        call,
        code,
    )
    assert said == f"{where}: {os.strerror(code)}\n"


@needs_uring
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter names system calls by number")
def test_registration_forbidden(tmp_path: Path) -> None:
    """Requests go through the ring all the same, with plain files and buffers."""
    run(
        """
deny(int(sys.argv[2]), errno.EPERM)
engine = n.Engine(kind="uring")
file = n.File(sys.argv[1])
slab = n.Slab(1 << 20)
engine.register(slab.array())
round_trip(engine, file)
engine.write(file, 0, slab.array()).result()
(drive,) = engine.describe()["drives"]
assert not drive["fixed_files"] and not drive["fixed_buffers"], drive
assert engine.register(slab.array()) is False
""",
        tmp_path / "f",
        REGISTER,
    )


# ---- limits


@needs_root
def test_little_locked_memory(nobodys: Path) -> None:
    said = run(
        """
os.chdir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
become_nobody()
for kind in ("auto", "pool"):
    engine = n.Engine(kind=kind)
    early, late = n.Slab(8 << 20).array(), n.Slab(8 << 20).array()
    engine.register(early)
    file = n.File("f")
    round_trip(engine, file)
    assert engine.register(late) is False
    for memory in (early, late):
        memory[:] = noise(memory.size)
        engine.write(file, 0, memory).result()
        back = np.zeros_like(memory)
        engine.read(file, 0, back).result()
        assert np.array_equal(back, memory)
    print(engine.name)
    engine.close()
""",
        nobodys,
    )
    assert said.split() == ["pool" if _native.probe_uring() else "uring", "pool"]


def test_few_descriptors(tmp_path: Path) -> None:
    """However few are left, there is an error that says so, or the bytes are right; and afterwards all is well."""
    run(
        """
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
took, refused = 0, set()
for left in range(12):
    hoard = []
    while True:
        try:
            hoard.append(os.dup(0))
        except OSError:
            break
    for fd in hoard[:left]:
        os.close(fd)
    engine = file = None
    try:
        engine = n.Engine()
        file = n.File(sys.argv[1])
        round_trip(engine, file)
        took += 1
    except OSError as error:
        assert error.errno == errno.EMFILE, error
        assert "Too many open files" in str(error)
        assert engine is None or error.filename == sys.argv[1], error
        refused.add(str(error))
    if engine is not None:
        engine.close()
    engine = file = None
    gc.collect()
    for fd in hoard[left:]:
        os.close(fd)
assert took and refused, (took, refused)
engine, file = n.Engine(), n.File(sys.argv[1])
round_trip(engine, file)
assert n.probe_uring() == os.environ["URING"], n.probe_uring()  # what failed for want of descriptors is tried again
""",
        tmp_path / "f",
        env={"URING": _native.probe_uring()},
    )


@needs_root
def test_no_more_threads(nobodys: Path) -> None:
    run(
        """
os.chdir(sys.argv[1])
become_nobody()
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
threads = len(os.listdir("/proc/self/task"))
errors = 0
for more in range(8):
    resource.setrlimit(resource.RLIMIT_NPROC, (threads + more, hard))
    engine = None
    try:
        engine, file = n.Engine(kind="pool", depth=4), n.File("f")
        round_trip(engine, file)
    except OSError as error:
        assert error.errno == errno.EAGAIN and "thread" in str(error), error
        errors += 1
    if engine is not None:
        engine.close()
assert 0 < errors < 8, errors
""",
        nobodys,
    )


# ---- transfers that are short, interrupted or fail, through a library preloaded over pread and pwrite


@pytest.mark.parametrize("direct", [True, False])
def test_short_and_interrupted_transfers(tmp_path: Path, shim: Path, direct: bool) -> None:
    run(
        """
shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
engine = n.Engine(kind="pool", block=65536, depth=3)
file = n.File(sys.argv[1], direct=sys.argv[2] == "True")
shim.shim_arm(1)
for seed, nbytes in enumerate((1, 4095, 4096, 4097, 65536, 65537, 200_000)):
    round_trip(engine, file, nbytes, seed)
assert shim.shim_calls() > 100
""",
        tmp_path / "f",
        direct,
        env={"LD_PRELOAD": str(shim), "SHIM_LONGEST": "4096" if direct else "1000", "SHIM_HICCUPS": "1"},
    )


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_failing_transfers(tmp_path: Path, shim: Path, code: int) -> None:
    run(
        """
shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
code = int(os.environ["SHIM_FAIL"])
engine = n.Engine(kind="pool", block=65536, depth=3)
file = n.File(sys.argv[1])
data = noise(1 << 20)
engine.write(file, 0, data).result()
shim.shim_arm(1)
for call in (engine.read, engine.write):
    call(file, 0, data[:65536]).result()
    try:
        call(file, 0, data).result()
    except OSError as error:
        assert error.errno == code and error.filename == sys.argv[1], error
        assert int(str(error).split("at offset ")[1].split()[0]) >= 524288 - 262144, error
        assert os.strerror(code) in str(error), error
    else:
        raise AssertionError("it should have failed")
shim.shim_arm(0)
round_trip(engine, file)
""",
        tmp_path / "f",
        env={"LD_PRELOAD": str(shim), "SHIM_FAIL": str(code), "SHIM_OFFSET": "524288"},
    )


# ---- signals

STORM = """
shim = ctypes.CDLL(sys.argv[2])
alarms = 0
def ring(*_):
    global alarms
    alarms += 1
if sys.argv[3] == "python":
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
else:
    shim.shim_alarm(1000)
for kind, direct in (("auto", True), ("pool", True), ("auto", False)):
    engine = n.Engine(kind=kind, block=65536, depth=4)
    file = n.File(sys.argv[1], direct=direct)
    assert direct == file.direct or not n.File(sys.argv[1] + "x").direct
    file.preallocate(32 << 20)
    for seed in range(8):
        round_trip(engine, file, 3_000_000 + seed, seed)
    file.sync()
    file.truncate(0)
    engine.close()
big = n.File(sys.argv[4], direct=False)
big.preallocate(256 << 20)  # a file system that undoes what a signal interrupts gets there all the same
big.truncate(0)
os.unlink(sys.argv[4])
signal.setitimer(signal.ITIMER_REAL, 0)
assert (alarms or shim.shim_alarms()) > 20
"""


@pytest.mark.parametrize("handler", ["python", "c"])
def test_alarms_at_1_khz(tmp_path: Path, shim: Path, handler: str) -> None:
    memory = Path("/dev/shm")
    big = memory / f"tierzero-{os.getpid()}-{handler}" if os.access(memory, os.W_OK) else tmp_path / "big"
    try:
        run(STORM, tmp_path / "f", shim, handler, big)
    finally:
        big.unlink(missing_ok=True)
