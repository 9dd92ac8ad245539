"""The set-up of the Makefile: what it says of pip's work, and of its failures."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "install.py"
# as pip 23 and 26 say it, shortened
PIP = """\
Processing /work
  Installing build dependencies: started
  Installing build dependencies: finished with status 'done'
Collecting torch==2.13.0 (from tierzero==0.1.0)
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (31 kB)
  Downloading https://files.example/torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (454.2 MB)
     ---------------------------------------- 454.2/454.2 MB 80.1 MB/s eta 0:00:00
Collecting numpy (from tierzero==0.1.0)
  Using cached numpy-2.4.1-cp311-cp311-manylinux_2_27_x86_64.whl (16.7 MB)
Requirement already satisfied: rich in ./lib (14.0)
Building wheels for collected packages: tierzero
  Building wheel for tierzero (pyproject.toml): started
  Building wheel for tierzero (pyproject.toml): still running...
  Building wheel for tierzero (pyproject.toml): finished with status 'done'
Installing collected packages: numpy, torch, tierzero
Successfully installed numpy-2.4.1 tierzero-0.1.0 torch-2.13.0
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_said(tool: ModuleType) -> None:
    """Every part of the work once, and between them that it goes on."""
    lines: list[str | None] = list(PIP.splitlines())
    lines.insert(7, None)
    lines.insert(14, None)
    said = [line.strip() for line in tool.told(iter(lines))]
    assert [line for line in said if "so far" not in line] == [
        "looking for packages",
        "fetching torch, 454.2 MB",
        "taking from the cache numpy, 16.7 MB",
        "building tierzero: its native extension is compiled, if there is a C++ compiler",
        "unpacking 3 packages",
        "installed 3 packages",
    ]
    waits = [line.partition(", 0 s")[0] for line in said if "so far" in line]
    assert waits == [
        "still fetching torch, 454.2 MB",
        "still building tierzero: its native extension is compiled, if there is a C++ compiler",
    ]


def wheel(folder: Path) -> Path:
    """A package with nothing in it but a module."""
    path = folder / "nothing_much-1.0-py3-none-any.whl"
    files = {
        "nothing_much.py": b"",
        "nothing_much-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: nothing-much\nVersion: 1.0\n",
        "nothing_much-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("nothing_much-1.0.dist-info/RECORD", record + "nothing_much-1.0.dist-info/RECORD,,\n")
    return path


def install(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = ["--no-index", *map(str, arguments)]
    return subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip in this environment")
def test_pip_itself(tmp_path: Path) -> None:
    """It works, with few words; a failure has pip's own words and its exit code."""
    done = install("--target", tmp_path / "there", wheel(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there" / "nothing_much.py").exists()
    assert [line.strip() for line in done.stdout.splitlines()] == ["unpacking 1 package", "installed 1 package"]
    assert "Processing" not in done.stderr
    done = install("no-such-package-anywhere")
    assert done.returncode == 1
    assert "No matching distribution found for no-such-package-anywhere" in done.stderr
    assert "failed with exit code 1, see above" in done.stderr
