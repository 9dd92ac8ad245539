"""The index of a checkpoint, `tierzero.json`: what lies where, with checksums, and everything small.

Two lines of JSON: what a listing needs and the checksum of the second line; then all the rest. It is all that is needed
to read a checkpoint, and reading it can run nothing. `.metadata`, a pickle, tells torch.distributed.checkpoint the same
and is never unpickled here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tierzero.errors import StoreCorruptError, TierzeroError

INDEX = "tierzero.json"
METADATA = ".metadata"
DATA = "__0_0.distcp"
FORMAT = "tierzero checkpoint"
VERSION = 1
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP, errno.ENXIO)  # of what cannot be an index
OURS = {INDEX, METADATA, DATA}  # the names of all files of a checkpoint


@dataclass
class Piece:
    """One box of a tensor. The item of the data file is `length` bytes from `start` on, the elements themselves lie
    `nbytes` from `at` on and have the checksum `sums` (32 hexadecimal digits).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    start: int
    length: int
    at: int
    nbytes: int
    sums: str = ""


@dataclass
class StoredTensor:
    """A tensor in the data file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass
class StoredObject:
    """A value that torch.save wrote into the data file."""

    start: int
    length: int
    sums: str = ""


@dataclass
class Index:
    """`head`: sequence, created (ISO 8601), tensors, bytes, step-independent facts for listings. `files`: bytes of each
    other file. `paths`: of keys that are not flat, as torch's planner has them. `aliases`: further names of tied
    tensors. `meta`: the user's. `extra`: the engine's.
    """

    head: dict[str, Any]
    files: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    paths: dict[str, list[str | int]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def stored(self, key: str) -> StoredTensor | None:
        """The tensor of that key, or the one that it is tied to."""
        return self.tensors.get(self.aliases.get(key, key))


def to_bytes(index: Index) -> bytes:
    """The file's bytes."""
    rest = json.dumps(
        {
            "files": index.files,
            "tensors": {
                key: [
                    str(one.dtype).removeprefix("torch."),
                    one.shape,
                    [[p.offsets, p.sizes, p.first, p.start, p.length, p.at, p.nbytes, p.sums] for p in one.pieces],
                ]
                for key, one in index.tensors.items()
            },
            "objects": {key: [one.start, one.length, one.sums] for key, one in index.objects.items()},
            "aliases": index.aliases,
            "paths": index.paths,
            "meta": index.meta,
            "extra": index.extra,
        },
        separators=(",", ":"),
    ).encode()
    first = {"format": FORMAT, "version": VERSION, **index.head, "sha256": hashlib.sha256(rest).hexdigest()}
    return json.dumps(first).encode() + b"\n" + rest + b"\n"


def read_head(directory: Path) -> dict[str, Any] | None:
    """The first line of a checkpoint's index; None if the directory holds no checkpoint of ours."""
    try:
        with _open(directory / INDEX) as file:
            head = json.loads(file.readline(1 << 20))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            raise
        return None
    return head if isinstance(head, dict) and head.get("format") == FORMAT else None


