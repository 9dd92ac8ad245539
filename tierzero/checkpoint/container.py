"""The file format of torch.save for one tensor, around bytes that are written apart from it.

Note [items]
A data file of torch.distributed.checkpoint holds one item after the other, and each is what torch.save writes: a zip
archive, stored and not compressed, with the pickled description of the tensor, a few small records and the bytes. All
but the bytes follows from dtype and shape, so the bytes can be streamed between a `head` and a `tail`. The archive's
CRC-32 fields are zero, as with torch.serialization.set_crc32_options(False): nothing in torch reads them, and computing
them takes longer than writing to a fast drive. Checksums lie in the index instead (index.py).
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch

from tierzero.units.layout import PAGE, round_up

ALIGN = 64  # bytes: where the data of a small item begin, as in torch.save
LARGE = 64 << 10  # bytes from which on an item's data begin at a whole page of the file, for direct I/O
_ROOT = "archive"
_STORAGES = {  # what torch.save calls the storages of the dtypes that have one of their own
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}


class _Bytes:
    """Stands for the storage of the tensor that is pickled."""

    def __init__(self, kind: Any, count: int) -> None:
        self.kind = kind
        self.count = count


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, "0", "cpu", obj.count) if isinstance(obj, _Bytes) else None


@functools.lru_cache(256)
def _description(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The pickle of a contiguous tensor, as torch makes it for this dtype."""
    rebuild, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    storage, numel = arguments[0], 1
    strides = []
    for size in reversed(shape):
        strides.append(numel)
        numel *= size
    if isinstance(storage, torch.UntypedStorage):
        place = _Bytes(torch.UntypedStorage, numel * dtype.itemsize)
    else:
        place = _Bytes(getattr(torch, _STORAGES[dtype]), numel)
    strides = [max(stride, 1) for stride in reversed(strides)]
    out = io.BytesIO()
    _Pickler(out, 2).dump(_Tensor(rebuild, (place, 0, tuple(shape), tuple(strides), *arguments[4:])))
    return out.getvalue()


class _Tensor:
    """Pickles as the call that rebuilds a tensor."""

    def __init__(self, rebuild: Any, arguments: tuple[Any, ...]) -> None:
        self.call = rebuild, arguments

    def __reduce__(self) -> Any:
        return self.call


def _local(name: bytes, nbytes: int, padding: int) -> bytes:
    """The header of one record, `padding` bytes longer than it need be (0, or 4 and more)."""
    extra = struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4) if padding else b""
    return struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0, 0, 0, 0, 0, nbytes, nbytes, len(name), len(extra)) + name + extra


def frame(dtype: torch.dtype, shape: Sequence[int], start: int) -> tuple[bytes, bytes]:
    """(head, tail) of a contiguous tensor whose item starts at byte `start` of its file. Less than 4 GiB of data."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    small = [
        ("data.pkl", _description(dtype, tuple(shape))),
        ("byteorder", sys.byteorder.encode()),
        ("version", b"3\n"),
        (".data/serialization_id", b"0" * 40),
    ]
    head, central = b"", b""
    count = len(small) + 1
    for name, data in small:
        path = f"{_ROOT}/{name}".encode()
        central += _central(path, len(data), len(head))
        head += _local(path, len(data), 0) + data
    path = f"{_ROOT}/data/0".encode()
    central += _central(path, nbytes, len(head))
    bare = start + len(head) + len(_local(path, nbytes, 0))
    padding = round_up(bare, PAGE if nbytes >= LARGE else ALIGN) - bare
    head += _local(path, nbytes, padding + PAGE if 0 < padding < 4 and nbytes >= LARGE else _legal(padding))
    at = len(head) + nbytes
    tail = central + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(central), at, 0)
    return head, tail


def _legal(padding: int) -> int:
    return padding + ALIGN if 0 < padding < 4 else padding


def _central(name: bytes, nbytes: int, offset: int) -> bytes:
    return (
        struct.pack("<4s6H3I5H2I", b"PK\1\2", 0, 0, 0, 0, 0, 0, 0, nbytes, nbytes, len(name), 0, 0, 0, 0, 0, offset)
        + name
    )
