"""Reads a checkpoint's data file piece by piece, comparing checksums in passing."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tierzero.checkpoint.container import frame
from tierzero.checkpoint.index import DATA, Index, Piece, StoredTensor, read_index
from tierzero.checksum import Sums, checksum, combine, to_hex
from tierzero.errors import StoreCorruptError
from tierzero.tiers.base import aligned_empty, memory_of

BLOCK = 8 << 20  # bytes at a time


class Reader:
    """The checkpoint in `directory`. Errors as read_index; StoreCorruptError names the file and the tensor whose bytes
    are not what was written.
    """

    def __init__(self, directory: Path) -> None:
        self.index: Index = read_index(directory)
        self.path = directory / DATA
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115, closed by close

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
        raw = out.view(-1).view(torch.uint8) if out.numel() else torch.empty(0, dtype=torch.uint8)
        done = 0
        for piece in stored.pieces:
            total: Sums = (0, 0)
            for at in range(0, piece.nbytes, BLOCK):
                part = raw[done + at : done + min(at + BLOCK, piece.nbytes)]
                self._fill(piece.at + at, part, key)
                total = combine(total, checksum(part, at // 4))
            self._compare(key, piece.sums, total, piece.at, piece.nbytes)
            done += piece.nbytes
        return out

    def object(self, key: str) -> Any:
        """The value of that key."""
        stored = self.index.objects[key]
        raw = torch.empty(stored.length, dtype=torch.uint8)
        self._fill(stored.start, raw, key)
        self._compare(key, stored.sums, checksum(raw), stored.start, stored.length)
        return torch.load(io.BytesIO(bytes(memory_of(raw))), weights_only=True)

    def verify(self) -> Iterator[tuple[str, int]]:
        """Compare everything with its checksum, in the order of the file; gives (key, bytes) of each thing that is
        right. One block is read while another is summed.
        """
        things: list[tuple[int, str, Any]] = [(one.start, key, one) for key, one in self.index.objects.items()]
        for key, stored in self.index.tensors.items():
            things += [(piece.start, key, (stored, piece)) for piece in stored.pieces]
        with ThreadPoolExecutor(1) as ahead:
            for _, key, one in sorted(things, key=lambda thing: thing[0]):
                if isinstance(one, tuple):
                    self._verify_piece(ahead, key, *one)
                    yield key, one[1].nbytes
                else:
                    self._compare(key, one.sums, self._sums(ahead, key, one.start, one.length), one.start, one.length)
                    yield key, one.length

    def _verify_piece(self, ahead: ThreadPoolExecutor, key: str, stored: StoredTensor, piece: Piece) -> None:
        head, tail = frame(stored.dtype, piece.sizes, piece.start)
        for at, expected in ((piece.start, head), (piece.at + piece.nbytes, tail)):
            raw = torch.empty(len(expected), dtype=torch.uint8)
            self._fill(at, raw, key)
            if bytes(memory_of(raw)) != expected:
                raise self._changed(key, at, len(expected))
        self._compare(key, piece.sums, self._sums(ahead, key, piece.at, piece.nbytes), piece.at, piece.nbytes)

    def _sums(self, ahead: ThreadPoolExecutor, key: str, start: int, nbytes: int) -> Sums:
        starts = range(0, nbytes, BLOCK)
        buffers = [aligned_empty(min(BLOCK, nbytes)) for _ in starts[:2]]

        def read(number: int) -> torch.Tensor:
            part = buffers[number % 2][: min(BLOCK, nbytes - starts[number])]
            self._fill(start + starts[number], part, key)
            return part

        total: Sums = (0, 0)
        coming = ahead.submit(read, 0) if starts else None
        for number, at in enumerate(starts):
            assert coming is not None
            part = coming.result()
            if number + 1 < len(starts):
                coming = ahead.submit(read, number + 1)
            total = combine(total, checksum(part, at // 4))
        return total

    def _fill(self, at: int, out: torch.Tensor, key: str) -> None:
        memory, done = memory_of(out), 0
        while done < out.numel():
            try:
                count = os.preadv(self._file.fileno(), [memory[done:]], at + done)
            except OSError as error:
                raise OSError(error.errno, f"{key} cannot be read: {error.strerror}", str(self.path)) from error
            if count == 0:
                raise StoreCorruptError(f"{self.path} ends inside {key}: copy it again, or load another checkpoint")
            done += count

    def _compare(self, key: str, expected: str, found: Sums, at: int, nbytes: int) -> None:
        if to_hex(found) != expected:
            raise self._changed(key, at, nbytes)

    def _changed(self, key: str, at: int, nbytes: int) -> StoreCorruptError:
        return StoreCorruptError(
            f"{key} ({nbytes} bytes at {at} of {self.path}) does not match its checksum: the file is not what was "
            "written. Copy it again, or load another checkpoint"
        )
