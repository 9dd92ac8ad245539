"""`tierzero bench nvme` as users run it: what it prints and stores, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import CODE, default_signals, python_path, tierzero
from drives import loop_drive, memory_drive

from tierzero.doctor import paths
from tierzero.errors import ConfigError
from tierzero.hardware import profiles
from tierzero.hardware.drives import drive_of
from tierzero.hardware.measure import drive_rates
from tierzero.native import NATIVE

pytestmark = pytest.mark.skipif(NATIVE is None, reason="it measures the native engine")
KINDS = ("read", "write", "mixed")


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    path = tmp_path / "drive"
    path.mkdir()
    (path / "yours").write_text("untouched")
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return python_path() | {"TIERZERO_PROFILES": str(tmp_path / "profiles"), "PATH": os.environ["PATH"]}


def bench(*arguments: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    quick = ("--size", "64MiB", "--seconds", "2")
    return tierzero("bench", "nvme", *quick, *map(str, arguments), env=env)


def left_behind(path: Path) -> list[str]:
    return [found.name for found in path.iterdir() if found.name != "yours"]


def needs_profiles(path: Path) -> None:
    if drive_of(path).in_memory:
        pytest.skip("temporary files lie in memory here, of which no profile is kept")


def check_rates(data: dict[str, Any], *, compared: bool = False) -> None:
    for kind in KINDS:
        row = data[kind]
        numbers = ["GBps", "burst_GBps", "sustained_GBps", "sustained_seconds"]
        for name in numbers + (["fio_GBps", "ratio"] if compared else []):
            assert row[name] > 0, (kind, name)
        assert row["cpu_s_per_GB"] >= 0
        assert row["engine"] in ("uring", "pool")
        assert row["block"] % 4096 == 0 < row["depth"]
        assert ("fio_GBps" in row) == compared


def test_json_is_one_object_and_the_profile_is_kept(
    drive: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_profiles(drive)
    done = bench("--json", drive, env=environment)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    check_rates(data)
    (path,) = data["paths"]
    check_rates(path)
    assert path["path"] == str(drive)
    assert data["size"] == path["size"] == 64 << 20
    assert 0 <= data["huge_pages"] <= 1
    assert data["kernel"] == os.uname().release
    assert data["together"] is data["fio"] is None
    assert data["bytes_written"] > 64 << 20 < data["bytes_read"]
    assert set(data["engines"]) == {"uring", "pool"}
    assert all(0 < row["score"] <= 1 + 1e-9 for row in path["grid"])
    assert [path["grid"][0][key] for key in ("engine", "block", "depth")] == [
        data["read"][key] for key in ("engine", "block", "depth")
    ]
    assert left_behind(drive) == []
    assert (drive / "yours").read_text() == "untouched"

    monkeypatch.setenv("TIERZERO_PROFILES", environment["TIERZERO_PROFILES"])
    profile = profiles.load(drive)
    assert profile is not None
    assert (profile.engine, profile.block, profile.depth) == tuple(
        data["read"][key] for key in ("engine", "block", "depth")
    )
    assert profile.read == pytest.approx(data["read"]["GBps"] * 1e9)
    assert profile.mixed == pytest.approx(data["mixed"]["GBps"] * 1e9)
    assert profile.sustained_write == pytest.approx(data["write"]["sustained_GBps"] * 1e9)
    assert path["profile"] == str(profiles.file_of(profile.device))


def test_memory_has_no_profile(tmp_path: Path, environment: dict[str, str]) -> None:
    """It is measured and said to be no drive, and nothing later takes it for one."""
    with memory_drive(tmp_path / "memory", "size=256m") as memory:
        done = bench(memory, env=environment)
        assert done.returncode == 0, done.stderr
        assert "best:" in done.stdout
        (said,) = [line for line in done.stdout.splitlines() if "memory" in line and line.startswith("note: ")]
        assert said == f"note: {memory}: this is memory, not a drive, and no profile of it is stored"
        assert "stored as the profile" not in done.stdout
        assert not (tmp_path / "profiles").exists()
        with pytest.raises(ConfigError, match=f"{memory} is in memory and not on a drive"):
            drive_rates([memory])
        assert paths.profile(drive_of(memory)).status == "ok"


def test_memory_beside_a_drive(tmp_path: Path, environment: dict[str, str]) -> None:
    with loop_drive(tmp_path, 256 << 20) as real, memory_drive(tmp_path / "memory", "size=256m") as memory:
        done = bench("--json", memory, real.where, env=environment)
        assert done.returncode == 0, done.stderr
        kept = [path["profile"] for path in json.loads(done.stdout)["paths"]]
        assert kept[0] is None
        assert [str(path) for path in (tmp_path / "profiles").iterdir()] == kept[1:]


def test_what_a_person_reads(drive: Path, environment: dict[str, str]) -> None:
    needs_profiles(drive)
    done = bench(drive, env=environment | {"COLUMNS": "120", "PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "progress is for terminals"
    for word in ("best:", "engine", "sustained", "CPU s/GB", "stored as the profile", "nothing left behind", "█"):
        assert word in done.stdout, word
    plain = bench(drive, env=environment | {"PYTHONIOENCODING": "ascii"})
    assert plain.returncode == 0, plain.stderr
    assert "#" in plain.stdout
    assert plain.stdout.isascii()


def test_several_paths_alone_and_together(drive: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    done = bench("--json", drive, other, env=environment)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [path["path"] for path in data["paths"]] == [str(drive), str(other)]
    for part in (data, data["together"], *data["paths"]):
        check_rates(part)
    assert len(data["together"]["weights"]) == 2
    assert data["size"] == data["together"]["size"] == 64 << 20
    assert any("the same drive" in note for note in data["notes"])
    assert left_behind(drive) == left_behind(other) == []


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_against_fio(drive: Path, environment: dict[str, str]) -> None:
    done = bench("--json", "--compare-fio", drive, env=environment)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    check_rates(data, compared=True)
    assert data["fio"].startswith("fio")
    assert left_behind(drive) == []


def test_without_fio_it_says_so(drive: Path, environment: dict[str, str], tmp_path: Path) -> None:
    done = bench("--json", "--compare-fio", drive, env=environment | {"PATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    check_rates(json.loads(done.stdout))
    assert "fio is not installed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing"], 2, "there is no directory missing"),
        (["drive/yours"], 2, "drive/yours is not a directory"),
        (["drive", "./drive"], 2, "given twice"),
        (["drive", "--size", "1MiB"], 2, "too small to measure"),
        (["drive", "--size", "lots"], 2, "is not a size"),
        (["drive", "--size", "-1"], 2, ""),
        (["drive", "--seconds", "0"], 2, "--seconds 0"),
        (["drive", "--seconds", "nan"], 2, "--seconds nan"),
        (["drive", ".", "--size", "40MiB"], 2, "over 2 paths"),
        ([], 2, ""),
    ],
)
def test_bad_input_is_a_sentence(
    drive: Path, tmp_path: Path, environment: dict[str, str], arguments: list[str], code: int, said: str
) -> None:
    done = tierzero("bench", "nvme", *arguments, env=environment, cwd=tmp_path)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert left_behind(drive) == []
    assert (drive / "yours").read_text() == "untouched"
    assert not (tmp_path / "profiles").exists()


def test_without_the_native_extension_it_says_so(drive: Path, environment: dict[str, str]) -> None:
    done = bench(drive, env=environment | {"TIERZERO_NO_NATIVE": "1"})
    assert done.returncode == 1
    assert "error: the native I/O engine was not built" in done.stderr
    assert done.stdout == ""


def test_a_cache_that_cannot_be_written_is_a_note(drive: Path, environment: dict[str, str], tmp_path: Path) -> None:
    needs_profiles(drive)
    (tmp_path / "profiles").write_text("a file")
    done = bench("--json", drive, env=environment)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["paths"][0]["profile"] is None
    assert any("the profile was not stored" in note for note in data["notes"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_leaves_nothing(drive: Path, environment: dict[str, str], number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CODE, "bench", "nvme", str(drive), "--size", "64MiB", "--seconds", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=default_signals,
    )
    try:
        wait_for_scratch(process, drive)
        process.send_signal(number)
        out, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert out == ""
    assert left_behind(drive) == []
    assert not Path(environment["TIERZERO_PROFILES"]).exists()
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert said.startswith("stopped; nothing was left behind")
        assert "Traceback" not in said


def wait_for_scratch(process: subprocess.Popen[str], drive: Path) -> None:
    """Until the process has written to its nameless file on the drive."""
    for _ in range(10_000):
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                if os.readlink(fd).startswith(str(drive)) and os.stat(fd).st_size and os.stat(fd).st_nlink == 0:
                    return
            except OSError:
                continue  # closed meanwhile
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    raise AssertionError("the file never appeared")


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 80 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=80m", "tierzero-test", str(path)], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_small_drive_shrinks_the_size_and_a_full_one_is_refused(
    small_drive: Path, environment: dict[str, str]
) -> None:
    done = bench("--json", "--size", "1e30GiB", small_drive, env=environment)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    check_rates(data)
    assert 64 << 20 <= data["size"] < 80 << 20
    assert any("as only 80.0 MiB are free" in note for note in data["notes"])
    assert list(small_drive.iterdir()) == []

    (small_drive / "full").write_bytes(bytes(60 << 20))
    refused = bench("--json", small_drive, env=environment)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "no room to measure" in refused.stderr
    assert str(small_drive) in refused.stderr
    assert [path.name for path in small_drive.iterdir()] == ["full"]
