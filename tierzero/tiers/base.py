"""What every block file can do, and the few helpers that all of them share."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from tierzero.errors import StoreError
from tierzero.units.layout import PAGE

T = TypeVar("T")


class BlockFile(Protocol):
    """One file read and written in runs of bytes.

    All lengths and offsets are bytes; tensors are contiguous uint8[n] on the CPU.

    An operation moves all n bytes or raises ``OSError(errno, sentence, path)``; operations may run concurrently. A
    cancelled operation ends before the cancellation is seen, so that its buffer may be reused. Writes start at
    multiples of `alignment`; they may zero the file up to the next multiple behind their end.
    """

    path: str  # of the first member, where the file is striped over several
    paths: list[str]
    alignment: int
    bytes_read: int
    bytes_written: int

    @property
    def busy_ns(self) -> tuple[int, int]:
        """Nanoseconds in which at least one read, and one write, was under way."""
        ...

    async def read(self, offset: int, out: torch.Tensor) -> None:
        """Fill `out` from `offset` on. EIO if the file ends before."""
        ...

    async def write(self, offset: int, data: torch.Tensor) -> None:
        """Write `data` at `offset`, a multiple of `alignment`."""
        ...

    def size(self) -> int:
        """Bytes of the file."""
        ...

    def truncate(self, nbytes: int) -> None:
        """Make the file `nbytes` long, which is shorter than it was or as long."""
        ...

    def preallocate(self, nbytes: int) -> None:
        """Make the file at least `nbytes` long with its blocks allocated; ENOSPC if the drive cannot."""
        ...

    async def sync(self) -> None:
        """Return once everything written is durable."""
        ...

    def close(self) -> None:
        """Give up the file; harmless when closed."""
        ...


def check_buffer(tensor: torch.Tensor) -> int:
    """The length of `tensor`, a contiguous uint8[n] on the CPU; ValueError otherwise."""
    if (
        tensor.dtype is not torch.uint8
        or tensor.dim() != 1
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            "file I/O needs a contiguous one-dimensional uint8 tensor on the CPU, not "
            f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: "
            "use tensor.contiguous().view(-1).view(torch.uint8)"
        )
    return tensor.numel()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own bytes, writable, keeping it alive. Not `.numpy()`, which makes the storage non-resizable."""
    nbytes = check_buffer(tensor)
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def aligned_empty(nbytes: int) -> torch.Tensor:
    """Uninitialised uint8[nbytes] whose address is a multiple of 4096, so that direct I/O needs no bounce buffer."""
    whole = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    return whole[start : start + nbytes]


async def settle(future: asyncio.Future[T]) -> T:
    """The result of `future`.

    When cancelled, waits for it all the same and then raises CancelledError: I/O under way still uses its buffer.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break  # raised again below
    if cancelled is not None and not future.cancelled():
        future.exception()  # seen: the cancellation goes first
        raise cancelled
    return future.result()


def open_block_file(
    path: str | Sequence[str],
    engine: Any = None,
    *,
    weights: Sequence[int] | None = None,
    stripe: int = 0,
    limit: int = 0,
) -> BlockFile:
    """Open or create `path`: through `engine` (a NativeEngine) when given, else through the portable tier.

    Several paths are one file striped over them; StoreError without an engine, which alone can do that. `limit` is the
    portable tier's, in bytes per second; an engine has its own.
    """
    if engine is not None:
        from tierzero.tiers.nvme import NativeFile

        return NativeFile(path, engine, weights=weights, stripe=stripe)
    from tierzero.tiers.portable import PortableFile

    if not isinstance(path, str):
        raise StoreError(
            f"the store cannot be striped over {len(path)} directories without the native extension: give one "
            "directory, or reinstall with a compiler"
        )
    return PortableFile(path, limit)
