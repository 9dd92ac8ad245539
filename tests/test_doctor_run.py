"""`tierzero doctor` as a command, in processes of its own, and its self-test on real directories."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_process import CODE, default_signals, tierzero
from denied import with_little_locked_memory, without_io_uring
from names_made import names_made, needs_nameless_files

from tierzero.doctor import paths
from tierzero.doctor import selftest as module
from tierzero.doctor.selftest import BACKENDS, Verdict, selftest
from tierzero.hardware.drives import drive_of
from tierzero.native import NATIVE

needs_native = pytest.mark.skipif(NATIVE is None, reason="needs the native extension")
MACHINE = {
    "kernel",
    "processor",
    "NUMA",
    "memory",
    "swap",
    "overcommit",
    "locked memory",
    "open files",
    "native module",
    "io_uring",
    "AdamW kernel",
    "huge pages",
    "packages",
    "torch",
    "CUDA",
    "GPUDirect",
}
DRIVE = {"file system", "drive", "writable", "O_DIRECT", "I/O engine", "free space", "profile"}


def environment(**changes: str) -> dict[str, str]:
    """This one with `changes`, 80 columns wide."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "TIERZERO_NO_NATIVE")}
    return {**kept, **changes}


def report(*arguments: str, allowed: Callable[[], None] | None = None, code: int = 0, **changes: str) -> dict[str, Any]:
    """The JSON object of `tierzero doctor`."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE, "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        env=environment(**changes),
        preexec_fn=allowed,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def named(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(finding for finding in found["findings"] if finding["name"] == name)


def test_one_object_with_everything(tmp_path: Path) -> None:
    """The keys that scripts may rely on; a path that is missing is led back to what exists, and memory as a drive is
    named (N12).
    """
    other, memory = tmp_path / "other", ["/dev/shm"] if os.path.ismount("/dev/shm") else []
    other.mkdir()
    found = report(str(tmp_path), str(other / "not" / "yet"), *memory)
    assert set(found) == {"ok", "when", "versions", "paths", "findings", "selftest"}
    assert found["ok"] is True
    assert found["selftest"] is None
    assert found["paths"] == [str(tmp_path), str(other), *memory]
    led = named(found, "path")
    assert led["path"] == str(other)
    assert "not/yet does not exist" in led["advice"]
    for path in memory:
        (kind,) = [one for one in found["findings"] if one["name"] == "file system" and one["path"] == path]
        assert kind["status"] == "warn"
        assert "memory" in kind["advice"]
    assert set(found["versions"]) >= {"tierzero", "python", "torch", "numpy", "kernel", "libc", "machine"}
    for finding in found["findings"]:
        assert set(finding) == {"name", "value", "status", "advice", "path", "facts"}
        assert finding["status"] in ("ok", "note", "warn", "fail")
        assert bool(finding["advice"]) == (finding["status"] != "ok"), finding
        assert "\n" not in finding["advice"] + finding["value"]
    assert {finding["name"] for finding in found["findings"] if not finding["path"]} == MACHINE
    for path in found["paths"]:
        assert {finding["name"] for finding in found["findings"] if finding["path"] == path} >= DRIVE
    assert list(tmp_path.iterdir()) == [other]


def test_what_is_tried_has_no_name(tmp_path: Path) -> None:
    """On a drive, the trials of a probe that is killed at any moment leave nothing behind."""
    needs_nameless_files(tmp_path)
    with names_made(tmp_path) as made:
        found = {finding.name: finding for finding in paths.findings(drive_of(tmp_path), False)}
    assert found["I/O engine"].status in ("ok", "note")
    assert found["writable"].status == "ok"
    assert made == []


def test_help_and_the_command_itself_load_no_torch() -> None:
    """It must be able to say that there is none, and its libraries must not take it down."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from tierzero.cli.main import app\n"
        "CliRunner().invoke(app, ['doctor', '--help'])\n"
        "print(sorted({'torch', 'numpy', 'tierzero.doctor'} & set(sys.modules)))\n"
        "import tierzero.cli.doctor\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["[]", "False"]


