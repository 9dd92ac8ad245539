"""Safetensors files as they lie on disk: their headers, checked, and their tensors a part at a time.

The format: 8 bytes header length (little endian), a JSON header {name: {dtype, shape, data_offsets}} with strings under
"__metadata__", the bytes. The library maps whole files and hands out whole tensors, and its errors name no tensor.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierzero.checkpoint.stored import OpenFiles, Stored
from tierzero.errors import StoreCorruptError, TierzeroError
from tierzero.units.parts import parts_of

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAMED = {name: dtype for dtype, name in DTYPES.items()}
_LARGEST_HEADER = 100 << 20  # bytes; the format's own limit
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class SafeTensor(Stored):
    """A tensor of a safetensors file; `offset` is where its bytes begin in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int

    def __post_init__(self) -> None:
        self.file = str(self.path)
        self.whole = (self.path, self.offset)

    def runs(self, files: OpenFiles) -> Iterator[tuple[int, torch.Tensor]]:
        for first, count in parts_of(self.numel, self.dtype.itemsize):
            nbytes, at = count * self.dtype.itemsize, self.offset + first * self.dtype.itemsize
            raw = files.of(self.path).view(at, nbytes, files.scratch(nbytes))
            if raw.data_ptr() % self.dtype.itemsize:
                raw = raw.clone()
            yield first, raw.view(self.dtype)


def read_safetensors(path: Path) -> tuple[dict[str, SafeTensor], dict[str, str]]:
    """The tensors of one file by name, and its metadata. Reads the header alone.

    Raises FileNotFoundError for a file that is not there, and StoreCorruptError for one that is not whole.
    """
    try:
        there = os.stat(path)
        if not stat.S_ISREG(there.st_mode):  # a pipe would wait for somebody to write
            raise StoreCorruptError(f"{path} is no regular file; check the path, or copy it again")
        size = there.st_size
        with open(path, "rb") as source:
            start = source.read(8)
            length = int.from_bytes(start, "little")
            raw = source.read(length) if len(start) == 8 and length <= min(size - 8, _LARGEST_HEADER) else b""
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; check the path, or copy it again") from None
    except OSError as error:
        raise StoreCorruptError(
            f"{path} cannot be read ({error.strerror}); check its permissions and its drive"
        ) from error
    if not size:
        raise _broken(path, "it is empty")
    if start[:4] == b"PK\x03\x04" or start[:2] == b"\x80\x02":
        raise TierzeroError(
            f"{path} is a pickled torch file, which is not read here: load it with torch.load(..., weights_only=True) "
            "and write it with safetensors.torch.save_file, or give the model.load_state_dict() its values"
        )
    if not raw:
        raise _broken(path, f"it has {size} bytes, and its header would have {length}")
    try:
        header = json.loads(raw, object_pairs_hook=lambda pairs: _unique(path, pairs))
        if not isinstance(header, dict):
            raise TypeError("its header is no object")
        metadata = header.pop("__metadata__", None) or {}
        found = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _broken(path, f"its header is damaged: {error}") from error
    end = 8 + length
    for tensor in sorted(found.values(), key=lambda tensor: (tensor.offset, tensor.numel)):
        if tensor.offset != end:
            raise _broken(path, f"tensor {tensor.name} does not begin where the one before it ends")
        end += tensor.numel * tensor.dtype.itemsize
    if end != size:
        raise _broken(path, f"{size - end} bytes behind its last tensor belong to none")
    return found, metadata


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise _broken(path, f"it holds {name} twice")
        seen[name] = value
    return seen


def _tensor(path: Path, name: str, entry: Any, data: int, size: int) -> SafeTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    dtype = _NAMED.get(entry["dtype"])
    if dtype is None:
        raise TierzeroError(
            f"tensor {name} in {path} has the dtype {entry['dtype']}, which is not one of "
            f"{', '.join(_NAMED)}; convert it first"
        )
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"tensor {name} has the shape {entry['shape']} at {entry['data_offsets']}")
    tensor = SafeTensor(name, dtype, shape, path, data + begin)
    if end - begin != tensor.numel * dtype.itemsize:
        raise ValueError(f"tensor {name} of shape {list(shape)} takes {end - begin} bytes there")
    if data + end > size:
        raise _broken(path, f"it is truncated: tensor {name} ends at byte {data + end}, the file at {size}")
    return tensor


def _broken(path: Path, why: str) -> StoreCorruptError:
    return StoreCorruptError(f"{path} cannot be read as safetensors: {why}. Download or copy it again")


def find_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a file, of a directory with an index, or of all files of a directory.

    FileNotFoundError for what is not there, StoreCorruptError for what is damaged or given twice.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no safetensors file or directory {path}; check the path")
    placed: dict[str, str] = {}
    files = [path]
    index = path / INDEX
    if path.is_dir():
        if (path / SINGLE).is_file():
            files = [path / SINGLE]
        elif index.is_file():
            placed = _index(index)
            files = [path / name for name in sorted(set(placed.values()))]
            for file in files:
                if not file.is_file():
                    lost = next(name for name, there in placed.items() if path / there == file)
                    raise FileNotFoundError(f"{file}, in which {index.name} places {lost}, is missing; copy all shards")
        else:
            files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"{path} holds no .safetensors files{_others(path)}; save the model with "
                "save_pretrained(safe_serialization=True)"
            )
    found: dict[str, Stored] = {}
    for file in files:
        for name, tensor in read_safetensors(file)[0].items():
            if name in found:
                raise StoreCorruptError(
                    f"{name} is in {found[name].file} and in {file}: they are of two checkpoints; keep one of them"
                )
            found[name] = tensor
    absent = sorted(placed.keys() - found.keys())
    if absent:
        raise StoreCorruptError(
            f"{path / placed[absent[0]]} does not hold {absent[0]}, which {index.name} places there; copy both again"
        )
    return found


def _index(index: Path) -> dict[str, str]:
    try:
        placed = json.loads(index.read_text())["weight_map"]
        if not placed or not all(isinstance(name, str) for pair in placed.items() for name in pair):
            raise ValueError("its weight_map names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreCorruptError(f"{index} is not a safetensors index ({error}); copy it again") from error
    for name in placed.values():
        if "/" in name or name in ("", ".", ".."):
            raise StoreCorruptError(f"{index} names {name!r}, which is no file beside it; copy it again")
    return dict(placed)


def _others(path: Path) -> str:
    names = [entry.name for pattern in ("*.bin", "*.pt", "*.pth") for entry in path.glob(pattern)]
    return f" (only {names[0]} and the like, which are pickles)" if names else ""
