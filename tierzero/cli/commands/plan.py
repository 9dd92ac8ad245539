"""The options of `tierzero plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A CONFIG.toml of `tierzero train`, a Hugging Face directory, or a config.json. No weights are read.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As `tierzero train` takes it. Repeatable.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Parameters of a decoder, such as 70e9 or 7B.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Its layers.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Its hidden size.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Its vocabulary; default 32,000.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Plan for a GPU: h200, h100, a100, l40s, rtx4090, rtx3090. Default: measure this machine."),
    ] = None,
    flops: Annotated[float | None, typer.Option(help="FLOP/s that the compute device reaches, such as 400e12.")] = None,
    utilisation: Annotated[
        float, typer.Option(help="The share of the GPU's peak that training reaches.", min=0.01, max=1.0)
    ] = 0.5,
    nvme: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATES|DIR",
            help="`4x7GB/s`, `2x7/5GB/s` (read/write), a directory on each drive (repeatable; its profile is from "
            "`tierzero bench nvme`), or `none`.",
        ),
    ] = None,
    tbw: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes that all drives together may write: `1.2PB`.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the machine. Default: what this process may use.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The host budget, or a share of the memory; default `60%`.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The device budget. Default: half of the device's memory.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes/s of the host's memory beside a --gpu; default 200GB.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a micro-batch; default 2,048.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches of a step; default 1.")] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(metavar="PIECES", help="Pieces in which layers run a micro-batch; default 1."),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What of the host budget is for activations, or a share of it; default 0."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (bf16) or float32 (fp32).")] = None,
    snapshots: Annotated[
        bool, typer.Option("--snapshots/--no-snapshots", help="Count the space that checkpoints take on the drives.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with everything.")] = False,
) -> None:
    """Say whether a model can be trained on a machine, and what that takes: from shapes alone, nothing is allocated.

    Bytes on the device, in host memory and on each drive, and bytes over each link, for loading, a step, saving and
    resuming; the time of a step, from a simulation by the engine's own schedule, and what limits it; the tokens from
    which on I/O hides; drive wear; the smallest budgets that work.

    For example `tierzero plan --params 70e9 --layers 80 --hidden 8192 --gpu h200 --nvme 4x7GB/s --ram 512GiB
    --tokens 8192`. Without `--gpu`, this machine is measured for two seconds, its drives by `tierzero bench nvme`
    before.

    Exits 0 if it fits, 1 if not, 2 for options that cannot be.
    """
    from tierzero.cli.plan import Options, run

    options = Options(
        source=model,
        settings=settings or [],
        params=params,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        gpu=gpu,
        flops=flops,
        utilisation=utilisation,
        nvme=nvme or [],
        tbw=tbw,
        ram=ram,
        host=host,
        device=device,
        memory=memory,
        tokens=tokens,
        accumulate=accumulate,
        micro_batches=micro_batches,
        activations=activations,
        dtype=dtype,
        snapshots=snapshots,
    )
    raise typer.Exit(run(options, as_json=as_json))
