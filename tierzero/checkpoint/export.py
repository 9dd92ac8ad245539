"""A model's weights as safetensors shards, as transformers lays them out, streamed out of the tiers.

Note [one export or the other]
Files are written under names that nothing has, made durable, and then switched: a reader finds the export before this
one or this one, whole, at every moment. Readers look for model.safetensors first and for the index second; so the
switch is the rename of the one file, or the rename of the index and the removal of an older single file. Only then are
the files of the export before removed.

Note [tied names]
A tensor with several names is written once, under the first of them. The others are listed in the metadata of its file,
as safetensors.torch.save_model does ({other name: name}) and load_model understands, and in that of the index.
transformers ties them again itself.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierzero.api import check_outside, engine_of
from tierzero.checkpoint.given import path_of
from tierzero.checkpoint.leftovers import exporting, part_of
from tierzero.checkpoint.safetensors import DTYPES, INDEX, SINGLE, read_safetensors
from tierzero.checkpoint.shard import Bytes, Shard
from tierzero.checkpoint.writer import write_file
from tierzero.engine import Engine
from tierzero.errors import StoreCorruptError, StoreError, TierzeroError, naming
from tierzero.monitoring.clock import SAVE
from tierzero.paging.loop import LoopThread
from tierzero.sizes import format_size, parse_size
from tierzero.units.live import LiveParameter
from tierzero.units.paged import Paged
from tierzero.units.parts import unit_of

_MARK = "tierzero"  # in the metadata of what was exported
_NAMES = re.compile(r"model(\.\d+)?(-\d+-of-\d+)?\.safetensors(\.index\.json)?")  # of all files in a directory


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard: int | str = "5GB",
    tied: str = "list",
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the model's state dict as safetensors: to one file if `path` ends in .safetensors, else into the directory
    `path`, as model.safetensors or as shards of at most `max_shard` bytes (a larger tensor has one to itself) with
    model.safetensors.index.json, as transformers writes and reads them. Returns the path.

    tied: "list" writes a tensor with several names once, see Note [tied names]; "copy" writes it under each name, for
    readers that know nothing of ties. metadata: strings for the header.
    overwrite: replace weights that are not an earlier export. Other files in the directory are left alone.

    16 MiB are in memory at a time. Waits for queued updates. What was at `path` stands until the new files are whole
    and durable; see Note [one export or the other]. What a killed export has left there goes away.
    Raises OSError(ENOSPC) before anything is written where the drive has no room, StoreError for foreign weights in the
    way, TierzeroError for what safetensors cannot hold, and inside a forward or backward of the model, in hooks too.
    """
    engine: Engine | None = None
    counted: AbstractContextManager[None] = nullcontext()
    try:
        engine = engine_of(model)
    except TierzeroError:
        pass  # a model that is not offloaded
    else:
        check_outside(engine, engine.model() or model, "export")
        counted = engine.metrics.inside(SAVE, "save", f"export {path}")
    tensors = model.state_dict(keep_vars=True)
    with counted:
        return export_tensors(
            tensors, path, max_shard=max_shard, tied=tied, metadata=metadata, overwrite=overwrite, engine=engine
        )


def export_tensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    max_shard: int | str = "5GB",
    tied: str = "list",
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    engine: Engine | None = None,
) -> Path:
    """As `export`, of a state dict's tensors, with parameters of `engine` among them."""
    target = path_of(path, "an export")
    if tied not in ("list", "copy"):
        raise ValueError(f'tied must be "list" or "copy", got {tied!r}')
    limit = parse_size(max_shard, what="max_shard")
    single = target.suffix == ".safetensors"
    shards = _shards(tensors, None if single else max(limit, 1), tied == "copy")
    folder = target.parent if single else target
    before = [] if overwrite and single else _before(target, single, overwrite)
    _check_room(folder, sum(shard.nbytes for shard in shards))
    folder.mkdir(parents=True, exist_ok=True)
    marks = {"format": "pt", _MARK: "export", **(metadata or {})}
    if not all(isinstance(one, str) for pair in marks.items() for one in pair):
        raise TypeError(f"the metadata of a safetensors file are strings by name, got {dict(metadata or {})!r}")
    names = [target.name] if single else _names(folder, len(shards))
    token = f"{os.getpid()}-{secrets.token_hex(4)}"  # two exports may go on at once, in one process too
    parts = [folder / part_of(name, token) for name in names]
    with exporting(folder, lambda name: name == target.name if single else _NAMES.fullmatch(name) is not None):
        try:
            for shard, part in zip(shards, parts, strict=True):
                _write(part, shard, marks, engine)
            if single:
                os.replace(parts[0], target)
            else:
                _switch(folder, shards, parts, names, before, token)
            _sync(folder)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
    return target


