"""Checkpoints that torch.distributed.checkpoint wrote: sharded chunks of tensors, read one chunk at a time.

`.metadata` is a pickle. It is read with an unpickler that knows the classes of such files and refuses every other name,
so that a file from elsewhere can run nothing. The chunks are read with torch.load(weights_only=True).
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
import stat
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tierzero.checkpoint.stored import OpenFiles, Stored
from tierzero.errors import StoreCorruptError, TierzeroError
from tierzero.tiers.readonly import ReadOnlyFile

METADATA = ".metadata"
_SHORT = 64 << 10  # bytes of a run that is not worth a write of its own
_KNOWN = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "BytesStorageMetadata"),
        *("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
}
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath", "Path")}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return pathlib.PurePosixPath
        value = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")


def read_metadata(path: Path) -> Metadata:
    """The `.metadata` of the checkpoint directory `path`; StoreCorruptError if it is not one, or refers to code."""
    file = path / METADATA
    try:
        with open(file, "rb") as source:
            found = _Unpickler(source).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
    except Exception as error:  # a damaged pickle raises anything
        raise StoreCorruptError(
            f"{file} cannot be read as the metadata of a torch.distributed.checkpoint ({error}); copy it again"
        ) from error
    return found


class Chunked(Stored):
    """A tensor of such a checkpoint. `chunks` are (offsets, sizes, path, byte offset, bytes)."""

    def __init__(self, path: Path, name: str, found: TensorStorageMetadata, storage: dict[Any, Any]) -> None:
        self.name = name
        self.dtype = found.properties.dtype
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"its dtype is a {type(self.dtype).__name__}")
        self.shape = tuple(int(size) for size in found.size)
        self.file = str(path / METADATA)
        self.chunks = [self._place(path, chunk, storage) for chunk in found.chunks]
        self._check_cover()
        runs = [_lead(self.shape, sizes) for _, sizes, *_ in self.chunks]
        self.scattered = any(
            math.prod(sizes[:lead]) > 1 and math.prod(sizes[lead:]) * self.dtype.itemsize < _SHORT
            for (_, sizes, *_), lead in zip(self.chunks, runs, strict=True)
        )

    def _place(self, path: Path, chunk: ChunkStorageMetadata, storage: dict[Any, Any]) -> tuple[Any, ...]:
        info = storage.get(MetadataIndex(self.name, chunk.offsets))
        if info is None:
            raise StoreCorruptError(f"{self.file} names no file for the part of {self.name} at {list(chunk.offsets)}")
        relative = pathlib.PurePosixPath(info.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise StoreCorruptError(f"{self.file} places {self.name} in {relative}, outside its directory")
        file = path / relative
        self.file = str(file)
        if getattr(info, "transform_descriptors", None):
            raise TierzeroError(
                f"{self.name} in {file} is stored through {info.transform_descriptors}: load it with "
                "torch.distributed.checkpoint and save it without"
            )
        try:
            there = file.stat()
        except OSError:
            raise FileNotFoundError(f"{file}, in which a part of {self.name} lies, is missing; copy it again") from None
        size = there.st_size
        if not stat.S_ISREG(there.st_mode):
            raise StoreCorruptError(f"{file}, in which a part of {self.name} lies, is no regular file; copy it again")
        if info.offset < 0 or info.length < 0:
            raise StoreCorruptError(
                f"{self.file} is said to hold a part of {self.name} of {info.length} bytes at byte {info.offset}; copy "
                f"{path / METADATA} again"
            )
        if size < info.offset + info.length:
            raise StoreCorruptError(
                f"{file} is truncated: a part of {self.name} ends at byte {info.offset + info.length}, the file at "
                f"{size}; copy it again"
            )
        return tuple(chunk.offsets), tuple(chunk.sizes), file, int(info.offset), int(info.length)

    def _check_cover(self) -> None:
        """StoreCorruptError unless the chunks are the tensor, each element once."""
        bad = any(
            len(offsets) != len(self.shape)
            or any(a < 0 or n < 0 or a + n > size for a, n, size in zip(offsets, sizes, self.shape, strict=True))
            for offsets, sizes, *_ in self.chunks
        )
        total = 0 if bad else sum(math.prod(sizes) for _, sizes, *_ in self.chunks)
        boxes = [(offsets, sizes) for offsets, sizes, *_ in self.chunks if math.prod(sizes)]
        twice = not bad and any(_overlap(*a, *b) for a, b in combinations(boxes, 2))
        if bad or twice or total != self.numel:
            raise StoreCorruptError(
                f"the parts of {self.name} in {self.file} do not make up its shape {list(self.shape)}: a file of the "
                "checkpoint was not written, or is of another one"
            )

    def runs(self, files: OpenFiles) -> Iterator[tuple[int, torch.Tensor]]:
        strides = [math.prod(self.shape[at + 1 :]) for at in range(len(self.shape))]
        for offsets, sizes, path, start, length in self.chunks:
            value = self._load(files.of(path), path, start, length, sizes)
            lead = _lead(self.shape, sizes)
            rows = value.reshape(*sizes[:lead], -1)
            for place in product(*(range(size) for size in sizes[:lead])):
                at = [*place, *(0 for _ in sizes[lead:])]
                first = sum((a + o) * s for a, o, s in zip(at, offsets, strides, strict=True))
                yield first, rows[place].reshape(-1)

    def _load(self, file: ReadOnlyFile, path: Path, start: int, length: int, sizes: tuple[int, ...]) -> torch.Tensor:
        try:
            view: Any = _View(file, start, length)
            value = torch.load(view, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # of a damaged archive: many kinds
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise StoreCorruptError(
                f"the part of {self.name} in {path} is damaged ({reason}); copy it again"
            ) from error
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(sizes) or value.dtype != self.dtype:
            raise StoreCorruptError(f"the part of {self.name} in {path} is not the one that {METADATA} describes")
        return value


def _lead(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """How many leading dimensions of a chunk have to be walked through: the rest of it is contiguous in the tensor."""
    for at in range(len(shape) - 1, -1, -1):
        if sizes[at] != shape[at]:
            return at
    return 0


def _overlap(a: tuple[int, ...], m: tuple[int, ...], b: tuple[int, ...], n: tuple[int, ...]) -> bool:
    """Whether the boxes of sizes `m` at `a` and `n` at `b` share an element."""
    return all(x < y + j and y < x + i for x, i, y, j in zip(a, m, b, n, strict=True))


class _View(io.RawIOBase):
    """Bytes [start, start + length) of a file as a file."""

    def __init__(self, file: ReadOnlyFile, start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, (0, self.at, self.length)[whence] + offset)
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.at))
        if count:
            self.file.read(self.start + self.at, torch.frombuffer(buffer, dtype=torch.uint8, count=count))
        self.at += count
        return count


def find_distributed(path: Path) -> dict[str, Stored]:
    """The tensors of the checkpoint directory `path` by their names there, each with its files checked to be there."""
    found = read_metadata(path)
    tensors: dict[str, Stored] = {}
    if not isinstance(found.state_dict_metadata, dict):
        raise StoreCorruptError(f"{path / METADATA} describes no tensors by name; copy it again")
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            try:
                tensors[str(name)] = Chunked(path, name, entry, found.storage_data)
            except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
                raise StoreCorruptError(
                    f"{path / METADATA} describes {name} in no way that makes sense ({error}); copy it again"
                ) from error
        elif not isinstance(entry, BytesStorageMetadata):
            raise StoreCorruptError(f"{path / METADATA} describes {name} as a {type(entry).__name__}; copy it again")
    return tensors
