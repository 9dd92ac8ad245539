"""Every byte of a checkpoint against its checksum: one pass over the file in large blocks, some of them at a time.

Note [blocks and things]
The file is read in blocks, past the page cache, whatever lies in them; each block is summed in the thread that reads
it. A thing (a piece of a tensor with the frame around it, or an object) is right when the bytes of its frame are those
that they must be and the sums of its parts add up. So small things cost no reads of their own, and one large thing is
read as fast as many.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from tierzero.checkpoint.container import frame
from tierzero.checkpoint.index import Index
from tierzero.errors import StoreCorruptError
from tierzero.paging.malloc import mapped
from tierzero.storage.checksum import Sums, checksum, combine, to_hex
from tierzero.tiers.base import aligned_empty, memory_of
from tierzero.tiers.readonly import ReadOnlyFile
from tierzero.units.layout import PAGE

BLOCK = 4 << 20  # bytes
_GAP = 64 << 10  # bytes between things that are read along rather than passed over
_AHEAD = 8  # blocks that are asked for before the first of them is taken


@dataclass(eq=False)
class _Thing:
    """A piece of a tensor or an object: `left` bytes of it were not compared yet, of `nbytes` that are its own."""

    key: str
    nbytes: int
    left: int = 0


@dataclass(eq=False)
class _Run:
    """Bytes [start, start + nbytes) of the file: `expected` are they, or their checksum."""

    thing: _Thing
    start: int
    nbytes: int
    expected: bytes | str
    sums: Sums = (0, 0)
    left: int = 0

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class Checkpoint(Protocol):
    """What is read; see reader.Reader."""

    index: Index
    file: ReadOnlyFile
    pool: ThreadPoolExecutor

    def changed(self, key: str, at: int, nbytes: int) -> StoreCorruptError: ...

    def unreadable(self, key: str, error: OSError) -> OSError: ...


class Pass:
    """One pass over the things of `keys`, None for all, and over the frames alone of the tensors `framed`. See Note
    [blocks and things].
    """

    def __init__(self, checkpoint: Checkpoint, keys: Collection[str] | None, framed: Collection[str] = ()) -> None:
        self.checkpoint = checkpoint
        self.file = checkpoint.file
        self._own = threading.local()  # the memory of each thread that reads
        self._runs = sorted(self._all(keys, framed), key=lambda run: run.start)

    def _all(self, keys: Collection[str] | None, framed: Collection[str]) -> Iterator[_Run]:
        index = self.checkpoint.index
        for key, one in index.objects.items():
            if keys is None or key in keys:
                yield from self._thing(key, one.length, [(one.start, one.length, one.sums)])
        for key, stored in index.tensors.items():
            whole = keys is None or key in keys
            for piece in stored.pieces if whole or key in framed else ():
                head, tail = frame(stored.dtype, piece.sizes, piece.start)
                data = [(piece.at, piece.nbytes, piece.sums)] if whole else []
                ends = [(piece.start, len(head), head), (piece.at + piece.nbytes, len(tail), tail)]
                yield from self._thing(key, piece.nbytes, [*data, *ends])

    def _thing(self, key: str, nbytes: int, parts: Sequence[tuple[int, int, bytes | str]]) -> Iterator[_Run]:
        thing = _Thing(key, nbytes)
        for start, length, expected in parts:
            run = _Run(thing, start, length, expected, left=length)
            thing.left += length
            if run.end > self.file.identity.size or (not length and expected not in (b"", to_hex((0, 0)))):
                raise self.checkpoint.changed(key, start, length)
            yield run

    def run(self) -> Iterator[tuple[str, int]]:
        """(key, bytes) of each thing that is right, in the order in which their ends lie in the file."""
        coming: deque[Future[list[tuple[_Run, int, Sums | None]]]] = deque()
        try:
            for at, end, runs in self._blocks():
                coming.append(self.checkpoint.pool.submit(self._block, at, end, runs))
                if len(coming) == _AHEAD:
                    yield from self._take(coming.popleft().result())
            while coming:
                yield from self._take(coming.popleft().result())
        finally:
            for future in coming:
                future.cancel()

    def _blocks(self) -> Iterator[tuple[int, int, list[_Run]]]:
        """(start, end, what lies in it) of what is read at once."""
        active: list[_Run] = []
        number, at = 0, 0
        while active or number < len(self._runs):
            if not active:
                at = self._runs[number].start // PAGE * PAGE
            end = max((run.end for run in active), default=at)
            while number < len(self._runs) and self._runs[number].start < min(at + BLOCK, end + _GAP):
                active.append(self._runs[number])
                end = max(end, active[-1].end)
                number += 1
            end = min(end, at + BLOCK)
            yield at, end, active
            active, at = [run for run in active if run.end > end], end

    def _block(self, at: int, end: int, runs: list[_Run]) -> list[tuple[_Run, int, Sums | None]]:
        """(run, bytes of it here, their checksum or None if they are the expected bytes)."""
        try:
            raw = self.file.view(at, end - at, self._memory())
        except OSError as error:
            raise self.checkpoint.unreadable(runs[0].thing.key, error) from error
        found: list[tuple[_Run, int, Sums | None]] = []
        for run in runs:
            low, high = max(at, run.start), min(end, run.end)
            part, first = raw[low - at : high - at], low - run.start
            if isinstance(run.expected, str):
                if first % 4:  # sums of words add up over their bytes too
                    part = torch.cat([part.new_zeros(first % 4), part])
                found.append((run, high - low, checksum(part, first // 4)))
            elif bytes(memory_of(part)) == run.expected[first : first + high - low]:
                found.append((run, high - low, None))
            else:
                raise self.checkpoint.changed(run.thing.key, run.start, run.nbytes)
        return found

    def _memory(self) -> torch.Tensor:
        memory: torch.Tensor | None = getattr(self._own, "memory", None)
        if memory is None:
            with mapped():
                memory = self._own.memory = aligned_empty(BLOCK + 2 * PAGE)
        return memory

    def _take(self, found: list[tuple[_Run, int, Sums | None]]) -> Iterator[tuple[str, int]]:
        for run, nbytes, sums in found:
            thing = run.thing
            run.left -= nbytes
            thing.left -= nbytes
            if sums is not None:
                run.sums = combine(run.sums, sums)
                if not run.left and to_hex(run.sums) != run.expected:
                    raise self.checkpoint.changed(thing.key, run.start, run.nbytes)
            if not thing.left:
                yield thing.key, thing.nbytes
