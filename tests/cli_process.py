"""Runs of `tierzero train` in processes of their own, for the tests of the command."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import forked

CODE = "import sys; sys.argv[0] = 'tierzero'; from tierzero.cli.main import app; app()"

# a model of eight thin layers, a step of which takes some hundredths of a second
TINY = [
    "model.preset=tiny",
    "data.sequence=32",
    "data.batch=2",
    "train.steps=12",
    "train.sample=8",
    "train.log_every=1",
]


def python_path() -> dict[str, str]:
    """An environment with nothing but the place of the sources."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def tierzero(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command with `arguments`, to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-c", CODE, *arguments],
        capture_output=True,
        text=True,
        env=env,
        cwd=cwd,
        timeout=240,
        check=False,
    )


@functools.cache
def _small_heap() -> None:
    """What a run loads is left out of the collection that every run makes, which takes half a second otherwise."""
    import torch._dynamo  # noqa: F401

    import tierzero.cli.train  # noqa: F401

    gc.collect()
    gc.freeze()


def tierzero_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same within this process, which saves the start of another one."""
    from typer.testing import CliRunner

    from tierzero.cli.main import app

    _small_heap()
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(list(arguments), done.exit_code, done.stdout, done.stderr)


def train_arguments(out: Path, *settings: str, flags: tuple[str, ...] = ()) -> list[str]:
    chosen = [*TINY, f"train.out={out}", *settings]
    return ["train", *flags, *(word for setting in chosen for word in ("--set", setting))]


def train(out: Path, *settings: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A run of the tiny model in `out`, to its end."""
    return tierzero_here(*train_arguments(out, *settings, flags=flags))


def interrupt(
    out: Path, *settings: str, flags: tuple[str, ...] = (), line: str, signal: int, twice: bool = False
) -> tuple[int, str, str]:
    """A run to which `signal` is sent once it has printed a line that starts with `line`; `twice`: and once more when
    it has said that it stops.

    Returns (exit code, stdout, stderr). A run that ends before it prints such a line is left to end.
    """
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        arguments = train_arguments(out, *settings, flags=flags)
        process, output = forked.start(forked.command, arguments, errors=errors)
        seen = ""
        with output:
            for text in output:
                seen += text
                if text.startswith(line):
                    assert process.pid is not None
                    os.kill(process.pid, signal)
                    while twice and "stop at once" not in errors.read_text() and process.is_alive():
                        time.sleep(0.01)
                    if twice:
                        os.kill(process.pid, signal)
                    break
            seen += output.read()
        return forked.code_of(process), seen, errors.read_text()


def saved(folder: Path) -> list[str]:
    """The names of the checkpoints in `folder`."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    """Losses of steps 1, 2, ...; each step has one line."""
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def disk_use(folder: Path) -> int:
    """Bytes of disk that the files below `folder` take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def default_signals() -> None:
    """What a shell's background job, or nohup, has ignored is not to be ignored by children."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
