"""Writes the data file of a checkpoint: direct I/O where there is a native engine, a few buffers, checksums in passing.

Note [sections]
All sizes are known before the first byte is read, so every item has its place in the file from the start. What is read
together (a unit) is one section that begins at a whole page; sections may be written in any order. Items of 64 KiB or
more have their elements at a whole page too, so that they are read from the drive straight into the buffer that is
written. All that goes into one buffer is read at once, and some buffers are filled and written at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tierzero.checkpoint.boxes import boxes
from tierzero.checkpoint.container import frame
from tierzero.checkpoint.contents import Readable
from tierzero.checkpoint.index import Piece, StoredObject, StoredTensor
from tierzero.storage.blocks import checksum_of
from tierzero.storage.checksum import Sums, checksum, combine, to_hex
from tierzero.tiers.base import BlockFile, aligned_empty, memory_of
from tierzero.units.layout import PAGE, round_up

BUFFER = 4 << 20  # bytes
BUFFERS = 4
MOST = 1 << 30  # bytes of a piece of a tensor, which is what stock readers hold in memory at a time


@dataclass
class Item:
    """One item in the file: a piece of a tensor, or an object's bytes, which are its `head` then."""

    start: int
    head: bytes
    tail: bytes = b""
    source: Readable | None = None
    piece: Piece | None = None
    stored: StoredObject | None = None


@dataclass
class Section:
    """Items one after the other; bytes [start, end) of the file, end a whole page."""

    start: int
    end: int = 0
    items: list[Item] = field(default_factory=list)


