"""The current version of every record in a data file, replaced by copy on write.

Note [copy on write]
A record is a run of bytes under a name. A new version is written into free space and then *published*: from then on
it is the current one, and the old one's space is free unless something still refers to it. What refers to an extent
is counted: being current, each snapshot that holds it, being written, being read. So whatever happens between two
snapshots, the last one can be read whole.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from tierzero.errors import StoreCorruptError, StoreError
from tierzero.storage.blocks import checksum_of, checksum_on_drive, copy_extent, patch_extent
from tierzero.storage.checksum import Sums
from tierzero.storage.extents import Extent
from tierzero.storage.space import Space
from tierzero.tiers.base import BlockFile, check_buffer


class Versions:
    """Records in `file` at `path`. See Note [copy on write].

    Bookkeeping may be called from any thread; coroutines run on one loop at a time. `current` maps each name to its
    current extent; only look at it.
    """

    def __init__(self, path: str, file: BlockFile, space: Space) -> None:
        self.path = path
        self.file = file
        self.space = space
        self.current: dict[str, Extent] = {}
        self._sums: dict[str, Sums | None] = {}  # None: changed in place, computed again when needed
        self._writing: dict[str, asyncio.Lock] = {}
        self._mutex = threading.RLock()
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store of {self.path} was closed")

    def checksum_of(self, name: str) -> Sums | None:
        """The checksum of the current version; None if it was changed in place since it was published."""
        with self._mutex:
            self._extent(name)
            return self._sums[name]

    def reserve(self, nbytes: int) -> None:
        """Have at least `nbytes` of capacity in the data file.

        OSError(ENOSPC) names the bytes needed and free, and the path.
        """
        self._check_open()
        self.space.reserve(nbytes)

    def allocate(self, nbytes: int, name: str) -> Extent:
        """Space for a new version of `name`, to be published or discarded. OSError(ENOSPC) if the drive is full."""
        self._check_open()
        return self.space.take(nbytes, name)

    def discard(self, extent: Extent) -> None:
        """Give up an allocated extent that will not be published."""
        self.space.drop(extent)

    free = discard

    def publish(self, name: str, extent: Extent, sums: Sums | None) -> None:
        """Make an allocated extent, whose bytes are written and have the checksum `sums`, the current version."""
        with self._mutex:
            self._check_open()
            before = self.current.get(name)
            self.current[name], self._sums[name] = extent, sums
            if before is not None:
                self.space.drop(before)

    def create(self, name: str, nbytes: int) -> Extent:
        """Make `name` a record of `nbytes` with undefined bytes, to be filled by `write`."""
        extent = self.allocate(nbytes, name)
        self.publish(name, extent, None)
        return extent

    def remove(self, name: str) -> None:
        """Forget the current version of `name`; snapshots keep theirs."""
        with self._mutex:
            self._check_open()
            extent = self._extent(name)
            del self.current[name], self._sums[name]
            self.space.drop(extent)

    def _extent(self, name: str) -> Extent:
        extent = self.current.get(name)
        if extent is None:
            raise StoreError(f"the store of {self.path} has no record {name!r}")
        return extent

    @contextmanager
    def _using(self, name: str, offset: int = 0, nbytes: int = 0) -> Iterator[Extent]:
        """The current extent of `name`, whose space is not reused inside, whatever is published meanwhile."""
        with self._mutex:
            self._check_open()
            extent = self._extent(name)
            if offset < 0 or nbytes < 0 or offset + nbytes > extent.nbytes:
                raise ValueError(
                    f"{nbytes} bytes at {offset} are not inside the record {name!r} of {extent.nbytes} bytes"
                )
            self.space.hold(extent)
        try:
            yield extent
        finally:
            self.space.drop(extent)

    async def read(self, name: str, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8[n]) with the bytes of the current version of `name` from `offset` on."""
        with self._using(name, offset, check_buffer(out)) as extent:
            await self.file.read(extent.offset + offset, out)

    async def write_new(self, name: str, data: torch.Tensor) -> tuple[Extent, Sums]:
        """Write `data` (uint8[n]) as a new version of `name` without publishing it; its extent and checksum.

        On failure nothing is left.
        """
        extent = self.allocate(check_buffer(data), name)
        try:
            writing = asyncio.ensure_future(self.file.write(extent.offset, data))
            try:
                sums = await checksum_of(data)
            finally:
                await writing
        except BaseException:
            self.discard(extent)
            raise
        return extent, sums

    async def put(self, name: str, data: torch.Tensor) -> Extent:
        """Write `data` (uint8[n]) as a new version of `name` and publish it."""
        extent, sums = await self.write_new(name, data)
        self.publish(name, extent, sums)
        return extent

    async def write(self, name: str, offset: int, data: torch.Tensor) -> None:
        """Change part of the current version of `name`: in place, unless a snapshot pins it; then in a copy.

        After a failure in place the changed part is undefined; no snapshot holds it.
        """
        nbytes = check_buffer(data)
        async with self._writing.setdefault(name, asyncio.Lock()):
            with self._using(name, offset, nbytes) as extent:
                if nbytes == 0:
                    return
                if nbytes == extent.nbytes:
                    await self.put(name, data)
                    return
                with self._mutex:
                    pinned = self.space.holds(extent) > 2  # more than being current and this use
                    if not pinned:
                        self._sums[name] = None
                if not pinned:
                    await patch_extent(self.file, extent, offset, data)
                    return
                copy = self.allocate(extent.nbytes, name)
                try:
                    await copy_extent(self.file, extent, copy)
                    await patch_extent(self.file, copy, offset, data)
                except BaseException:
                    self.discard(copy)
                    raise
                self.publish(name, copy, None)

    async def verify(
        self, names: Collection[str] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compare the bytes on the drive with their checksums, for all records or `names`.

        StoreCorruptError names the first record that differs, its path and offset. `progress` is called with the bytes
        done and their total. Records changed in place since they were published have no checksum and are skipped.
        """
        chosen = sorted(self.current if names is None else names)
        total = sum(self._extent(name).nbytes for name in chosen)
        done = 0
        for name in chosen:
            with self._mutex:
                using = self._using(name)
                extent = using.__enter__()
                expected = self._sums[name]
            try:
                if expected is not None and await checksum_on_drive(self.file, extent) != expected:
                    raise StoreCorruptError(
                        f"the record {name!r} ({extent.nbytes} bytes at offset {extent.offset} of {self.path}) does "
                        "not match its checksum: the drive or another program changed it. Go back to another snapshot"
                    )
            finally:
                using.__exit__(None, None, None)
            done += extent.nbytes
            if progress is not None:
                progress(done, total)

    async def _sum_again(self, name: str, extent: Extent) -> Sums:
        sums = await checksum_on_drive(self.file, extent)
        with self._mutex:
            if self.current.get(name) == extent:
                self._sums[name] = sums
        return sums

    def _release(self, extents: Collection[Extent]) -> None:
        for extent in extents:
            self.space.drop(extent)
