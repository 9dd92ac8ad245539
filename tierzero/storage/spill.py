"""The file on the drives for what lives no longer than a backward: it is nobody's record, and nothing of it is left.

It is a file of its own beside the store's, striped like that one, so that it never takes the room that updates and
snapshots have reserved there, nor breaks it up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from tierzero.storage.extents import Extent
from tierzero.storage.space import Space
from tierzero.storage.store import Store
from tierzero.tiers.base import BlockFile, open_block_file

NAME = "activations.tmp"


class SpillFile:
    """Extents in the directories of `store`, which holds their locks. The file is made when it is first needed.

    `engine` is a NativeEngine or None; `opener` makes the block file, as for the store. Sizes are bytes. Not
    thread-safe but for `close`.
    """

    def __init__(self, store: Store, engine: Any, opener: Callable[..., BlockFile] = open_block_file) -> None:
        self.paths = [os.path.join(directory, NAME) for directory in store.directories]
        self.layout = store.layout
        self.file: BlockFile | None = None
        self.used = 0
        self.peak = 0
        self._engine = engine
        self._opener = opener
        self._space: Space | None = None
        self._remove()  # what a crash has left

    def take(self, nbytes: int) -> Extent:
        """Room for `nbytes`. OSError(ENOSPC) with the bytes missing, and the path, if the drive is full."""
        if self._space is None:
            self._open()
        assert self._space is not None
        extent = self._space.take(nbytes, "activations")
        self.used += extent.capacity
        self.peak = max(self.peak, self.used)
        return extent

    def give(self, extent: Extent) -> None:
        """Give `extent` back."""
        assert self._space is not None
        self._space.drop(extent)
        self.used -= extent.capacity

    async def write(self, extent: Extent, data: torch.Tensor) -> None:
        """Write uint8[n], whole pages, to an extent of as many bytes."""
        assert self.file is not None
        await self.file.write(extent.offset, data)

    async def read(self, extent: Extent, out: torch.Tensor) -> None:
        """Fill uint8[n] from an extent of as many bytes."""
        assert self.file is not None
        await self.file.read(extent.offset, out)

    def _open(self) -> None:
        if self.layout is None:
            file = self._opener(self.paths[0], self._engine)
        else:
            file = self._opener(self.paths, self._engine, weights=self.layout.weights, stripe=self.layout.stripe)
        if self._engine is not None:
            self._remove()  # the open descriptors are enough: whatever ends the process, nothing is left
        self._space = Space(file, (1,) if self.layout is None else self.layout.weights)
        self.file = file

    def _remove(self) -> None:
        for path in self.paths:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        """Give up the file and its bytes. Harmless when closed."""
        if self.file is not None:
            self.file.close()
            self._remove()
            self.file = self._space = None
