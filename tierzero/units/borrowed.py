"""Frozen parameters whose bytes stay in the file they came from: read from there, never copied, never written.

Note [borrowed bytes]
A frozen region is a list of spans of files. Each file is kept open, so removing or replacing it takes nothing away; a
file that is written to is found out at the next read. A snapshot names the files, their sizes and times, instead of
holding the bytes; before it does, what its file's path no longer leads to is copied into the store. Whoever changes the
parameters after all has the region copied into the store first, where it stays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierzero.monitoring.metrics import Metrics
from tierzero.storage.checksum import Sums
from tierzero.storage.extents import Extent
from tierzero.storage.store import Store
from tierzero.tiers.readonly import ReadOnlyFile, open_same
from tierzero.units.records import DiskRecord

log = logging.getLogger("tierzero")
_PART = 4 << 20  # bytes copied at a time


@dataclass(frozen=True)
class Span:
    """`nbytes` bytes at `offset` of a region that lie at `at` of `file`."""

    offset: int
    nbytes: int
    file: ReadOnlyFile
    at: int


class Borrowed:
    """The spans of one region; bytes between them are zero."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.offset)

    @property
    def files(self) -> list[ReadOnlyFile]:
        return list({id(span.file): span.file for span in self.spans}.values())

    @property
    def in_place(self) -> bool:
        """Whether a later process would find the files."""
        return all(file.in_place for file in self.files)

    async def read(self, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8[n]) from `offset` of the region on. StoreCorruptError for a file that was changed."""
        end = offset + out.numel()
        for span in self.spans:
            low, high = max(offset, span.offset), min(end, span.offset + span.nbytes)
            if low < high:
                part = out[low - offset : high - offset]
                await span.file.read_async(span.at + low - span.offset, part)
        for file in self.files:
            file.check()

    def describe(self) -> dict[str, Any]:
        """JSON from which `reopened` finds the bytes again."""
        files = self.files
        number = {id(file): index for index, file in enumerate(files)}
        return {
            "files": [file.identity.to_json() for file in files],
            "spans": [[span.offset, span.nbytes, number[id(span.file)], span.at] for span in self.spans],
        }


class BorrowedFiles:
    """The files of one engine that bytes are borrowed from, each open once."""

    def __init__(self) -> None:
        self._open: list[ReadOnlyFile] = []

    def of(self, path: str) -> ReadOnlyFile:
        """The file that lies at `path` now, open."""
        for file in self._open:
            if file.path == path and file.in_place:
                return file
        self._open.append(ReadOnlyFile(path))
        return self._open[-1]

    def reopened(self, described: dict[str, Any]) -> Borrowed:
        """What `Borrowed.describe` described. StoreCorruptError naming a file that is gone or was changed."""
        files = []
        for saved in described["files"]:
            there = [file for file in self._open if file.path == saved[0] and file.identity.same_contents(saved)]
            if not there:
                there = [open_same(saved)]
                self._open += there
            files.append(there[0])
        return Borrowed([Span(offset, nbytes, files[which], at) for offset, nbytes, which, at in described["spans"]])

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._open)

    def close(self) -> None:
        """Close them all."""
        for file in self._open:
            file.close()


class FrozenRecord(DiskRecord):
    """The frozen region of a unit of a meta model, `name` in the store once it has a copy there: blank, borrowed from
    files, or the store's. See Note [borrowed bytes].
    """

    def __init__(self, store: Store, name: str, nbytes: int, metrics: Metrics) -> None:
        super().__init__(store, name, nbytes, metrics)
        self.borrowed: Borrowed | None = None
        self.owned = False  # the store has the bytes

    def borrow(self, borrowed: Borrowed) -> None:
        """Have the bytes of `borrowed` from here on, instead of those before."""
        if self.owned:
            self.store.remove(self.name)
        self.borrowed, self.owned = borrowed, False

    async def read(self, offset: int, out: torch.Tensor) -> None:
        if self.owned:
            await super().read(offset, out)
        elif self.borrowed is not None:
            self.metrics.add("nvme_read_expected", out.numel())
            await self.borrowed.read(offset, out)
        else:
            out.zero_()  # nobody uses a parameter that was never given a value

    async def write(self, offset: int, data: torch.Tensor) -> None:
        await self.own()
        await super().write(offset, data)

    def replace(self, extent: Extent, sums: Sums) -> None:
        super().replace(extent, sums)
        self.owned_again()

    async def own(self) -> None:
        """Copy what is borrowed into the store. OSError if the drive is full, StoreCorruptError for a changed file."""
        if self.owned:
            return
        self.store.create(self.name, self.nbytes)
        try:
            for at in range(0, self.nbytes if self.borrowed is not None else 0, _PART):
                part = torch.zeros(min(_PART, self.nbytes - at), dtype=torch.uint8)
                await self.read(at, part)
                await super().write(at, part)
        except BaseException:
            self.store.remove(self.name)
            raise
        self.borrowed, self.owned = None, True

    def owned_again(self) -> None:
        """The store's current record of this name is what it has from here on."""
        self.borrowed, self.owned = None, True

    async def settle(self) -> None:
        """Make sure that a snapshot can hold or name the bytes."""
        if self.owned or (self.borrowed is not None and self.borrowed.in_place):
            return
        if self.borrowed is not None:
            gone = next(file.path for file in self.borrowed.files if not file.in_place)
            log.warning(
                "%s, from which frozen parameters are read, was removed or replaced: they are copied into the store "
                "(%s), so that the snapshot is whole without it",
                gone,
                self.name,
            )
        await self.own()
