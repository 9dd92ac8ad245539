"""Safetensors in and out, one tensor at a time.

The writer is our own because the library's takes all tensors of a file at once, which is what a model larger than
memory does not have. Format: 8 bytes header length (little endian), a JSON header {name: {dtype, shape, data_offsets}},
the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tierzero.errors import StoreCorruptError, TierzeroError
from tierzero.paged import Paged

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def load_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Fill an offloaded model from a .safetensors file, or from a directory of them with or without an index, one
    tensor at a time.

    Names must match the model's state dict, except that names of one shared parameter may be missing as long as one is
    there. Raises TierzeroError for missing, unexpected or wrongly shaped tensors (before anything is written) and
    StoreCorruptError for an unreadable file.
    """
    files = _files(Path(path))
    wanted = _targets(model)
    found: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as source:
                for name in source.keys():  # noqa: SIM118, not a dict
                    found[name] = file
                    if name in wanted and tuple(source.get_slice(name).get_shape()) != tuple(wanted[name].shape):
                        raise TierzeroError(
                            f"{name} has shape {tuple(source.get_slice(name).get_shape())} in {file} and "
                            f"{tuple(wanted[name].shape)} in the model: "
                            "use the config that belongs to these weights"
                        )
        except (SafetensorError, OSError) as error:
            raise StoreCorruptError(
                f"{file} cannot be read as safetensors ({error}); download or copy it again"
            ) from error
    given = {id(wanted[name]) for name in found if name in wanted}
    missing = sorted(name for name, tensor in wanted.items() if id(tensor) not in given)
    unexpected = sorted(name for name in found if name not in wanted)
    if missing or unexpected:
        raise TierzeroError(
            f"{path} does not fit the model: "
            + "; ".join(
                f"{what} {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"
                for what, names in (("missing", missing), ("unexpected", unexpected))
                if names
            )
        )
    done: set[int] = set()
    for name, file in found.items():
        if id(wanted[name]) in done:
            continue
        done.add(id(wanted[name]))
        # opened anew for each tensor: the mapping of a whole file would count as memory in use
        with safe_open(file, framework="pt") as source, torch.no_grad():
            wanted[name].copy_(source.get_tensor(name))


def export_safetensors(model: nn.Module, path: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> Path:
    """Write the model's state dict to the file `path`, which then loads strictly into the plain model. One tensor is in
    memory at a time.

    Written beside and renamed, so that a file of that name is always whole. Returns the path.
    """
    target = Path(path)
    tensors = dict(_state(model))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise TierzeroError(f"{name} is {tensor.dtype}, which safetensors export does not know; convert it first")
        nbytes = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as out:
            out.write(len(raw).to_bytes(8, "little"))
            out.write(raw)
            for tensor in tensors.values():
                value = tensor.read() if isinstance(tensor, Paged) else tensor.detach().cpu()
                if value.numel():
                    out.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(_state(model))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no safetensors file or directory {path}; check the path")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise StoreCorruptError(f"{index} is not a safetensors index ({error}); copy it again") from error
        files = [path / name for name in names]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(f"{file}, which {index.name} names, is missing; copy all shards")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{path} holds no .safetensors files; save the model with save_pretrained(safe_serialization=True)"
        )
    return files