def _shards(tensors: Mapping[str, Any], limit: int | None, copies: bool) -> list[Shard]:
    """The tensors in their order, cut at `limit` bytes."""
    shards = [Shard()]
    first: dict[object, tuple[str, Shard]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TierzeroError(
                f"{name} in the model's state dict is a {type(tensor).__name__}, which safetensors cannot hold; save "
                "this model with torch.save(model.state_dict(), path)"
            )
        if name == "__metadata__":
            raise TierzeroError(f"a safetensors file cannot hold a tensor called {name}: rename it")
        if isinstance(tensor, LiveParameter):
            raise TierzeroError(f"{name} is in use by a forward or an `unsharded` block: export after it, not inside")
        if tensor.dtype not in DTYPES:
            raise TierzeroError(f"{name} is {tensor.dtype}, which safetensors export does not know; convert it first")
        found = unit_of(tensor)
        if found is not None and found[1] in found[0].blank:
            raise TierzeroError(
                f"{name} was never given a value: call tierzero.initialize(model) or tierzero.load(model, path) first"
            )
        key: object = found or tensor.source if isinstance(tensor, Paged) else _place(tensor)
        if not copies and tensor.numel() and key in first:
            kept, shard = first[key]
            shard.ties[name] = kept
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if limit is not None and shards[-1].tensors and shards[-1].nbytes + nbytes > limit:
            shards.append(Shard())
        shards[-1].tensors[name] = tensor
        shards[-1].nbytes += nbytes
        first[key] = (name, shards[-1])
    return shards


def _place(tensor: torch.Tensor) -> object:
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _names(folder: Path, count: int) -> list[str]:
    """What the files will be called: as transformers does, or with a number where those names are taken."""
    if count == 1:
        return [SINGLE]
    generation = 0
    while True:
        stem = "model" if not generation else f"model.{generation}"
        names = [f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
        if not any((folder / name).exists() for name in names):
            return names
        generation += 1


def _before(target: Path, single: bool, overwrite: bool) -> list[Path]:
    """The weights at `target`, all of them of earlier exports (or of anybody with `overwrite`); StoreError else."""
    if single:
        there = [target] if target.exists() else []
    elif os.path.lexists(target) and not target.is_dir():
        kind = "file" if target.exists() else "dangling link"
        raise StoreError(f"{target} is a {kind}: give export() a directory, or a name that ends in .safetensors")
    else:
        kinds = ("*.safetensors", "*.bin", "*.pt", "*.pth", INDEX)
        there = sorted(path for kind in kinds for path in target.glob(kind))
    ours = [path for path in there if path.name == INDEX or (path.suffix == ".safetensors" and _is_ours(path))]
    foreign = [path for path in there if path not in ours]
    if foreign and not overwrite:
        raise StoreError(
            f"{foreign[0]} is there already and is no earlier export: export to another directory, or pass "
            "overwrite=True to replace it"
        )
    return [path for path in there if path.suffix == ".safetensors" or path.name == INDEX]


def _is_ours(path: Path) -> bool:
    try:
        return read_safetensors(path)[1].get(_MARK) == "export"
    except (OSError, TierzeroError):
        return False


def _check_room(folder: Path, nbytes: int) -> None:
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    need = export_needs(nbytes)
    if free < need:
        raise OSError(
            errno.ENOSPC,
            f"the export takes {format_size(need)} and there are {format_size(free)} free; make room, or export to "
            "another drive",
            str(folder),
        )


def export_needs(nbytes: int) -> int:
    """Bytes of room that the export of `nbytes` of tensors asks for: its headers, too."""
    return nbytes + (1 << 20)


def _write(part: Path, shard: Shard, marks: Mapping[str, str], engine: Engine | None) -> None:
    """One file, on the loop of `engine`, whose queued updates are waited for; else on one of its own."""
    for unit in dict.fromkeys(found[0] for found in map(unit_of, shard.tensors.values()) if found is not None):
        if unit.owner is engine:
            unit.at_rest(_nothing())
    contents = Bytes(shard.header(marks), shard.tensors, engine)
    loop = LoopThread("tierzero-export") if engine is None else engine.loop
    try:
        loop.run(write_file(part, contents.nbytes, contents.fill))
    finally:
        contents.stopped = True
        loop.do(lambda: None)  # when interrupted: what was waited for goes on until it sees that
        if engine is None:
            loop.close()
    written, _ = read_safetensors(part)
    if written.keys() != shard.tensors.keys():
        raise StoreCorruptError(f"{part} does not read back as it was written: check the drive, and export again")


async def _nothing() -> None:
    """What is done on bytes at rest to have them at rest."""


def _switch(
    folder: Path, shards: list[Shard], parts: list[Path], names: list[str], before: list[Path], token: str
) -> None:
    """Put the new files in the place of those `before`; see Note [one export or the other]."""
    if len(shards) > 1:
        for part, name in zip(parts, names, strict=True):
            os.replace(part, folder / name)
        placed = {key: name for shard, name in zip(shards, names, strict=True) for key in shard.tensors}
        ties = {other: name for shard in shards for other, name in shard.ties.items()}
        index = {
            "metadata": {"total_size": sum(shard.nbytes for shard in shards), **({"tied": ties} if ties else {})},
            "weight_map": placed,
        }
        fresh = folder / part_of(INDEX, token)
        try:
            with naming(fresh), open(fresh, "w") as file:
                file.write(json.dumps(index, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            _sync(folder)
            os.replace(fresh, folder / INDEX)
        except OSError:
            for path in (folder / name for name in names):  # no index names them
                path.unlink(missing_ok=True)
            raise
        finally:
            fresh.unlink(missing_ok=True)
        (folder / SINGLE).unlink(missing_ok=True)
        kept = {INDEX, *names}
    else:
        os.replace(parts[0], folder / SINGLE)
        kept = {SINGLE}
    _sync(folder)
    for path in before:
        if path.name not in kept:
            path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make renames in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