def _open(path: Path) -> BinaryIO:
    """A regular file for reading; OSError(EINVAL) for anything else, which may be a pipe that nobody writes to."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(fd, "rb")


def read_index(directory: Path) -> Index:
    """The index of the checkpoint in `directory`, its other files being there with their sizes.

    FileNotFoundError if there is none, StoreCorruptError naming the file that is damaged, TierzeroError for a version
    that is not known.
    """
    path = directory / INDEX
    try:
        with _open(path) as file:
            raw = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{directory} holds no tierzero checkpoint: there is no {INDEX} in it") from error
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from error
    first, _, rest = raw.partition(b"\n")
    try:
        head = json.loads(first)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ValueError("it is no index of a tierzero checkpoint")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if head.get("version") != VERSION:
        raise TierzeroError(
            f"{path} has version {head.get('version')!r} of the format, and this tierzero reads version {VERSION}: use "
            "the tierzero that wrote it, or load it with torch.distributed.checkpoint"
        )
    if hashlib.sha256(rest.removesuffix(b"\n")).hexdigest() != head.get("sha256"):
        raise _damaged(path, "its checksum does not match: it is cut short or changed")
    try:
        index = _parse(head, json.loads(rest))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    for name, nbytes in index.files.items():
        _check_file(directory / name, nbytes)
    return index


def _check_file(path: Path, nbytes: int) -> None:
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise StoreCorruptError(
            f"{path}, a file of this checkpoint, is missing: copy the whole directory, or load another checkpoint"
        ) from error
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from error
    if not stat.S_ISREG(found.st_mode):
        raise _damaged(path, "it is no regular file")
    size = found.st_size
    if size != nbytes:
        raise StoreCorruptError(
            f"{path} has {size} bytes and should have {nbytes}: it was not copied whole. Copy it again, or load "
            "another checkpoint"
        )


def _damaged(path: Path, what: str) -> StoreCorruptError:
    return StoreCorruptError(f"{path} cannot be read ({what}): copy it again, or load another checkpoint")


def _parse(head: dict[str, Any], rest: dict[str, Any]) -> Index:
    files = {str(name): int(nbytes) for name, nbytes in rest["files"].items()}
    if set(files) - OURS:
        raise ValueError(f"it names the file {min(set(files) - OURS)}")
    tensors = {key: _tensor(*one) for key, one in rest["tensors"].items()}
    objects = {key: StoredObject(int(one[0]), int(one[1]), str(one[2])) for key, one in rest["objects"].items()}
    size = files[DATA]
    for key, one in tensors.items():
        for p in one.pieces:
            if not (0 <= p.start <= p.at and p.nbytes >= 0 and p.at + p.nbytes <= p.start + p.length <= size):
                raise ValueError(f"{key} lies outside {DATA}")
    for key, value in objects.items():
        if value.start < 0 or value.length < 0 or value.start + value.length > size:
            raise ValueError(f"{key} lies outside {DATA}")
    aliases, paths = dict(rest["aliases"]), dict(rest["paths"])
    for other, key in aliases.items():
        if not isinstance(key, str) or key not in tensors:
            raise ValueError(f"{other} is said to be {key!r}, which is not there")
    for key, path in paths.items():
        if key not in tensors and key not in objects and key not in aliases:
            raise ValueError(f"{key} is not there")
        if not _is_path(path) or ".".join(map(str, path)) != key:
            raise ValueError(f"{key} has the path {path!r}")
    return Index(head, files, tensors, objects, aliases, paths, dict(rest["meta"]), _extra(rest["extra"], paths))


def _is_path(path: Any) -> bool:
    """Whether it is one of contents' Note [keys]."""
    if not isinstance(path, list) or not path or not all(type(part) in (str, int) for part in path):
        return False
    if path[0] == "optimizer":
        return len(path) == 4 and (path[1] == "state" or (path[1] == "param_groups" and type(path[2]) is int))
    return len(path) == 1 if path[0] == "meta" else len(path) > 1


def _extra(extra: Any, paths: dict[str, Any]) -> dict[str, Any]:
    """The engine's values, checked."""
    groups = {path[2] for path in paths.values() if path[:2] == ["optimizer", "param_groups"]}
    if (
        not isinstance(extra["made_by"], list)
        or groups != set(range(len(extra["made_by"])))
        or not all(isinstance(one, str) for one in extra["made_by"])
    ):
        raise ValueError(f"{len(groups)} parameter groups were stepped by {extra['made_by']!r}")
    for name, pair in dict(extra["scales"]).items():
        if len(pair) != 2 or not all(isinstance(one, int | float) for one in pair):
            raise ValueError(f"the gradient of {name} waits for {pair!r}")
    return dict(extra)


def _sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    """A shape. ValueError for one that no tensor can have."""
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"the shape {shape!r}")
    return tuple(shape)


def _tensor(dtype: str, shape: Sequence[int], pieces: Sequence[Any]) -> StoredTensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or dtype.startswith(("q", "bit")):
        raise ValueError(f"{dtype} is no dtype that is saved")
    found = [
        Piece(tuple(p[0]), tuple(p[1]), int(p[2]), int(p[3]), int(p[4]), int(p[5]), int(p[6]), str(p[7]))
        for p in pieces
    ]
    stored = StoredTensor(kind, _sizes(shape), found)
    numel = 1
    for size in stored.shape:
        numel *= size
    first = 0
    for piece in found:
        _sizes(piece.offsets)
        if piece.first != first or piece.nbytes != prod(_sizes(piece.sizes)) * kind.itemsize:
            raise ValueError("the pieces of a tensor do not follow each other")
        first += piece.nbytes // kind.itemsize
    if first != numel:
        raise ValueError("the pieces of a tensor do not make it up")
    return stored
