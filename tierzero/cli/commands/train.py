"""The options of `tierzero train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierzero.errors import ConfigError


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml]",
            help="A TOML file with the sections [model], [data], [train], [tiers], [checkpoint].",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set one key, over the file: `--set train.steps=100`. Repeatable."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run in train.out from what it saved last, a snapshot or a checkpoint."
        ),
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            "--resume-from",
            metavar="CHECKPOINT",
            help="Go on from this checkpoint of a run, in whatever train.out, store and budgets are set.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Remove the run that train.out and its store hold and start anew, or go on from --resume-from.",
        ),
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
    `tiers.{nvme,nvme_tbw,nvme_limit,nvme_block,link_limit,host,device,activations,prefetch,gds}`,
    `tiers.{update_threads,update_cores}`,
    `checkpoint.{every,path,keep,limit}`. Sizes are bytes,
    "64MiB", "1.5GB", or a share of memory (of the host budget for activations), "60%"; limits are bytes per second,
    "1GB/s".

    Ctrl-C finishes the step, saves and exits; `--resume` goes on with the same losses, bit for bit.
    `checkpoint.every=1000` also writes a portable checkpoint every 1000 steps while training goes on.
    """
    if resume and overwrite:
        raise ConfigError("--resume goes on with the run in train.out and --overwrite removes it: give one of them")
    if resume and resume_from is not None:
        raise ConfigError(
            "--resume goes on from what the run saved last and --resume-from from the checkpoint that it names: give "
            "one of them"
        )
    from tierzero.cli.config import load

    loaded = load(config, settings or [])
    from tierzero.cli.origin import Wanted
    from tierzero.cli.train import Watching, run

    wanted = Wanted(resume, resume_from, overwrite)
    run(loaded, wanted, dry_run=dry_run, quiet=quiet, watching=Watching(trace, prometheus))
