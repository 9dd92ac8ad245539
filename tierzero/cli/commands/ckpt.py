"""The options of `tierzero ckpt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PATH = typer.Argument(
    metavar="PATH",
    help="A checkpoint of tierzero.save, a store with a snapshot, the directory of a run, or one that contains them.",
    show_default=False,
)
_Path = Annotated[Path, _PATH]
_Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Which one, as `ls` calls it. Default: the last whole one.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def ls(path: _Path, as_json: _Json = False) -> None:
    """List checkpoints: name, kind, step, date, size, state.

    A state is complete, damaged (a file is missing, cut short or not ours), partial (a save was cut short; the next one
    clears it away) or being written. The step is the `step` of the values that were saved with it.
    """
    from tierzero.cli.ckpt import ls as run

    run(path, as_json=as_json)


def show(path: _Path, name: _Name = None, as_json: _Json = False) -> None:
    """Show one checkpoint: what wrote it, your values, the optimizer's parameter groups, and all tensors.

    No tensor is read.
    """
    from tierzero.cli.ckpt import show as run

    run(path, name, as_json=as_json)


def verify(path: _Path, name: _Name = None) -> None:
    """Read one checkpoint whole and compare it with its checksums.

    Exits 0 if every byte is what was written; 1 if not, naming the file and the tensor.
    """
    from tierzero.cli.ckpt import verify as run

    run(path, name)


def export(
    path: _Path,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A directory, or a file NAME.safetensors.", show_default=False),
    ],
    name: _Name = None,
    max_shard: Annotated[str, typer.Option("--max-shard", metavar="SIZE", help="Of one file in a directory.")] = "5GB",
    tied: Annotated[
        str,
        typer.Option(
            "--tied", help='"list" writes tied tensors once and lists their names, "copy" once for each name.'
        ),
    ] = "list",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other weights in OUT.")] = False,
) -> None:
    """Write the weights of one checkpoint as safetensors, which torch and transformers load. No model class is needed.

    One tensor is in memory at a time. Into a directory as model.safetensors, or in shards with an index, as
    transformers does; put the model's config.json beside them.
    """
    from tierzero.cli.ckpt import export as run

    run(path, out, name, max_shard=max_shard, tied=tied, overwrite=overwrite)


def rm(
    path: _Path,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Which one, as `ls` calls it.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove one checkpoint. Asks first.

    Refuses what is no checkpoint, what contains files of somebody else, and what is in use. With the last snapshot of a
    store, the store goes.
    """
    from tierzero.cli.ckpt import rm as run

    run(path, name, yes=yes)
