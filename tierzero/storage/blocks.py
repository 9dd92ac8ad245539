"""Whole records on a block file, a few MiB at a time: copying, changing a part, checksums."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import torch

from tierzero.paging.malloc import mapped
from tierzero.storage.checksum import Sums, checksum, combine
from tierzero.storage.extents import Extent
from tierzero.tiers.base import BlockFile, aligned_empty, settle
from tierzero.units.layout import PAGE

BLOCK = 8 << 20  # bytes at a time
WINDOW = 4  # parts of a record that are made and written at a time
_SMALL = 1 << 18  # bytes whose checksum is not worth a thread


async def checksum_of(data: torch.Tensor, word_offset: int = 0) -> Sums:
    """The checksum of uint8[n], computed off the loop's thread where it takes long."""
    if data.numel() < _SMALL:
        return checksum(data, word_offset)
    return await settle(asyncio.ensure_future(asyncio.to_thread(checksum, data, word_offset)))


async def checksum_on_drive(file: BlockFile, extent: Extent) -> Sums:
    """The checksum of the bytes that `extent` holds on the drive; one block is read while another is summed."""
    total: Sums = (0, 0)
    starts = range(0, extent.nbytes, BLOCK)
    with mapped():  # in the heap of the loop's thread they would stay
        buffers = [aligned_empty(min(BLOCK, extent.nbytes)) for _ in starts[:2]]

    def begin(index: int) -> tuple[torch.Tensor, asyncio.Future[None]]:
        part = buffers[index % 2][: min(BLOCK, extent.nbytes - starts[index])]
        return part, asyncio.ensure_future(file.read(extent.offset + starts[index], part))

    ahead = begin(0) if starts else None
    try:
        for index, start in enumerate(starts):
            assert ahead is not None
            part, reading = ahead
            await reading
            ahead = begin(index + 1) if index + 1 < len(starts) else None
            total = combine(total, await checksum_of(part, start // 4))
    finally:
        if ahead is not None:
            await asyncio.wait([ahead[1]])  # it may still be filling its buffer
            _ = ahead[1].cancelled() or ahead[1].exception()  # seen: an error before it goes first
    return total


async def in_window(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """`work(0)` to `work(count - 1)`, begun in this order, WINDOW of them at a time. The first error is raised once
    none goes on any more.
    """
    going: deque[asyncio.Future[None]] = deque()
    try:
        for number in range(count):
            if len(going) == WINDOW:
                await settle(going.popleft())
            going.append(asyncio.ensure_future(work(number)))
        while going:
            await settle(going.popleft())
    except BaseException:
        if going:
            await asyncio.wait(going)
            _ = [one.cancelled() or one.exception() for one in going]  # seen: the error before them goes first
        raise


async def fill_extent(
    file: BlockFile, extent: Extent, cuts: Sequence[int], make: Callable[[int], Awaitable[torch.Tensor]]
) -> Sums:
    """Write all of `extent`, from the bytes `cuts[i]` (whole pages) on what `make(i)` gives, uint8[n]; the checksum of
    the whole. It is called in order, and its memory may serve again WINDOW calls later.
    """
    total: Sums = (0, 0)

    async def one(number: int) -> None:
        nonlocal total
        data = await make(number)
        writing = asyncio.ensure_future(file.write(extent.offset + cuts[number], data))
        try:
            total = combine(total, await checksum_of(data, cuts[number] // 4))
        finally:
            await settle(writing)

    await in_window(len(cuts), one)
    return total


async def copy_extent(file: BlockFile, source: Extent, target: Extent) -> None:
    """Copy all bytes of `source` to `target`, of the same size."""
    buffer = aligned_empty(min(BLOCK, source.nbytes))
    for at in range(0, source.nbytes, BLOCK):
        part = buffer[: min(BLOCK, source.nbytes - at)]
        await file.read(source.offset + at, part)
        await file.write(target.offset + at, part)


async def patch_extent(file: BlockFile, extent: Extent, offset: int, data: torch.Tensor) -> None:
    """Write `data` (uint8[n]) at `offset` inside `extent`.

    A block at either end of which only a part changes is read first.
    """
    step = file.alignment
    end = offset + data.numel()
    head = min(-offset % step, data.numel())
    tail = end % step if end < extent.nbytes and end - end % step >= offset + head else 0
    for at, piece in ((offset, data[:head]), (end - tail, data[data.numel() - tail :])):
        if piece.numel():
            start = at // step * step
            page = aligned_empty(PAGE)[: min(step, extent.nbytes - start)]
            await file.read(extent.offset + start, page)
            page[at - start : at - start + piece.numel()].copy_(piece)
            await file.write(extent.offset + start, page)
    if head + tail < data.numel():
        await file.write(extent.offset + offset + head, data[head : data.numel() - tail])
