"""Records: the bytes of one unit of one kind, in host memory or in the store, behind one pair of reads and writes."""

from __future__ import annotations

from typing import Protocol

import torch

from tierzero.layout import state_pieces
from tierzero.metrics import Metrics
from tierzero.store import Store


class Record(Protocol):
    """`nbytes` bytes somewhere. Offsets and lengths are bytes; tensors are one-dimensional uint8 on the host."""

    nbytes: int
    on_disk: bool

    async def read(self, offset: int, out: torch.Tensor) -> None: ...

    async def write(self, offset: int, data: torch.Tensor) -> None: ...


class HostRecord:
    """A record in host memory: `data` is uint8[nbytes] in the host arena.

    `version` counts the changes: whoever changes `data` itself adds one.
    """

    on_disk = False

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.nbytes = data.numel()
        self.version = 0

    async def read(self, offset: int, out: torch.Tensor) -> None:
        out.copy_(self.data[offset : offset + out.numel()])

    async def write(self, offset: int, data: torch.Tensor) -> None:
        self.version += 1
        self.data[offset : offset + data.numel()].copy_(data)


class DiskRecord:
    """A record in the copy-on-write store, under its name there."""

    on_disk = True

    def __init__(self, store: Store, name: str, nbytes: int, metrics: Metrics) -> None:
        self.store = store
        self.name = name
        self.nbytes = nbytes
        self.metrics = metrics

    async def read(self, offset: int, out: torch.Tensor) -> None:
        self.metrics.add("nvme_read_expected", out.numel())
        await self.store.read(self.name, offset, out)

    async def write(self, offset: int, data: torch.Tensor) -> None:
        self.metrics.add("nvme_written_expected", data.numel())
        await self.store.write(self.name, offset, data)


class StateRecord:
    """master, exp_avg and exp_avg_sq of one unit, chunked as layout's Note [unit layout] says, over a Record."""

    MASTER, EXP_AVG, EXP_AVG_SQ = 0, 1, 2

    def __init__(self, record: HostRecord | DiskRecord, elements: int, chunk: int) -> None:
        self.record = record
        self.elements = elements
        self.chunk = chunk

    @property
    def on_disk(self) -> bool:
        return self.record.on_disk

    async def read(self, part: int, first: int, out: torch.Tensor) -> None:
        """Fill `out` (float32[n]) with elements [first, first + n) of `part`."""
        data = out.view(torch.uint8)
        for piece in state_pieces(self.elements, self.chunk, part, first, first + out.numel()):
            at = 4 * (piece.elem - first)
            await self.record.read(piece.offset, data[at : at + 4 * piece.count])

    async def write(self, part: int, first: int, data: torch.Tensor) -> None:
        """Write `data` (float32[n]) to elements [first, first + n) of `part`."""
        raw = data.contiguous().view(torch.uint8)
        for piece in state_pieces(self.elements, self.chunk, part, first, first + data.numel()):
            at = 4 * (piece.elem - first)
            await self.record.write(piece.offset, raw[at : at + 4 * piece.count])
