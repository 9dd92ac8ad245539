"""Reads a checkpoint's data file piece by piece, comparing checksums in passing."""

from __future__ import annotations

import asyncio
import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tierzero.checkpoint.container import frame
from tierzero.checkpoint.index import DATA, Index, Piece, read_index
from tierzero.checksum import Sums, checksum, combine, to_hex
from tierzero.errors import StoreCorruptError
from tierzero.tiers.base import aligned_empty, memory_of, settle
from tierzero.tiers.readonly import ReadOnlyFile

BLOCK = 4 << 20  # bytes at a time
_READERS = 3  # threads that verify


class Reader:
    """The checkpoint in `directory`. Errors as read_index; StoreCorruptError names the file and the tensor whose bytes
    are not what was written.
    """

    def __init__(self, directory: Path) -> None:
        self.index: Index = read_index(directory)
        self.path = directory / DATA
        self._file = ReadOnlyFile(self.path)

    def close(self) -> None:
        """Give up the file. Harmless when closed."""
        self._file.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor of that key, as a new one."""
        stored = self.index.stored(key)
        assert stored is not None
        out = torch.empty(stored.shape, dtype=stored.dtype)
        InOrder(self, key).read(out.view(-1))
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

    def verify(self) -> Iterator[tuple[str, int]]:
        """Compare everything with its checksum, in the order of the file; gives (key, bytes) of each thing that is
        right. Several are read at a time.
        """
        things: list[tuple[int, str, Any]] = [(one.start, key, one) for key, one in self.index.objects.items()]
        for key, stored in self.index.tensors.items():
            things += [(piece.start, key, (stored, piece)) for piece in stored.pieces]
        things.sort(key=lambda thing: thing[0])
        with ThreadPoolExecutor(_READERS) as pool:
            coming: deque[tuple[str, int, Future[None]]] = deque()
            try:
                for _, key, one in things:
                    nbytes = one[1].nbytes if isinstance(one, tuple) else one.length
                    coming.append((key, nbytes, pool.submit(self._verify, key, one)))
                    if len(coming) > 2 * _READERS:
                        yield _right(*coming.popleft())
                while coming:
                    yield _right(*coming.popleft())
            finally:
                for _, _, future in coming:
                    future.cancel()

    def _verify(self, key: str, one: Any) -> None:
        if not isinstance(one, tuple):
            self.compare(key, one.sums, self._sums(key, one.start, one.length), one.start, one.length)
            return
        stored, piece = one
        head, tail = frame(stored.dtype, piece.sizes, piece.start)
        for at, expected in ((piece.start, head), (piece.at + piece.nbytes, tail)):
            raw = torch.empty(len(expected), dtype=torch.uint8)
            self.fill(at, raw, key)
            if bytes(memory_of(raw)) != expected:
                raise self._changed(key, at, len(expected))
        self.compare(key, piece.sums, self._sums(key, piece.at, piece.nbytes), piece.at, piece.nbytes)

    def _sums(self, key: str, start: int, nbytes: int) -> Sums:
        buffer, total = aligned_empty(min(BLOCK, nbytes)), (0, 0)
        for at in range(0, nbytes, BLOCK):
            part = buffer[: min(BLOCK, nbytes - at)]
            self.fill(start + at, part, key)
            total = combine(total, checksum(part, at // 4))
        return total

    def fill(self, at: int, out: torch.Tensor, key: str) -> None:
        """Read the file's bytes from `at` on, which are some of `key`."""
        try:
            self._file.read(at, out)
        except OSError as error:
            raise OSError(error.errno, f"{key} cannot be read: {error.strerror}", str(self.path)) from error

    def compare(self, key: str, expected: str, found: Sums, at: int, nbytes: int) -> None:
        """StoreCorruptError if the bytes of `key` are not those that were written."""
        if to_hex(found) != expected:
            raise self._changed(key, at, nbytes)

    def _changed(self, key: str, at: int, nbytes: int) -> StoreCorruptError:
        return StoreCorruptError(
            f"{key} ({nbytes} bytes at {at} of {self.path}) does not match its checksum: the file is not what was "
            "written. Copy it again, or load another checkpoint"
        )


def _right(key: str, nbytes: int, future: Future[None]) -> tuple[str, int]:
    future.result()
    return key, nbytes


class InOrder:
    """One tensor, read from its first element to its last; each piece is compared with its checksum at its end."""

    def __init__(self, reader: Reader, key: str) -> None:
        stored = reader.index.stored(key)
        assert stored is not None
        self.reader = reader
        self.key = key
        self.dtype = stored.dtype
        self.left = stored.nbytes
        self._pieces = iter(stored.pieces)
        self._piece: Piece | None = None
        self._done = 0  # bytes of the piece
        self._sums: Sums = (0, 0)

    def read(self, out: torch.Tensor) -> None:
        """Fill `out` (one-dimensional, of this dtype) with the elements that come next."""
        raw = out.view(torch.uint8) if out.numel() else torch.empty(0, dtype=torch.uint8)
        at = 0
        while at < raw.numel():
            piece = self._piece = next(self._pieces) if self._piece is None else self._piece
            part = raw[at : at + min(BLOCK, piece.nbytes - self._done)]
            self.reader.fill(piece.at + self._done, part, self.key)
            self._sums = combine(self._sums, checksum(part, self._done // 4))
            self._done += part.numel()
            self.left -= part.numel()
            at += part.numel()
            if self._done == piece.nbytes:
                self.reader.compare(self.key, piece.sums, self._sums, piece.at, piece.nbytes)
                self._piece, self._done, self._sums = None, 0, (0, 0)

    async def read_async(self, out: torch.Tensor) -> None:
        """`read` in a thread."""
        await settle(asyncio.ensure_future(asyncio.to_thread(self.read, out)))
