"""The data file of a store, read without the store: bytes at offsets, over one drive or several."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tierzero.storage.checksum import Sums, checksum, combine
from tierzero.storage.stripes import Layout
from tierzero.tiers.base import BlockFile, aligned_empty, open_block_file
from tierzero.tiers.readonly import ReadOnlyFile

_BLOCK = 4 << 20  # bytes at a time
_THREADS = 4  # that read


class DataFile:
    """The file over `paths`. StoreError for several of them without the native extension, which alone can do that."""

    def __init__(self, paths: Sequence[str], layout: Layout | None) -> None:
        self._one: ReadOnlyFile | None = None
        self._many: BlockFile | None = None
        self._engine: Any = None
        self._pool = ThreadPoolExecutor(_THREADS)
        self._own = threading.local()  # the memory of each thread
        if layout is None:
            self._one = ReadOnlyFile(paths[0])
            return
        from tierzero.native import NATIVE

        if NATIVE is not None:
            from tierzero.tiers.nvme import NativeEngine

            self._engine = NativeEngine(depth=4)
        self._many = open_block_file(list(paths), self._engine, weights=layout.weights, stripe=layout.stripe)

    def size(self) -> int:
        """Bytes of the file."""
        if self._one is not None:
            return self._one.identity.size
        assert self._many is not None
        return self._many.size()

    def read(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] from `offset` on. EIO if the file ends before."""
        out = aligned_empty(nbytes)
        if self._one is not None:
            self._one.read(offset, out)
        else:
            assert self._many is not None
            asyncio.run(self._many.read(offset, out))
        return out

    def sums(self, offset: int, nbytes: int) -> Sums:
        """The checksum of `nbytes` from `offset` on; of a single file, some blocks are read at a time."""
        starts = range(0, nbytes, _BLOCK)
        if self._one is None:
            parts = ((at, self.read(offset + at, min(_BLOCK, nbytes - at))) for at in starts)
            return combine(*(checksum(part, at // 4) for at, part in parts))
        file = self._one

        def one(at: int) -> Sums:
            if not hasattr(self._own, "memory"):
                self._own.memory = aligned_empty(_BLOCK)
            part = self._own.memory[: min(_BLOCK, nbytes - at)]
            file.read(offset + at, part)
            return checksum(part, at // 4)

        return combine(*self._pool.map(one, starts))

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.shutdown()
        for one in (self._one, self._many, self._engine):
            if one is not None:
                one.close()
