"""Processes that begin where torch and the package are loaded: forks of a server without threads, which saves seconds
each. Signals, exit codes and output are those of any process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "tierzero.cli.train"])


def _ready() -> None:
    """Start the server, if it does not run yet: with the installed package, not with one in the current directory."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def start(work: Callable[..., None], *arguments: Any, errors: Path) -> tuple[BaseProcess, TextIO]:
    """(process, its output) of `work(*arguments)`, a function of a module; what it says on stderr goes into a file."""
    _ready()
    receiving, sending = _SERVER.Pipe(duplex=False)
    process = _SERVER.Process(target=_begin, args=(work, arguments, sending, errors, os.getcwd(), dict(os.environ)))
    process.start()
    sending.close()
    output = os.fdopen(os.dup(receiving.fileno()))
    receiving.close()
    return process, output


def code_of(process: BaseProcess, timeout: float = 240.0) -> int:
    """The exit code of a process that has closed its output, negative for a signal."""
    process.join(timeout)
    code = process.exitcode
    with suppress(ValueError):  # it still runs
        process.kill()
    assert code is not None, f"the process did not end within {timeout:.0f} s of its last output"
    process.close()
    return code


def command(arguments: Sequence[str]) -> None:
    """`tierzero` with these arguments."""
    from tierzero.cli.main import app

    sys.argv = ["tierzero", *arguments]
    app()


def source(code: str, arguments: Sequence[object]) -> None:
    """As `python -c` with these arguments."""
    sys.argv = ["-c", *map(str, arguments)]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def script(path: Path, arguments: Sequence[str]) -> None:
    """The Python script with these arguments."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _begin(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    output: Connection,
    errors: Path,
    directory: str,
    environment: dict[str, str],
) -> None:
    """In the process: takes on what the caller has, then works."""
    gc.freeze()  # collections leave out what the server has loaded
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background is born to ignore it
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    output.close()
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - what the server had was of another kind
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    work(*arguments)
