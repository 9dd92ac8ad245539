"""The data file of a store, read without the store: bytes at offsets, over one drive or several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from tierzero.stripes import Layout
from tierzero.tiers.base import BlockFile, aligned_empty, open_block_file
from tierzero.tiers.readonly import ReadOnlyFile


class DataFile:
    """The file over `paths`. StoreError for several of them without the native extension, which alone can do that."""

    def __init__(self, paths: Sequence[str], layout: Layout | None) -> None:
        self._one: ReadOnlyFile | None = None
        self._many: BlockFile | None = None
        self._engine: Any = None
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

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *error: Any) -> None:
        for one in (self._one, self._many, self._engine):
            if one is not None:
                one.close()
