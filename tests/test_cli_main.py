"""The command itself: fast and bare `--version` and `--help`, and errors as one sentence with an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import python_path, tierzero, tierzero_forked


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
    tmp_path: Path, arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = tierzero_forked(*arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = tierzero("train", "--set", "train.lr=-1", cwd=tmp_path, env=python_path() | {"TIERZERO_DEBUG": "1"})
    assert done.returncode == 1
    assert "Traceback" in done.stderr