def lay_out(
    start: int, objects: dict[str, bytes], tensors: dict[str, Readable]
) -> tuple[Section, dict[str, StoredObject], dict[str, StoredTensor]]:
    """A section from byte `start` on, and what its items are in the index."""
    section, at = Section(start), start
    kept: dict[str, StoredObject] = {}
    stored: dict[str, StoredTensor] = {}
    for key, raw in objects.items():
        kept[key] = StoredObject(at, len(raw))
        section.items.append(Item(at, raw, stored=kept[key]))
        at += len(raw)
    for key, source in tensors.items():
        found = stored[key] = StoredTensor(source.dtype, source.shape, [])
        for box in boxes(source.shape, MOST // source.dtype.itemsize):
            head, tail = frame(source.dtype, box.sizes, at)
            nbytes = box.numel * source.dtype.itemsize
            length = len(head) + nbytes + len(tail)
            piece = Piece(box.offsets, box.sizes, box.first, at, length, at + len(head), nbytes)
            found.pieces.append(piece)
            section.items.append(Item(at, head, tail, source, piece))
            at += length
    section.end = round_up(at, PAGE)
    return section, kept, stored


@dataclass
class _Read:
    """Bytes [done, done + nbytes) of a piece go to `to` of the buffer."""

    item: Item
    done: int
    to: int
    nbytes: int


@dataclass
class _Load:
    """What one buffer is filled with, `used` bytes for byte `at` of the file."""

    at: int
    used: int = 0
    copies: list[tuple[int, bytes | memoryview]] = field(default_factory=list)
    reads: list[_Read] = field(default_factory=list)


def loads(section: Section) -> Iterator[_Load]:
    """The section cut into buffers. Elements begin at multiples of 64 bytes, as a buffer ends at one, so each holds
    whole ones.
    """
    load = _Load(section.start)
    for item in section.items:
        size = item.piece.nbytes if item.piece is not None else 0
        for part in (memoryview(item.head), size, memoryview(item.tail)):
            length, done = part if isinstance(part, int) else len(part), 0
            while done < length:
                if load.used == BUFFER:
                    yield load
                    load = _Load(load.at + BUFFER)
                count = min(length - done, BUFFER - load.used)
                if isinstance(part, int):
                    load.reads.append(_Read(item, done, load.used, count))
                else:
                    load.copies.append((load.used, part[done : done + count]))
                load.used, done = load.used + count, done + count
    if load.used:
        yield load


class Writer:
    """Writes sections to `file`: some buffers are filled while others are written. Runs on one loop; whoever gives up
    calls `abandon`.
    """

    def __init__(
        self,
        file: BlockFile,
        hurry: Callable[[], bool] = lambda: True,
        rest: Callable[[float, float, int], Awaitable[None]] | None = None,
    ) -> None:
        """`hurry()`: whether somebody waits. Else one buffer is under way at a time, and `rest` is awaited after each
        with the seconds of reading and of writing and the bytes, in sections that are not urgent: training has the
        drive.
        """
        self.file = file
        self.hurry = hurry
        self.written = 0  # bytes
        self.rest = rest
        self._free: asyncio.Queue[torch.Tensor] = asyncio.Queue()
        for _ in range(BUFFERS):
            self._free.put_nowait(aligned_empty(BUFFER))
        self._filling: set[asyncio.Task[None]] = set()
        self._writing: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    async def write(self, section: Section, *, urgent: bool = True) -> None:
        """Return when all items of the section have been read and their checksums are known; writes may still be under
        way. Several sections may be written at a time.
        """
        sums: dict[int, Sums] = {}
        for item in section.items:
            if item.stored is not None:
                item.stored.sums = to_hex(await checksum_of(torch.frombuffer(bytearray(item.head), dtype=torch.uint8)))
        mine = []
        for load in loads(section):
            began = time.monotonic()
            buffer = await self._free.get()
            mine.append(self._begin(self._fill(load, buffer, sums), self._filling))
            if not self.hurry():
                await asyncio.wait(mine[-1:])
                read = time.monotonic()
                if self._writing:
                    await asyncio.wait(self._writing)
                if self.rest is not None and not urgent and load.used:
                    await self.rest(read - began, time.monotonic() - read, load.used)
        if mine:
            await asyncio.wait(mine)
        self._check()
        for item in section.items:
            if item.piece is not None:
                item.piece.sums = to_hex(sums.get(id(item.piece), (0, 0)))

    def _begin(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        among.add(task)
        task.add_done_callback(among.discard)
        return task

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _fill(self, load: _Load, buffer: torch.Tensor, sums: dict[int, Sums]) -> None:
        try:
            self._check()
            memory = memory_of(buffer)
            for to, data in load.copies:
                memory[to : to + len(data)] = data
            end = round_up(load.used, PAGE)
            buffer[load.used : end].zero_()
            reads = [asyncio.ensure_future(_read(read, buffer)) for read in load.reads]
            if reads:
                await asyncio.wait(reads)
                for error in [one.exception() for one in reads]:
                    if error is not None:
                        raise error
                for piece, found in await asyncio.to_thread(_sums, load.reads, buffer):
                    sums[piece] = combine(sums.get(piece, (0, 0)), found)
        except BaseException as error:
            self._gives_up(error, buffer)
            return
        self._begin(self._write(load.at, buffer, end), self._writing)

    async def _write(self, at: int, buffer: torch.Tensor, end: int) -> None:
        try:
            await self.file.write(at, buffer[:end])
        except BaseException as error:
            self._gives_up(error, buffer)
            return
        self.written += end
        self._free.put_nowait(buffer)

    def _gives_up(self, error: BaseException, buffer: torch.Tensor) -> None:
        """The first error is the one that is told; nobody waits for this buffer in vain."""
        self._error = self._error or error
        self._free.put_nowait(buffer)

    def cancel(self, error: BaseException) -> None:
        """Begin no buffer any more: whoever writes or finishes gets `error`."""
        self._error = self._error or error

    async def finish(self) -> None:
        """Return when everything is written."""
        await self.abandon()
        self._check()

    async def abandon(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        while self._filling or self._writing:
            await asyncio.wait([*self._filling, *self._writing])


async def _read(read: _Read, buffer: torch.Tensor) -> None:
    source, piece = read.item.source, read.item.piece
    assert source is not None
    assert piece is not None
    out = buffer[read.to : read.to + read.nbytes].view(source.dtype)
    await source.read(piece.first + read.done // source.dtype.itemsize, out)


def _sums(reads: list[_Read], buffer: torch.Tensor) -> list[tuple[int, Sums]]:
    return [(id(read.item.piece), checksum(buffer[read.to : read.to + read.nbytes], read.done // 4)) for read in reads]
