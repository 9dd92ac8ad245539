"""`tierzero`: the commands. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tierzero.errors import ConfigError, TierzeroError

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


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml]", help="A TOML file with the sections [model], [data], [train], [tiers]."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set one key, over the file: `--set train.steps=100`. Repeatable."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in train.out.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the run that train.out and its store hold and start anew.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the placement table; write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="STEPS",
            help="Steps to record into trace.json, for Perfetto and `tierzero report`: `12`, `10-12` or `none`. "
            "Default: the third and the fourth, or the last if there are fewer.",
        ),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            "--prometheus",
            metavar="[ADDRESS:]PORT",
            help="Answer Prometheus there while training, on 127.0.0.1 unless an address is given.",
        ),
    ] = None,
) -> None:
    """Train a model under byte budgets.

    Without arguments: the built-in decoder of 103 M parameters on the sources of Python's standard library, into
    `runs/demo`, with a sixth of the parameters' bytes on the device and a quarter of the optimizer states' in host
    memory.

    Your own: `--set model.path=DIR` takes a Hugging Face model (config.json and safetensors), `--set data.path=PATH` a
    text file or a directory of them.

    Keys: `model.{preset,path,layers,hidden,heads,vocab}`, `data.{path,sequence,batch}`,
    `train.{steps,lr,warmup,weight_decay,clip,overlap,state_dtype,master,accumulate,seed,save_every,out,dtype}`,
    `train.{micro_batches,recompute,sample,log_every}`,
    `tiers.{nvme,nvme_tbw,nvme_limit,nvme_block,link_limit,host,device,activations,prefetch,gds}`. Sizes are bytes,
    "64MiB", "1.5GB", or a share of memory (of the host budget for activations), "60%"; limits are bytes per second,
    "1GB/s".

    Ctrl-C finishes the step, saves and exits; `--resume` goes on with the same losses, bit for bit.
    """
    with _sentences():
        if resume and overwrite:
            raise ConfigError("--resume goes on with the run in train.out and --overwrite removes it: give one of them")
        from tierzero.cli.config import load

        loaded = load(config, settings or [])
        from tierzero.cli.train import Watching, run

        watching = Watching(trace, prometheus)
        run(loaded, resume=resume, overwrite=overwrite, dry_run=dry_run, quiet=quiet, watching=watching)


@app.command()
def report(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="What `train.out` was of a run of `tierzero train`.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page to write. Default: RUN_DIR/report.html.")
    ] = None,
) -> None:
    """Write one HTML page about a run: loss, speed, stalls, a step's timeline, traffic, budgets, wear.

    The page holds everything itself and loads nothing from the network. The run may still be going on, or have been cut
    short.
    """
    with _sentences():
        from tierzero.cli.page import write_page

        print(write_page(directory, out))


@app.command()
def tune(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="The file that `tierzero train` is given.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="As for `train`: over the file, for measuring only."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="NAME",
            help="Also choose `accumulate` (micro-batches, with the same tokens a step), `block` (of the drive's I/O) "
            "or `state_dtype` (of the moments: other numbers than before). Repeatable.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="How long to measure, about, without loading.")] = 120.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it, as .png, .svg or .pdf.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Leave the file as it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the prefetch depth that is fastest for your model on your drive, and write it to CONFIG.toml.

    Trains the model of the configuration for a few steps at a time, in a directory of its own beside the store, with
    the same budgets; a search that drops losers early finds the smallest depth whose step is as fast as the fastest.
    Shows the steps' times, what they waited for, how far the best is from its bound, and what limits it.

    The file keeps its comments; without one the values are only printed. Runs that are there are not touched. Ctrl-C
    leaves the file as it is and nothing on the drive.
    """
    with _sentences():
        from tierzero.cli.tune import run

        run(
            config,
            settings or [],
            sweeps=list(dict.fromkeys(sweep or [])),
            seconds=seconds,
            plot=plot,
            dry_run=dry_run,
            as_json=as_json,
        )


bench = typer.Typer(name="bench", help="Measure what this machine can do.", no_args_is_help=True)
app.add_typer(bench)


@bench.callback()
def _bench() -> None:
    pass


@bench.command("nvme")
def bench_nvme(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="A directory on each drive.", show_default=False)
    ],
    size: Annotated[str, typer.Option("--size", help="Of the file to measure on.")] = "4GiB",
    seconds: Annotated[float, typer.Option("--seconds", help="How long to measure, in all.")] = 48.0,
    compare_fio: Annotated[
        bool, typer.Option("--compare-fio", help="Run fio in turns with the engine and print the ratios.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the drive under each PATH and keep the result.

    Reads, writes and both at once, through every engine that works there, over a grid of block size and depth; then
    how long the best setting's rates hold. It is stored as the drive's profile, which `offload` and `plan` use. Several
    paths are measured alone and then together, striped.

    The file it writes is new and nameless: nothing of yours is touched, and nothing is left behind.
    """
    with _sentences():
        from tierzero.cli.bench import nvme

        nvme(paths, size, seconds, compare_fio=compare_fio, as_json=as_json)


@app.command()
def doctor(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Directories for a store; default: this one.")
    ] = None,
    selftest: Annotated[
        Path | None,
        typer.Option(
            "--selftest", metavar="PATH", help="Also write, read and verify there, through every backend, in 30 s."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with everything.")] = False,
) -> None:
    """Check this machine and the drives under PATHS, with one line of advice for each thing that is not as it should
    be.

    Kernel, io_uring, O_DIRECT, file systems and their mount options, free space, limits, memory, huge pages, processor,
    torch, CUDA, GPUDirect: what was found is really tried, the dangerous parts in child processes. The output is enough
    for a bug report.

    Exits 0 unless training cannot work here (or the self-test finds a backend that fails), then 1.
    """
    with _sentences():
        from tierzero.cli.doctor import run

        raise typer.Exit(run(paths or [], selftest, as_json=as_json))


@contextmanager
def _sentences() -> Iterator[None]:
    """Turns expected errors into a sentence on stderr and an exit code: 2 for the configuration, 1 otherwise."""
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
        for line in describe(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


def describe(error: Exception) -> str:
    """The error's sentence; an operating-system error names its path even where its text does not."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    path = f"{error.filename}: " if error.filename and str(error.filename) not in str(error.strerror) else ""
    return f"{path}{error.strerror} [errno {error.errno}]"


def _has_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
