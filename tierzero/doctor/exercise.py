"""What the self-test does to one backend: records of odd sizes written, read and compared, then two large passes."""

from __future__ import annotations

import asyncio
import os
import random
import time
import zlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tierzero.tiers.base import BlockFile, aligned_empty, memory_of
from tierzero.units.layout import PAGE, round_up

FAR = (1 << 32) + 3 * PAGE  # past what 32 bits count
_SIZES = (1, 7, 511, 512, 513, 4095, 4096, 4097, 65_537, (1 << 20) + 3, 4 << 20, (4 << 20) + 1, (9 << 20) + 5)
_SMALL, _SMALL_BYTES = 64, 20_011  # many at once
_BLOCK = 4 << 20
_IN_FLIGHT = 8
_LARGE = 192 << 20  # bytes of each large pass, unless time or room run out
_AHEAD = 64  # bytes that addresses are moved off their boundary by, at most


class WrongBytes(Exception):
    """Something was read that was not written; the message says what and where."""


@dataclass
class Score:
    """What was done: bytes verified, requests, and bytes per second of the large passes."""

    verified: int = 0
    requests: int = 0
    write: float = 0.0
    read: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Record:
    offset: int
    data: torch.Tensor
    crc: int


def sparse_reason(folder: Path) -> str:
    """ "" where a file may have a hole of 4 GiB, else why not."""
    name = folder / "sparse"
    try:
        with open(name, "xb") as file:
            file.truncate(FAR + (64 << 20))
            return "" if os.fstat(file.fileno()).st_blocks * 512 < 1 << 20 else "holes take space here"
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with suppress(OSError):
            name.unlink()


def unaligned(nbytes: int, shift: int) -> torch.Tensor:
    """uint8[nbytes] at an address that is `shift` (1 to 63) bytes past a multiple of 64."""
    whole = torch.empty(nbytes + 2 * _AHEAD, dtype=torch.uint8)
    start = -whole.data_ptr() % _AHEAD + shift
    return whole[start : start + nbytes]


def _records(file: BlockFile, chance: random.Random, far: bool) -> list[_Record]:
    """Disjoint records of every size, near the start and, with `far`, past 4 GiB, in random memory."""
    records = []
    for base in (0, FAR) if far else (0,):
        at = base
        for nbytes in (*_SIZES, *([_SMALL_BYTES] * _SMALL if base == 0 else [])):
            data = unaligned(nbytes, chance.randrange(1, _AHEAD))
            memory_of(data)[:] = chance.randbytes(nbytes)
            records.append(_Record(at, data, zlib.crc32(memory_of(data))))
            at = round_up(at + nbytes, PAGE) + PAGE * chance.randrange(2)
    return records


def _compare(record: _Record, got: torch.Tensor, start: int, path: str) -> None:
    """WrongBytes unless `got` is what the record has from `start` on."""
    wanted = record.data[start : start + got.numel()]
    whole = start == 0 and got.numel() == record.data.numel()
    if zlib.crc32(memory_of(got)) == (record.crc if whole else zlib.crc32(memory_of(wanted))):
        return
    different = (got != wanted).nonzero()
    first = int(different[0]) if different.numel() else 0
    raise WrongBytes(
        f"{path}: a read of {got.numel()} bytes at offset {record.offset + start} differs from what was written in "
        f"{different.numel()} bytes, first at offset {record.offset + start + first}"
    )


async def verify(file: BlockFile, score: Score, *, far: bool, seed: int) -> None:
    """Two rounds over the same places, so that old bytes would be noticed; all requests of a round fly at once."""
    chance = random.Random(seed)
    for _ in range(2):
        records = _records(file, chance, far)
        await _all([file.write(record.offset, record.data) for record in records])
        await file.sync()
        reads = []
        for record in chance.sample(records, len(records)):
            size = record.data.numel()
            start = chance.randrange(size) if chance.random() < 0.5 else 0
            reads.append((record, start, unaligned(size - start, chance.randrange(1, _AHEAD))))
        await _all([file.read(record.offset + start, into) for record, start, into in reads])
        for record, start, into in reads:
            _compare(record, into, start, file.path)
            score.verified += into.numel()
        score.requests += len(records) + len(reads)


async def _all(operations: list[Coroutine[Any, Any, None]]) -> None:
    """Every operation ends before the first error is raised: their buffers live on the caller's stack."""
    results = await asyncio.gather(*operations, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def large(file: BlockFile, score: Score, *, until: float, most: int) -> None:
    """Write and read blocks in order, several always in flight, until `until` (monotonic seconds) or `most` bytes."""
    blocks = max(1, min(_LARGE, most) // _BLOCK)
    data = aligned_empty(_BLOCK)
    memory_of(data)[:] = random.Random(blocks).randbytes(_BLOCK)
    buffers = [aligned_empty(_BLOCK) for _ in range(min(_IN_FLIGHT, blocks))]

    async def write(index: int, buffer: torch.Tensor) -> None:
        await file.write(index * _BLOCK, data)

    async def read(index: int, buffer: torch.Tensor) -> None:
        await file.read(index * _BLOCK, buffer)
        if not torch.equal(buffer, data):
            raise WrongBytes(f"{file.path}: the block at offset {index * _BLOCK} came back different")

    start = time.monotonic()
    written = await _stream(write, buffers, blocks, (until + start) / 2)
    await file.sync()
    middle = time.monotonic()
    drop_cache(file.path)
    begin = time.monotonic()
    got = await _stream(read, buffers, written, until)
    score.write = written * _BLOCK / (middle - start)
    score.read = got * _BLOCK / (time.monotonic() - begin)
    score.verified += got * _BLOCK
    score.requests += written + got


async def _stream(
    step: Callable[[int, torch.Tensor], Coroutine[Any, Any, None]],
    buffers: list[torch.Tensor],
    blocks: int,
    until: float,
) -> int:
    """Each buffer is used for one block after the other; returns how many blocks were done."""
    done = 0

    async def work(buffer: torch.Tensor) -> None:
        nonlocal done
        while done < blocks and (done < len(buffers) or time.monotonic() < until):
            index, done = done, done + 1
            await step(index, buffer)

    await _all([work(buffer) for buffer in buffers])
    return done


def drop_cache(path: str) -> None:
    """Let reads of this file reach the drive."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
