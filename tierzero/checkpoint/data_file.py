"""Writes the data file of a checkpoint: direct I/O where there is a native engine, a few buffers, checksums in passing.

Note [sections]
All sizes are known before the first byte is read, so every item has its place in the file from the start. What is read
together (a unit) is one section that begins at a whole page; sections may be written in any order. Items of 64 KiB or
more have their elements at a whole page too, so that they are read from the drive straight into the buffer that is
written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tierzero.blocks import checksum_of
from tierzero.checkpoint.boxes import boxes
from tierzero.checkpoint.container import frame
from tierzero.checkpoint.contents import Readable
from tierzero.checkpoint.index import Piece, StoredObject, StoredTensor
from tierzero.checksum import Sums, combine, to_hex
from tierzero.layout import PAGE, round_up
from tierzero.tiers.base import BlockFile, aligned_empty

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


class Writer:
    """Writes sections to `file`. Runs on one loop; `close` waits for what is under way."""

    def __init__(self, file: BlockFile) -> None:
        self.file = file
        self.written = 0
        self._free = deque(aligned_empty(BUFFER) for _ in range(BUFFERS))
        self._writing: deque[tuple[asyncio.Task[None], torch.Tensor]] = deque()
        self._buffer: torch.Tensor | None = None
        self._at = 0  # where the buffer goes
        self._used = 0

    async def write(self, section: Section) -> None:
        """Read all items of the section and write them; the last writes may still be under way."""
        self._at, self._used = section.start, 0
        for item in section.items:
            await self._put(item.head)
            if item.stored is not None:
                item.stored.sums = to_hex(await checksum_of(torch.frombuffer(bytearray(item.head), dtype=torch.uint8)))
            if item.source is not None and item.piece is not None:
                item.piece.sums = to_hex(await self._copy(item.source, item.piece))
            await self._put(item.tail)
        await self._flush()

    async def _copy(self, source: Readable, piece: Piece) -> Sums:
        """The elements of one piece, and their checksum."""
        size, done = source.dtype.itemsize, 0
        sums: Sums = (0, 0)
        while done < piece.nbytes:
            room = (await self._room())[: piece.nbytes - done]
            await source.read(piece.first + done // size, room.view(source.dtype))
            sums = combine(sums, await checksum_of(room, done // 4))
            done += room.numel()
            self._used += room.numel()
            await asyncio.sleep(0)  # a source in memory does not let anybody else run
        return sums

    async def _put(self, data: bytes) -> None:
        view, done = memoryview(bytearray(data)), 0
        while done < len(data):
            room = (await self._room())[: len(data) - done]
            room.copy_(torch.frombuffer(view[done : done + room.numel()], dtype=torch.uint8))
            done += room.numel()
            self._used += room.numel()

    async def _room(self) -> torch.Tensor:
        """What is left of the buffer, at least a byte. Elements begin at multiples of 64 bytes, as the buffer ends at
        one, so it holds whole ones.
        """
        if self._used == BUFFER:
            await self._flush()
        if self._buffer is None:
            if not self._free:
                await self._reap()
            self._buffer = self._free.popleft()
        return self._buffer[self._used :]

    async def _flush(self) -> None:
        if self._buffer is None:
            return
        buffer, self._buffer = self._buffer, None
        end = round_up(self._used, PAGE)
        buffer[self._used : end].zero_()
        self._writing.append((asyncio.ensure_future(self.file.write(self._at, buffer[:end])), buffer))
        self.written += end
        self._at, self._used = self._at + end, 0

    async def _reap(self) -> None:
        task, buffer = self._writing.popleft()
        try:
            await task
        finally:
            self._free.append(buffer)

    async def finish(self) -> None:
        """Return when everything is written."""
        while self._writing:
            await self._reap()

    async def abandon(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        pending: Iterable[asyncio.Task[None]] = [task for task, _ in self._writing]
        if pending:
            await asyncio.wait(pending)
            for task in pending:
                _ = task.cancelled() or task.exception()  # seen
        self._writing.clear()
