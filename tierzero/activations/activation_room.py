"""Room for activations: runs of a part of host memory, and what is written to the drives to have one.

Note [who leaves]
Backward uses last what was saved first. So where the pool is full the oldest pieces are written to the drives, several
at once, and clean copies of the oldest leave first. All on the loop thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

import torch

from tierzero.activations.activation_slots import Place, Slot, Slots
from tierzero.errors import TierzeroError
from tierzero.monitoring.metrics import Metrics
from tierzero.paging.transfer import Transfer
from tierzero.storage.extents import FreeList
from tierzero.storage.spill import SpillFile
from tierzero.tiers.host import Block
from tierzero.units.layout import PAGE

WRITES = 4  # at a time
SHARE = 8  # a full pool writes this part of itself at once, so that the drives have enough to do


class ActivationRoom:
    """Runs of `block`, and beyond it extents of `spill`, None where there is no drive. Sizes are bytes."""

    def __init__(self, block: Block, spill: SpillFile | None, transfer: Transfer, metrics: Metrics) -> None:
        self.capacity = block.nbytes // PAGE * PAGE
        self.dead: deque[Slot] = deque()
        self.closed = False
        self.peak = 0
        self._block = block
        self.spill = spill
        self._transfer = transfer
        self._metrics = metrics
        self._runs = FreeList(self.capacity)
        self._slots = Slots()
        self._tasks: set[asyncio.Task[None]] = set()
        self._behind = 0  # bytes on the device that are to leave it
        self._ahead: Slot | None = None
        self._cursor = -1  # the index of what backward has used last; none in forward
        self._brings = 0  # pieces that somebody waits for

    async def _room(self, size: int, brings: int = 0) -> int:
        """The offset of a run of `size` bytes, for which others may be written to the drives first. `brings`: for how
        many of the pieces that somebody waits for.
        """
        while (offset := self._room_now(size)) is None:
            await self._make_way(size, brings)
        return offset

    def _room_now(self, size: int, below: int | None = None) -> int | None:
        """The same without writing; with `below`, clean copies leave only if they were saved before it."""
        while (offset := self._runs.take(size, first=True)) is None:
            slot = self._slots.oldest(Place.CLEAN)
            if slot is not None and 0 <= self._cursor < slot.index and below is None:
                slot = self._slots.newest(Place.CLEAN)  # all are due: a node unpacks in the order in which it saved
            if slot is None or (below is not None and slot.index >= below):
                return None
            if slot is self._ahead:
                self._drop_ahead()
            self._slots.put(slot, Place.AWAY)
            self._runs.give(slot.offset, slot.size)
            slot.offset = -1
        return offset

    async def _make_way(self, size: int, brings: int) -> None:
        """Write the oldest pieces, at least `size` bytes of them, and return when one of them is written."""
        mine: list[asyncio.Task[None]] = []
        chosen = 0
        while len(mine) < WRITES and chosen < max(size, self.capacity // SHARE):
            slot = self._slots.oldest(Place.DIRTY)
            if slot is None:
                break
            chosen += slot.size
            mine.append(self._start(slot, self._write(slot)))
        others = self._tasks - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        elif self._brings > brings:
            await asyncio.sleep(0)  # it has its bytes and is about to copy them
        else:
            raise TierzeroError(f"the activations' pool has no run of {size} bytes; please report this as a bug")
        self._bury()
        done = [task for task in mine if task.done()]
        mine.clear()
        try:
            while done:
                done.pop().result()
        finally:
            done.clear()  # a task's exception refers to this frame
            del others

    async def _write(self, slot: Slot) -> None:
        spill = self.spill
        assert spill is not None
        extent = spill.take(slot.size)
        try:
            self._metrics.add("nvme_written_expected", slot.size)
            await spill.write(extent, self._view(slot, padded=True))
        except BaseException:
            spill.give(extent)
            raise
        self._metrics.add("activations_written", slot.size)
        slot.extent = extent
        self._slots.put(slot, Place.CLEAN)

    def _read_into(self, slot: Slot, offset: int) -> asyncio.Task[None]:
        slot.offset = offset
        self.peak = max(self.peak, self.capacity - self._runs.free_bytes)
        return self._start(slot, self._read(slot))

    async def _read(self, slot: Slot) -> None:
        assert self.spill is not None
        assert slot.extent is not None
        try:
            self._metrics.add("nvme_read_expected", slot.size)
            await self.spill.read(slot.extent, self._view(slot, padded=True))
        except BaseException:
            self._runs.give(slot.offset, slot.size)
            slot.offset = -1
            raise
        self._metrics.add("activations_read", slot.size)
        self._slots.put(slot, Place.CLEAN)

    def _view(self, slot: Slot, padded: bool = False) -> torch.Tensor:
        return self._block.tensor[slot.offset : slot.offset + (slot.size if padded else slot.nbytes)]

    # -- tasks and ends ------------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever needs it asks again

    def _start(self, slot: Slot, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        slot.task = task = self._begin(work)

        def ended(_: object) -> None:
            slot.task = None
            if slot() is None:
                self._release(slot)

        task.add_done_callback(ended)
        return task

    def _bury(self) -> None:
        while self.dead:
            self._release(self.dead.popleft())

    def _release(self, slot: Slot) -> None:
        """Take back what a dead piece has, unless it is in use; then whoever uses it comes here."""
        if slot.task is not None or slot.holds or not self._slots.remove(slot):
            return
        if slot is self._ahead:
            self._drop_ahead()
        slot.data = slot.mark = None
        self._landed(slot)
        if slot.offset >= 0:
            self._runs.give(slot.offset, slot.size)
            slot.offset = -1
        if slot.extent is not None:
            assert self.spill is not None
            self.spill.give(slot.extent)
            slot.extent = None

    def _landed(self, slot: Slot) -> None:
        if slot.behind:
            slot.behind = False
            self._behind -= slot.nbytes

    def _drop_ahead(self) -> None:
        slot, self._ahead = self._ahead, None
        if slot is not None:
            slot.ahead = None