def test_the_table_fits_a_pipe_and_the_current_directory_is_looked_at(tmp_path: Path) -> None:
    done = tierzero("doctor", env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert str(tmp_path) in lines
    long = [line for line in lines if len(line.rstrip()) > 80]
    assert all(str(tmp_path) in line or sys.executable in line for line in long), long
    assert "\x1b" not in done.stdout
    for name in MACHINE | DRIVE:
        assert any(line[6:].startswith(name) for line in lines), name
    assert lines[-1].startswith("Training works here.")


def test_no_torch_prevents_training(tmp_path: Path) -> None:
    """The one thing that doctor must say without."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    done = tierzero("doctor", str(tmp_path), env=environment(PYTHONPATH=path))
    assert done.returncode == 1
    last = done.stdout.splitlines()[-2:]
    assert last[0] == "Training cannot work here:"
    assert "torch: cannot be imported" in last[1]
    assert "libtorch_cpu.so" in last[1]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    found = report(str(tmp_path), code=1)
    assert named(found, "writable")["status"] == "fail"


def test_a_file_is_no_place_for_a_store(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("mine")
    found = report("--selftest", str(file), code=1)
    assert found["ok"] is found["selftest"]["ok"] is False
    assert named(found, "writable")["status"] == "fail"
    done = tierzero("doctor", "--selftest", str(file), env=environment())
    assert done.returncode == 1
    assert "self-test, beginning: " in done.stdout.splitlines()[-1]
    assert "needs a directory" in done.stdout.splitlines()[-1]
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


def test_a_library_that_aborts_is_reported(tmp_path: Path) -> None:
    """N13."""
    (tmp_path / "kvikio.py").write_text("import os; os.abort()")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    assert "SIGABRT" in named(report(PYTHONPATH=path), "GPUDirect")["value"]


@needs_native
def test_io_uring_that_a_container_forbids(tmp_path: Path) -> None:
    """N20: everything else still works, and the self-test says which backend is missing. Little locked memory beside it
    is warned about.
    """

    def allowed() -> None:
        with_little_locked_memory()
        without_io_uring()

    found = report("--selftest", str(tmp_path), allowed=allowed)
    locked = named(found, "locked memory")
    assert (locked["status"], locked["value"]) == ("warn", "64.0 KiB")
    assert locked["facts"] == {"soft": 64 << 10, "hard": 64 << 10, "exempt": False}
    ring = named(found, "io_uring")
    assert ring["status"] == "warn"
    assert "not permitted" in ring["value"]
    assert ring["facts"]["seccomp"] is True
    trials = {trial["backend"]: trial for trial in found["selftest"]["trials"]}
    assert trials["uring"]["ok"] is None
    assert "not permitted" in trials["uring"]["error"]
    assert trials["pool"]["ok"] is trials["training"]["ok"] is True


def test_without_the_native_module(tmp_path: Path) -> None:
    found = report("--selftest", str(tmp_path), TIERZERO_NO_NATIVE="1")
    assert named(found, "native module")["status"] == "warn"
    assert named(found, "io_uring")["status"] == "note"
    trials = {trial["backend"]: trial["ok"] for trial in found["selftest"]["trials"]}
    assert trials["portable"] is trials["training"] is True
    assert trials["uring"] is trials["pool"] is trials["buffered"] is None


def check(tested: Verdict) -> None:
    trials = {trial.backend: trial for trial in tested.trials}
    assert list(trials) == list(BACKENDS)
    assert tested.ok, tested
    for name in ("pool", "buffered", "portable") if NATIVE is not None else ("portable",):
        assert trials[name].ok is True
        assert trials[name].verified > 40 << 20
        assert min(trials[name].read, trials[name].write) > 0
    assert trials["training"].notes[0].startswith("4 steps equal plain PyTorch")


def test_the_selftest_verifies_every_backend_and_leaves_nothing(tmp_path: Path) -> None:
    """N22."""
    (tmp_path / "mine").write_text("mine")
    told: list[str] = []
    check(selftest(tmp_path, heard=told.append))
    assert told == list(BACKENDS.values())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_selftest_in_memory() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(prefix="tierzero-test-", dir="/dev/shm") as memory:  # others may be at it too
        check(selftest(memory, seconds=2.0))
        assert not os.listdir(memory)


def broken(folder: str, names: list[str], *rest: Any) -> Any:
    """Instead of the backends: the second dies, the fourth hangs, others work."""
    for name in names:
        yield {"what": "start", "backend": name}
        if name == "pool":
            Path(folder, "half-written").write_bytes(b"x")
            os.abort()
        if name == "portable":
            time.sleep(3600)
        yield {"what": "result", "backend": name, "ok": name != "gpudirect", "error": "", "notes": ["fine"]}


def test_a_backend_that_dies_or_hangs_takes_only_itself_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(module, "TARGET", f"{__name__}:broken")
    tested = selftest(tmp_path, silence=6.0)
    assert [(trial.backend, trial.ok) for trial in tested.trials] == [
        ("uring", True),
        ("pool", False),
        ("buffered", True),
        ("portable", False),
        ("gpudirect", False),
        ("training", True),
    ]
    errors = {trial.backend: trial.error for trial in tested.trials}
    assert errors["pool"].startswith("was killed by SIGABRT")
    assert errors["portable"] == "did not answer within 6 s and was killed"
    assert [trial.backend for trial in tested.trials if trial.failed] == ["pool", "portable"]  # GPUDirect is optional
    assert not list(tmp_path.iterdir())


def test_no_child_at_all_ends_the_selftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TARGET", "tierzero.doctor.nothing:here")
    tested = selftest(tmp_path)
    assert len(tested.trials) == len(BACKENDS)
    assert not tested.ok
    assert "No module named" in tested.trials[0].error
    assert not list(tmp_path.iterdir())


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="the self-test needs 96 MiB, 1 MiB are free"):
        selftest(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_selftest_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    dead, alive = tmp_path / f".tierzero-selftest-{process.pid}-abc", tmp_path / f".tierzero-selftest-{os.getpid()}-abc"
    odd = [".tierzero-selftest-", ".tierzero-selftest-x-y", f"selftest-{process.pid}-z"]
    others = [tmp_path / name for name in odd]
    for path in (dead, alive, *others):
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "uring").write_bytes(b"x")
    link = tmp_path / f".tierzero-selftest-{process.pid}-link"
    link.symlink_to(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    held = module._hold(str(dead))
    module.remove_stale(tmp_path)
    assert dead.exists()  # somebody in another container holds it
    os.close(held)
    monkeypatch.setattr(module, "TARGET", "tierzero.doctor.nothing:here")
    selftest(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, link.name, "mine", *odd}
    assert (tmp_path / "mine" / "file").read_text() == "mine"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_leaves_nothing(number: int, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CODE, "doctor", "--selftest", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=default_signals,
    )
    while process.poll() is None and not any(tmp_path.glob(".tierzero-selftest-*/*/*")):
        time.sleep(0.005)
    process.send_signal(number)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == code, out + errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())
