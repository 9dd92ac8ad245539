"""A drive that hangs (a file system that is frozen): doctor and bench say so, and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import CODE, python_path

from tierzero.bench import scratch
from tierzero.doctor import paths, report
from tierzero.doctor.child import Child
from tierzero.native import NATIVE

HERE = __name__


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """An ext4 on which nothing can be written until it is thawed."""
    image, path = tmp_path / "image", tmp_path / "frozen"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    try:
        for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(path)]):
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("mounting an image is not permitted here")
    except FileNotFoundError:
        pytest.skip("no mkfs.ext4 here")
    try:
        if subprocess.run(["fsfreeze", "-f", str(path)], capture_output=True, check=False).returncode:
            pytest.skip("freezing is not permitted here")
        try:
            yield path
        finally:
            subprocess.run(["fsfreeze", "-u", str(path)], check=True)
            time.sleep(0.5)  # who waited for it goes
            assert os.listdir(path) == ["lost+found"]
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


# the command with less patience, which is idle time of the tests
HASTY = """
import tierzero.cli.bench, tierzero.doctor.child, tierzero.doctor.report
assert tierzero.doctor.report.SILENCE == 20.0 and tierzero.cli.bench.SILENCE == 15.0
tierzero.doctor.report.SILENCE, tierzero.cli.bench.SILENCE, tierzero.doctor.child._DYING = 4.0, 3.0, 1.0
"""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", HASTY + CODE, *arguments],
        capture_output=True,
        text=True,
        env=python_path() | {"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        timeout=240,
        check=False,
    )


def test_doctor_reports_a_frozen_drive_and_the_rest(frozen: Path) -> None:
    done = command("doctor", "--json", "--selftest", str(frozen))
    assert done.returncode == 1
    found: dict[str, Any] = json.loads(done.stdout)
    failed = [finding for finding in found["findings"] if finding["status"] == "fail"]
    assert [finding["value"] for finding in failed] == ["the file system did not answer within 4 s"]
    assert failed[0]["path"] == str(frozen)
    assert {"kernel", "memory", "torch", "file system", "free space"} <= {one["name"] for one in found["findings"]}
    assert "did not answer" in found["selftest"]["trials"][0]["error"]


@pytest.mark.skipif(NATIVE is None, reason="it measures the native engine")
def test_bench_says_that_a_frozen_drive_does_not_answer(frozen: Path) -> None:
    done = command("bench", "nvme", str(frozen), "--size", "32MiB", "--seconds", "2")
    assert done.returncode == 1
    assert "the file system did not answer within 3 s" in done.stderr
    assert "Traceback" not in done.stderr


def stuck(*arguments: Any) -> Any:
    """A probe that tells where it is and then hangs, or dies, with the drive."""
    yield {"what": "drive", "path": arguments[0], "disks": []}
    if "dies" in arguments[0]:
        os.abort()
    time.sleep(3600)


@pytest.mark.parametrize(
    ("name", "said"),
    [("hangs", "the file system did not answer within 3 s"), ("dies", "the process that looked at it was killed by")],
)
def test_every_end_of_a_look_at_a_path_is_a_failure_of_that_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(report, "SILENCE", 3.0)

    class Hanging(Child):
        def __init__(self, target: str, *arguments: Any) -> None:
            super().__init__(f"{HERE}:stuck" if target == "tierzero.doctor.paths:probe" else target, *arguments)

    monkeypatch.setattr(report, "Child", Hanging)
    drive, found = report._look(str(tmp_path / name), False)
    assert drive.path == str(tmp_path / name)
    assert [finding.status for finding in found] == ["fail"]
    assert found[0].value.startswith(said)
    assert found[0].advice


def test_a_child_that_cannot_die_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierzero.doctor.child._DYING", 0.05)
    monkeypatch.setattr("os.killpg", lambda *arguments: None)  # as for one that waits for a drive
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with Child(f"{HERE}:stuck", "x") as child:
        process = child._process
    assert process is not None
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_drive_that_answers_does_so_without_leaving_anything(tmp_path: Path) -> None:
    assert list(scratch.answer(str(tmp_path))) == [{"what": "answer"}]
    assert list(tmp_path.iterdir()) == []
    assert {line["what"] for line in paths.probe(str(tmp_path), False)} == {"drive", "finding"}
    assert list(tmp_path.iterdir()) == []
