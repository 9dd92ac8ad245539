"""Names that look like markup, or that the output's encoding does not know, in what every command prints."""

from __future__ import annotations

import ast
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import CODE, python_path, tierzero, train_arguments

import tierzero as package
from tierzero.native import NATIVE

NAME = "a[/b] [bold]c :rocket: [x"
PRINTING = sorted([*Path(package.__file__).parent.glob("cli/*.py"), *Path(package.__file__).parent.glob("bench/*.py")])
needs_native = pytest.mark.skipif(NATIVE is None, reason="it measures the native engine")


def environment(tmp_path: Path) -> dict[str, str]:
    return python_path() | {
        "TIERZERO_PROFILES": str(tmp_path / "profiles"),
        "PATH": os.environ["PATH"],
        "TERM": "xterm",
        "COLUMNS": "300",
        "PYTHONUTF8": "1",
    }


def on_a_terminal(*arguments: str, env: dict[str, str]) -> tuple[int, str]:
    """(exit code, everything that a person saw)."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CODE, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the last of them has closed it
            break
        if not data:
            break
        seen += data
    os.close(ours)
    return process.wait(240), seen.decode(errors="replace")


@needs_native
def test_bench_on_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.mkdir(parents=True)
    arguments = ("bench", "nvme", str(path), "--size", "32MiB", "--seconds", "2")
    code, seen = on_a_terminal(*arguments, env=environment(tmp_path))
    assert code == 0, seen
    assert NAME in seen
    assert "Traceback" not in seen


def test_doctor_on_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.mkdir(parents=True)
    code, seen = on_a_terminal("doctor", str(path), env=environment(tmp_path))
    assert code == 0, seen
    assert NAME in seen
    assert "Traceback" not in seen


def test_train_on_a_terminal(tmp_path: Path) -> None:
    store = str(tmp_path / "store" / NAME)
    arguments = train_arguments(tmp_path / NAME, "train.steps=1", f"tiers.nvme={store}")
    code, seen = on_a_terminal(*arguments, env=environment(tmp_path))
    assert code == 0, seen
    assert NAME in seen
    assert "Traceback" not in seen
    code, seen = on_a_terminal(*arguments, env=environment(tmp_path))
    assert code == 2
    assert NAME in seen


@pytest.mark.parametrize("path", PRINTING, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_no_text_with_values_in_it_goes_through_markup(path: Path) -> None:
    """A console is given `Text`, or a constant; what a column shows is not markup."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name.endswith(("console.print", "console.rule", "status.update")):
            assert not any(isinstance(one, ast.JoinedStr) for one in node.args), ast.unparse(node)
        if name == "TextColumn" and "{" in ast.unparse(node.args[0]):
            assert "markup=False" in ast.unparse(node), ast.unparse(node)


@pytest.mark.parametrize(
    "arguments",
    [["doctor", "{path}"], ["doctor", "--json", "{path}"], ["bench", "nvme", "{path}"], ["train", "--set", "x={path}"]],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["ünï-日本", "\udcff"])
def test_names_that_the_encoding_does_not_know(tmp_path: Path, arguments: list[str], name: str) -> None:
    env = environment(tmp_path) | {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = tierzero(*(argument.format(path=tmp_path / name) for argument in arguments), env=env)
    assert "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()
    assert done.returncode in (0, 1, 2)


@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["bench", "nvme", "."], ["train", "--dry-run"]])
def test_a_working_directory_that_is_gone(tmp_path: Path, arguments: list[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); {CODE}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: the working directory no longer exists: go to one that does\n"
