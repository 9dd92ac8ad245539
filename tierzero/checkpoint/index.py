"""The index of a checkpoint, `tierzero.json`: what lies where, with checksums, and everything small.

Two lines of JSON: what a listing needs and the checksum of the second line; then all the rest. It is all that is needed
to read a checkpoint, and reading it can run nothing. `.metadata`, a pickle, tells torch.distributed.checkpoint the same
and is never unpickled here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tierzero.errors import StoreCorruptError, TierzeroError

INDEX = "tierzero.json"
METADATA = ".metadata"
DATA = "__0_0.distcp"
FORMAT = "tierzero checkpoint"
VERSION = 1
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
        with open(directory / INDEX, "rb") as file:
            head = json.loads(file.readline(1 << 20))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return head if isinstance(head, dict) and head.get("format") == FORMAT else None


def read_index(directory: Path) -> Index:
    """The index of the checkpoint in `directory`, its other files being there with their sizes.

    FileNotFoundError if there is none, StoreCorruptError naming the file that is damaged, TierzeroError for a version
    that is not known.
    """
    path = directory / INDEX
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{directory} holds no tierzero checkpoint: there is no {INDEX} in it") from error
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
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    for name, nbytes in index.files.items():
        _check_file(directory / name, nbytes)
    return index


def _check_file(path: Path, nbytes: int) -> None:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError as error:
        raise StoreCorruptError(
            f"{path}, a file of this checkpoint, is missing: copy the whole directory, or load another checkpoint"
        ) from error
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
    ranges = [(key, p.at, p.nbytes) for key, one in tensors.items() for p in one.pieces]
    for key, at, nbytes in [*ranges, *((key, one.start, one.length) for key, one in objects.items())]:
        if at < 0 or nbytes < 0 or at + nbytes > size:
            raise ValueError(f"{key} lies outside {DATA}")
    return Index(
        head, files, tensors, objects, dict(rest["aliases"]), dict(rest["paths"]), dict(rest["meta"]), rest["extra"]
    )


def _tensor(dtype: str, shape: Sequence[int], pieces: Sequence[Any]) -> StoredTensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype} is no dtype")
    found = [
        Piece(tuple(p[0]), tuple(p[1]), int(p[2]), int(p[3]), int(p[4]), int(p[5]), int(p[6]), str(p[7]))
        for p in pieces
    ]
    stored = StoredTensor(kind, tuple(int(size) for size in shape), found)
    numel = 1
    for size in stored.shape:
        numel *= size
    first = 0
    for piece in found:
        if piece.first != first or piece.nbytes % kind.itemsize:
            raise ValueError("the pieces of a tensor do not follow each other")
        first += piece.nbytes // kind.itemsize
    if first != numel:
        raise ValueError("the pieces of a tensor do not make it up")
    return stored
