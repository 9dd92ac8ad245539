"""Records: the bytes of one unit of one kind, in host memory or in the store, behind one pair of reads and writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol

import torch

from tierzero.errors import TierzeroError
from tierzero.monitoring.metrics import Metrics
from tierzero.native import NATIVE
from tierzero.storage.checksum import Sums
from tierzero.storage.extents import Extent
from tierzero.storage.store import Store
from tierzero.units.layout import StatePiece, state_pieces
from tierzero.units.state_format import PLAIN, StateFormat


class Record(Protocol):
    """`nbytes` bytes somewhere. Offsets and lengths are bytes; tensors are one-dimensional uint8 on the host."""

    nbytes: int
    on_disk: bool

    async def read(self, offset: int, out: torch.Tensor) -> None: ...

    async def write(self, offset: int, data: torch.Tensor) -> None: ...


class HostRecord:
    """A record in host memory: `data` is uint8[nbytes] in the host arena.

    `version` counts the changes: whoever changes `data` itself adds one. `origin` is (version, the Borrowed bytes that
    they were then), None if they came from no file.
    """

    on_disk = False

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.nbytes = data.numel()
        self.version = 0
        self.origin: tuple[int, Any] | None = None

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

    def replace(self, extent: Extent, sums: Sums) -> None:
        """Make a new version of it, which is written, the current one."""
        self.store.publish(self.name, extent, sums)


class StateRecord:
    """master, exp_avg, exp_avg_sq and perhaps max_exp_avg_sq of one unit, chunked as layout's Note [unit layout] says,
    over a Record. All are float32 to the caller; what the format keeps in fewer bits is rounded to nearest.

    `params`: with a split master the record of the unit's bfloat16 parameters, which is written with it. `untouched`:
    the version of a record in host memory that is as it was made, masters from the parameters and moments zero.
    """

    MASTER, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = 0, 1, 2, 3

    def __init__(
        self,
        record: HostRecord | DiskRecord,
        elements: int,
        chunk: int,
        format: StateFormat = PLAIN,
        params: HostRecord | DiskRecord | None = None,
    ) -> None:
        self.record = record
        self.elements = elements
        self.chunk = chunk
        self.format = format
        self.params = params
        self.untouched: int | None = None
        self._turn = asyncio.Lock()  # of whoever changes part of a chunk

    @property
    def on_disk(self) -> bool:
        return self.record.on_disk

    async def read(self, part: int, first: int, out: torch.Tensor) -> None:
        """Fill `out` (float32[n]) with elements [first, first + n) of `part`."""
        if not self._apart(part):
            for start, last in self._chunks(first, first + out.numel()):
                low = max(first, start)
                out[low - first : last - first].copy_((await self.planes(start))[part][low - start : last - start])
            return
        data = out.view(torch.uint8)
        reads = []
        for piece in self.pieces(part, first, first + out.numel()):
            at = 4 * (piece.elem - first)
            reads.append(self.record.read(piece.offset, data[at : at + 4 * piece.count]))
        if len(reads) == 1 or not self.on_disk:
            for read in reads:
                await read
        else:  # at once, and none goes on after an error
            for error in await asyncio.gather(*reads, return_exceptions=True):
                if error is not None:
                    raise error

    async def write(self, part: int, first: int, data: torch.Tensor) -> None:
        """Write `data` (float32[n]) to elements [first, first + n) of `part`."""
        if not self._apart(part):
            async with self._turn:
                for start, last in self._chunks(first, first + data.numel()):
                    await self._change(part, start, max(first, start), data[max(first, start) - first : last - first])
            return
        raw = data.contiguous().view(torch.uint8)
        for piece in self.pieces(part, first, first + data.numel()):
            at = 4 * (piece.elem - first)
            await self.record.write(piece.offset, raw[at : at + 4 * piece.count])

    async def _change(self, part: int, start: int, first: int, data: torch.Tensor) -> None:
        """Write `data` from element `first` on, all of it in the chunk that begins with element `start`."""
        planes = await self.planes(start)
        planes[part][first - start : first - start + data.numel()].copy_(data)
        raw, params = pack(self.format, self.chunk, planes)
        await self.record.write(self._offset(start), raw)
        if self.params is not None and params is not None:
            await self.params.write(2 * start, params.view(torch.uint8))

    async def planes(self, start: int) -> list[torch.Tensor]:
        """All parts of the chunk that begins with element `start`."""
        count = min(self.chunk, self.elements - start)
        raw = torch.empty(self.format.chunk_bytes(count), dtype=torch.uint8)
        await self.record.read(self._offset(start), raw)
        if self.format.plain:
            return list(raw.view(torch.float32).view(self.format.parts, count))
        params = None
        if self.params is not None:
            params = torch.empty(count, dtype=torch.bfloat16)
            await self.params.read(2 * start, params.view(torch.uint8))
        planes = [torch.empty(count) for _ in range(self.format.parts)]
        largest = planes[3] if self.format.amsgrad else None
        _native().unpack_state(self.format.native, self.chunk, raw, *planes[:3], largest, params)
        return planes

    def _apart(self, part: int) -> bool:
        """Whether `part` of a chunk is a run of float32 values."""
        return self.format.plain or (part == self.MASTER and self.format.master == "f32")

    def _offset(self, start: int) -> int:
        return start // self.chunk * self.format.chunk_bytes(self.chunk)

    def pieces(self, part: int, first: int, last: int) -> Iterator[StatePiece]:
        """The runs that hold elements [first, last) of a part that is float32 in its chunks."""
        return state_pieces(self.elements, self.chunk, part, first, last, self.format.chunk_bytes(self.chunk))

    def _chunks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """(first element of the chunk, end of what is wanted of it) for elements [first, last)."""
        for start in range(first // self.chunk * self.chunk, last, self.chunk):
            yield start, min(last, start + self.chunk)


def pack(format: StateFormat, chunk: int, planes: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One chunk's bytes from its float32 parts, and with a split master the bfloat16 parameters that go with them."""
    if format.plain:
        return _joined(planes).view(torch.uint8), None
    count = planes[0].numel()
    raw = torch.empty(format.chunk_bytes(count), dtype=torch.uint8)
    params = torch.empty(count, dtype=torch.bfloat16) if format.master == "split" else None
    _native().pack_state(format.native, chunk, raw, *planes[:3], planes[3] if format.amsgrad else None, params)
    return raw, params


def _joined(planes: list[torch.Tensor]) -> torch.Tensor:
    """All of them in one, copied only if they do not lie one behind the other as it is."""
    first = planes[0]
    at = [first.data_ptr() + number * first.nbytes for number in range(len(planes))]
    whole = all(
        plane.data_ptr() == address and plane.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for plane, address in zip(planes, at, strict=True)
    )
    return first.as_strided((len(planes) * first.numel(),), (1,)) if whole and first.numel() else torch.cat(planes)


def _native() -> ModuleType:
    if NATIVE is None:
        raise TierzeroError(
            "optimizer states with other dtypes than float32 need the native extension, which is not there: install a "
            "compiler and build it"
        )
    return NATIVE
