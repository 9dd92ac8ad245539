"""`tierzero`: the commands. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any

import typer

from tierzero.cli.commands import ckpt as checkpoints
from tierzero.cli.commands.bench import nvme
from tierzero.cli.commands.doctor import doctor
from tierzero.cli.commands.plan import plan
from tierzero.cli.commands.report import report
from tierzero.cli.commands.train import train
from tierzero.cli.commands.tune import tune
from tierzero.errors import NO_ROOM, ConfigError, TierzeroError, describe

app = typer.Typer(
    name="tierzero",
    help="Train PyTorch models larger than the GPU: parameters, gradients, optimizer states on device, host, NVMe.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"tierzero {version('tierzero')}")
        except PackageNotFoundError:
            print("tierzero (not installed)")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@contextmanager
def _sentences() -> Iterator[None]:
    """Turns expected errors into a sentence on stderr and an exit code: 2 for the configuration, 1 otherwise."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: what is printed is lost, and no file takes its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - till the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # paths hold what no encoding may know
            stream.reconfigure(errors="backslashreplace")
    try:
        if not _has_directory():  # torch's libraries do not even load there
            raise ConfigError("the working directory no longer exists: go to one that does")
        yield
    except (TierzeroError, OSError) as error:
        if os.environ.get("TIERZERO_DEBUG", "") not in ("", "0"):
            raise
        if isinstance(error, BrokenPipeError):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at exit
            raise typer.Exit(1) from None
        said = describe(error)
        if isinstance(error, OSError) and error.filename is None and error.errno in NO_ROOM and _output_fails():
            said = f"the output cannot be written: {said}"
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at exit
        for line in said.splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


def _output_fails() -> bool:
    """Whether a drive does not take what is printed; it is tried."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _has_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _add(run: Callable[..., None], to: typer.Typer = app) -> None:
    """A command by the name of its function, with errors as sentences."""

    @wraps(run)
    def command(*args: Any, **kwargs: Any) -> None:
        with _sentences():
            run(*args, **kwargs)

    to.command()(command)


bench = typer.Typer(name="bench", help="Measure what this machine can do.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    pass


ckpt = typer.Typer(name="ckpt", help="List, show, verify, export and remove checkpoints.", no_args_is_help=True)


_add(train)
_add(report)
_add(tune)
_add(plan)
app.add_typer(bench)
_add(nvme, bench)
_add(doctor)
app.add_typer(ckpt)
for _command in (checkpoints.ls, checkpoints.show, checkpoints.verify, checkpoints.export, checkpoints.rm):
    _add(_command, ckpt)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
