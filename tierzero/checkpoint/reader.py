"""Reads a checkpoint's data file piece by piece, comparing checksums in passing."""

from __future__ import annotations

import asyncio
import io
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tierzero.checkpoint.index import DATA, Index, read_index
from tierzero.checkpoint.verify import Pass
from tierzero.errors import StoreCorruptError
from tierzero.storage.checksum import Sums, checksum, combine, to_hex
from tierzero.tiers.base import memory_of, settle
from tierzero.tiers.readonly import ReadOnlyFile

BLOCK = 4 << 20  # bytes at a time
THREADS = 4  # that read: as many requests the drive has at once


class Reader:
    """The checkpoint in `directory`. Errors as read_index; StoreCorruptError names the file and the tensor whose bytes
    are not what was written.
    """

    def __init__(self, directory: Path) -> None:
        self.index: Index = read_index(directory)
        self.path = directory / DATA
        self.file = ReadOnlyFile(self.path)
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tierzero-load")

    def close(self) -> None:
        """Give up the file. Harmless when closed."""
        self.pool.shutdown()
        self.file.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor of that key, as a new one."""
        stored = self.index.stored(key)
        assert stored is not None
        out = torch.empty(stored.shape, dtype=stored.dtype)
        parts, flat, step = Parts(self, key), out.view(-1), max(BLOCK // out.element_size(), 1)
        if flat.numel() <= step:
            parts.read(0, flat)
        else:
            for _ in self.pool.map(lambda at: parts.read(at, flat[at : at + step]), range(0, flat.numel(), step)):
                pass
        return out

    def object(self, key: str) -> Any:
        """The value of that key."""
        stored = self.index.objects[key]
        raw = torch.empty(stored.length, dtype=torch.uint8)
        self.fill(stored.start, raw, key)
        self.compare(key, stored.sums, checksum(raw), stored.start, stored.length)
        try:
            return torch.load(io.BytesIO(bytes(memory_of(raw))), weights_only=True)
        except Exception as error:  # of what torch.save has not written: many kinds, and long advice
            raise StoreCorruptError(
                f"{key} ({stored.length} bytes at {stored.start} of {self.path}) is no value that is loaded safely "
                f"({type(error).__name__}): the file is not what was written. Copy it again, or load another checkpoint"
            ) from error

    def verify(self, keys: Collection[str] | None = None, framed: Collection[str] = ()) -> Iterator[tuple[str, int]]:
        """Compare everything, or the things of `keys`, with its checksum, in the order of the file; gives (key, bytes)
        of each thing that is right. Of the tensors `framed` only what lies around their bytes.
        """
        return Pass(self, keys, framed).run()

    def fill(self, at: int, out: torch.Tensor, key: str) -> None:
        """Read the file's bytes from `at` on, which are some of `key`."""
        try:
            self.file.read(at, out)
        except OSError as error:
            raise self.unreadable(key, error) from error

    def unreadable(self, key: str, error: OSError) -> OSError:
        """The error for bytes of `key` that the drive does not give."""
        return OSError(error.errno, f"{key} cannot be read: {error.strerror}", str(self.path))

    def compare(self, key: str, expected: str, found: Sums, at: int, nbytes: int) -> None:
        """StoreCorruptError if the bytes of `key` are not those that were written."""
        if to_hex(found) != expected:
            raise self.changed(key, at, nbytes)

    def changed(self, key: str, at: int, nbytes: int) -> StoreCorruptError:
        """The error for bytes of `key` that are not those that were written."""
        return StoreCorruptError(
            f"{key} ({nbytes} bytes at {at} of {self.path}) does not match its checksum: the file is not what was "
            "written. Copy it again, or load another checkpoint"
        )


class Parts:
    """One tensor, read in parts in any order, several at a time, each element once. A piece is compared with its
    checksum when all of it was read.
    """

    def __init__(self, reader: Reader, key: str) -> None:
        stored = reader.index.stored(key)
        assert stored is not None
        self.reader = reader
        self.key = key
        self.dtype = stored.dtype
        self._pieces = [piece for piece in stored.pieces if piece.nbytes]
        self._starts = [piece.first * stored.dtype.itemsize for piece in self._pieces]
        self._found: dict[int, tuple[int, Sums]] = {}  # of pieces read in part: bytes, and their checksum
        self._lock = threading.Lock()

    def read(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` (one-dimensional, of this dtype) with the elements from `first` on."""
        raw = out.view(torch.uint8) if out.numel() else torch.empty(0, dtype=torch.uint8)
        start, at = first * self.dtype.itemsize, 0
        number = bisect_right(self._starts, start) - 1
        while at < raw.numel():
            piece, within = self._pieces[number], start + at - self._starts[number]
            part = raw[at : at + min(BLOCK, piece.nbytes - within)]
            self.reader.fill(piece.at + within, part, self.key)
            self._add(number, part.numel(), checksum(part, within // 4))
            at += part.numel()
            number += within + part.numel() == piece.nbytes

    def _add(self, number: int, nbytes: int, sums: Sums) -> None:
        piece = self._pieces[number]
        with self._lock:
            done, before = self._found.pop(number, (0, (0, 0)))
            done, sums = done + nbytes, combine(before, sums)
            if done < piece.nbytes:
                self._found[number] = done, sums
        if done >= piece.nbytes:
            self.reader.compare(self.key, piece.sums, sums, piece.at, piece.nbytes)

    async def read_async(self, first: int, out: torch.Tensor) -> None:
        """`read` in one of the reader's threads."""
        await settle(asyncio.get_running_loop().run_in_executor(self.reader.pool, self.read, first, out))
