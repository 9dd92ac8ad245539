"""Memory that updates of split masters write the parameters to, until their state is whole. See state_format's Note
[split masters].
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch


class Shadows:
    """`blocks`: one for each update that may be on its way."""

    def __init__(self, blocks: list[Any]) -> None:
        self._free = list(blocks)
        self._turns = asyncio.Semaphore(len(blocks))

    @asynccontextmanager
    async def take(self, nbytes: int) -> AsyncIterator[torch.Tensor]:
        """uint8[nbytes] for one update, as soon as there is some."""
        async with self._turns:
            block = self._free.pop()
            try:
                yield block.tensor[:nbytes]
            finally:
                self._free.append(block)
