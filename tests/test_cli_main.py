"""The command itself: fast and bare `--version` and `--help`, and errors as one sentence with an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import CODE, TINY, python_path, tierzero, tierzero_here


@pytest.mark.parametrize("flag", ["--version", "--help", "-h"])
def test_an_empty_environment_is_enough(flag: str) -> None:
    """F1: no GPU, no compiler, no launcher, no environment."""
    done = tierzero(flag, env=python_path())
    assert done.returncode == 0, done.stderr
    assert "tierzero" in done.stdout.lower()
    assert done.stderr == ""


def test_version_and_help_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from tierzero.cli.main import app\n"
        "names = ('train', 'report', 'tune', 'plan', 'bench nvme', 'doctor', '')\n"
        "helps = [[*name.split(), '--help'] for name in names]\n"
        "for arguments in (['--version'], *helps, ['train', '--set', 'train.lr=-1']):\n"
        "    CliRunner().invoke(app, arguments)\n"
        "print(sorted({'torch', 'numpy', 'psutil'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_help_of_train_names_every_key() -> None:
    from tierzero.cli.config import KEYS

    text = " ".join(tierzero("train", "--help", env=python_path() | {"COLUMNS": "300"}).stdout.split())
    for key in KEYS:
        assert key.partition(".")[2] in text, key
    for option in ("--set", "--resume", "--overwrite", "--dry-run", "--quiet"):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["train", "--set", "train.lr=-1"], 2, "error: train.lr must be > 0, got -1"),
        (["train", "--set", "train.lrr=1"], 2, "did you mean train.lr?"),
        (["train", "missing.toml"], 2, "error: there is no configuration file missing.toml"),
        (["train", "--resume", "--overwrite"], 2, "give one of them"),
        (["train", "--resume"], 2, "error: there is nothing to resume in runs/demo"),
        (["train", "--set", "tiers.gds=on"], 2, 'error: tiers.gds = "on" has no effect without a CUDA device'),
        (["train", "--nonsense"], 2, "No such option"),
        (["trian"], 2, "No such command"),
    ],
)
def test_bad_input_is_a_sentence_and_touches_nothing(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    done = tierzero(*arguments, cwd=tmp_path, env=python_path() | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = tierzero("train", "--set", "train.lr=-1", cwd=tmp_path, env=python_path() | {"TIERZERO_DEBUG": "1"})
    assert done.returncode == 1
    assert "Traceback" in done.stderr


MODEL = ["--params=7e9", "--layers=32", "--hidden=4096"]
PLAN = ["plan", *MODEL, "--gpu=h200", "--nvme=7GB/s", "--ram=64GiB"]


def test_narrow_terminals_cut_nothing_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and figures are folded, and all of their letters are there (and digits, but for the drive's free space)."""
    settings = [word for setting in (*TINY, f"train.out={tmp_path}/out") for word in ("--set", setting)]
    for command, counted in ((PLAN, str.isalnum), (["train", "--dry-run", *settings], str.isalpha)):
        said = {}
        for columns in (30, 60, 300):
            monkeypatch.setenv("COLUMNS", str(columns))
            done = tierzero_here(*command)
            assert done.returncode == 0, done.stderr
            said[columns] = done.stdout
            assert "\u2026" not in done.stdout
        kept = {columns: sorted(letter for letter in text if counted(letter)) for columns, text in said.items()}
        assert kept[30] == kept[60] == kept[300]


def test_output_that_is_not_taken() -> None:
    """By a full drive: a sentence that says so. Closed from the beginning: nothing is printed, and nothing fails."""
    command = [sys.executable, "-P", "-c", CODE, *PLAN]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device [errno 28]\n"
    closed = ["sh", "-c", 'exec "$@" <&- >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    """By their own names, not by those that they have while they are written."""
    from tierzero.cli.files import write_atomically

    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("nowhere/page.html", "file/page.html", "folder", "n" * 300):
        with pytest.raises(OSError, match="cannot be written: ") as caught:
            write_atomically(tmp_path / name, "text")
        assert caught.value.filename == str(tmp_path / name)
        assert ".new" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
