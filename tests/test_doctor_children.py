"""What doctor tries in child processes: libraries that abort, hang or fail take nothing down (N13)."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from fake_root import Tree

from tierzero.doctor import gpudirect, libraries
from tierzero.doctor.child import Child, Outcome

GIB = 1 << 30
HERE = __name__


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def children(kind: str) -> Any:
    """What the children of these tests do; they import this module."""
    yield {"what": "first", "kind": kind}
    if kind == "abort":
        os.abort()
    if kind == "hang":
        time.sleep(3600)
    if kind == "raise":
        raise RuntimeError("no such\nluck")
    print("a library's chatter", flush=True)
    yield {"what": "last"}


@pytest.mark.parametrize(
    ("kind", "silence", "ended", "count"),
    [
        ("abort", 60.0, "was killed by SIGABRT", 1),
        ("hang", 5.0, "did not answer within 5 s and was killed", 1),
        ("raise", 60.0, "ended with exit code 1: luck", 1),
        ("fine", 60.0, "", 2),
    ],
)
def test_children(kind: str, silence: float, ended: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child said before its end counts, and its end is a clause."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    heard: list[dict[str, Any]] = []
    with Child(f"{HERE}:children", kind) as child:
        outcome = child.listen(silence, heard.append)
    assert outcome.ended.startswith(ended)
    assert len(outcome.lines) == count
    assert heard == outcome.lines
    assert outcome.last("first") == {"what": "first", "kind": kind}
    assert outcome.last("nothing") is None


def test_a_child_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with Child("x:y") as child:
        assert child.listen(5.0).ended.startswith("could not be started")


def look_at_gpudirect(silence: float = 60.0) -> Outcome:
    with Child("tierzero.doctor.gpudirect:probe") as child:
        return child.listen(silence)


@pytest.mark.parametrize(
    ("body", "silence", "said"),
    [
        ("import os; os.abort()", 60.0, "its probe was killed by SIGABRT during import kvikio"),
        (
            "import time; time.sleep(3600)",
            6.0,
            "its probe did not answer within 6 s and was killed during import kvikio",
        ),
        ("raise OSError('libcuda.so.1: no such file')", 60.0, "no libcufile"),
    ],
)
def test_a_python_package_that_aborts(
    body: str, silence: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N13."""
    (tmp_path / "kvikio.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = gpudirect.finding(look_at_gpudirect(silence), gpu=False)
    assert said in found.value
    assert found.status == "note"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler for the stub library")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("abort();", "its probe was killed by SIGABRT during cuFileDriverOpen of libcufile.so.0"),
        ("struct error e = {5011, 0}; return e;", "cuFileDriverOpen gives error 5011"),
        ("struct error e = {0, 0}; return e;", "libcufile.so.0 opens"),
    ],
)
def test_a_library_that_aborts(body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N13, I6: the library is found by the loader, at run time; every place tried is listed."""
    source = tmp_path / "stub.c"
    source.write_text(
        f"#include <stdlib.h>\nstruct error {{ int a, b; }};\nstruct error cuFileDriverOpen(void) {{ {body} }}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcufile.so.0"), str(source)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = gpudirect.finding(look_at_gpudirect(), gpu=True, root=tmp_path)
    assert said in found.value
    assert found.status != "fail"
    assert found.advice
    assert found.facts["tried"][0] == {"what": "library", "path": "libcufile.so.0", "error": ""}


def test_every_place_of_the_library_is_listed_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6."""
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    tried = gpudirect.candidates()
    assert str(tmp_path / "lib/libcufile.so.0") in tried
    if not look_at_gpudirect().last("driver"):
        lines = [line for line in look_at_gpudirect().lines if line["what"] == "library"]
        assert [line["path"] for line in lines] == tried
        assert all(line["error"] for line in lines)


TORCH = {"what": "torch", "version": "2.9.1+cu130", "threads": 8, "capability": "AVX512", "cuda": "13.0"}
NONE = {"what": "cuda", "devices": [], "error": "no CUDA-capable device is detected"}
SOME = {"what": "cuda", "devices": [{"name": "H200", "bytes": 141 * GIB, "capability": "9.0"}], "error": ""}
PINNED = {"what": "pinned", "bytes": 1 << 28, "seconds": 0.1, "error": ""}


@pytest.mark.parametrize(
    ("lines", "ended", "statuses", "said"),
    [
        ([], "ended with exit code 1: ImportError: x", {"torch": "fail"}, "pip install torch"),
        ([{**TORCH, "version": "2.1.0"}, NONE], "", {"torch": "fail"}, "too old"),
        ([{**TORCH, "cuda": None}, {**NONE, "error": ""}], "", {"torch": "ok", "CUDA": "note"}, "CUDA build"),
        ([TORCH, NONE], "", {"CUDA": "note"}, "docker --gpus all"),
        ([TORCH], "was killed by SIGSEGV", {"torch": "ok", "CUDA": "warn"}, "nvidia-smi"),
        ([TORCH, SOME, PINNED], "", {"CUDA": "ok", "pinned memory": "ok"}, ""),
        ([TORCH, SOME], "was killed by SIGBUS", {"CUDA": "ok", "pinned memory": "warn"}, "update the driver"),
        ([TORCH, SOME, {**PINNED, "error": "out of memory"}], "", {"pinned memory": "warn"}, "overlap"),
    ],
)
def test_torch_and_cuda(
    lines: list[dict[str, Any]], ended: str, statuses: dict[str, str], said: str, tree: Tree, monkeypatch: Any
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = libraries.torch_findings(Outcome(lines, ended), tree.root)
    assert {f.name: f.status for f in found}.items() >= statuses.items()
    assert any(said in finding.advice for finding in found)


def test_a_driver_without_a_cuda_build(tree: Tree) -> None:
    tree.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module 580.65.06 Release\nGCC x")
    found = libraries.torch_findings(Outcome([{**TORCH, "cuda": None}, {**NONE, "error": ""}], ""), tree.root)
    assert (found[-1].status, found[-1].value) == ("warn", "unused, driver 580.65.06")


def test_a_library_that_ends_the_process_early_is_told_in_a_clause() -> None:
    """`import torch` may call exit(0)."""
    (found,) = libraries.torch_findings(Outcome([], ""))
    assert found.value == "cannot be imported: the import ended early, with exit code 0"
