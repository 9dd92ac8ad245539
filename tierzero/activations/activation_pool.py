"""The pool of activations: pieces leave the device in forward and come back for backward. All on the loop thread.

Forward only says that a piece is there; its copy is made behind its back, and forward waits where too many are behind.
While backward goes on, pieces are read from the drives, youngest first, into the room that it has freed, and the next
one is copied to the device before it is wanted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import torch

from tierzero.activations.activation_room import ActivationRoom
from tierzero.activations.activation_slots import Place, Slot
from tierzero.errors import TierzeroError
from tierzero.monitoring.metrics import Metrics
from tierzero.paging.transfer import Transfer
from tierzero.storage.spill import SpillFile
from tierzero.tiers.host import Block

READS = 2  # at a time ahead of backward: a fetch of parameters must not wait behind many


class ActivationPool(ActivationRoom):
    """Pieces of activations within `block` of host memory, and beyond it on `spill`, None where there is no drive."""

    def __init__(self, block: Block, spill: SpillFile | None, transfer: Transfer, metrics: Metrics) -> None:
        super().__init__(block, spill, transfer, metrics)
        self.failure: BaseException | None = None  # that kept a piece on the device
        self._queue: deque[Slot] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._reading = 0

    # -- out -----------------------------------------------------------------------------------------------------------

    def admit(self, slot: Slot) -> None:
        """Take a new piece's bytes off the device as soon as there is room for them."""
        self._bury()
        if self.closed or slot() is None:
            return
        self._cursor = -1
        self._drop_ahead()
        self._slots.add(slot)
        slot.behind = True
        self._behind += slot.nbytes
        if self._worker is None:
            offset = self._room_now(slot.size)
            if offset is not None or self.spill is None:
                self._stow(slot, offset)
                return
            self._worker = self._begin(self._work())
        self._queue.append(slot)

    def touch(self, slot: Slot, index: int) -> None:
        """The piece was saved once more."""
        self._slots.touch(slot, index)

    async def settle(self, limit: int) -> None:
        """Return when at most `limit` bytes wait for their copy. Raises what has kept one from being made."""
        while self._behind > limit and self._tasks and not self.closed:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._bury()
        self.fail()

    def fail(self) -> None:
        """Raise, once, what has kept a piece on the device. From any thread."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # it refers to this frame, and to those of a forward, which has a graph

    async def _work(self) -> None:
        while self._queue:
            slot = self._queue.popleft()
            offset = None
            try:
                if slot() is not None:
                    offset = await self._room(slot.size)
            except Exception as error:  # the piece stays on the device, and whoever saves the next one hears of it
                self.failure = error
            self._stow(slot, offset)
        self._worker = None

    def _stow(self, slot: Slot, offset: int | None) -> None:
        data = slot.data
        if offset is None or slot() is None or data is None or not slot.whole:
            if offset is not None:
                self._runs.give(offset, slot.size)
            if slot() is not None:
                self._metrics.add("activations_kept", slot.nbytes)
            self._landed(slot)
            return
        slot.offset = offset
        self.peak = max(self.peak, self.capacity - self._runs.free_bytes)
        try:
            event = self._transfer.stow(data, self._view(slot), slot.mark)
        except Exception as error:
            self._runs.give(offset, slot.size)
            slot.offset, self.failure = -1, error
            self._landed(slot)
            return
        if event is None:
            self._stowed(slot)
        else:
            self._start(slot, self._wait_stowed(slot, event))

    async def _wait_stowed(self, slot: Slot, event: Any) -> None:
        await self._transfer.arrived(event)
        self._stowed(slot)

    def _stowed(self, slot: Slot) -> None:
        self._metrics.add("activations_offloaded", slot.nbytes)
        self._slots.put(slot, Place.DIRTY)
        slot.data = slot.mark = None
        self._landed(slot)

    # -- back ----------------------------------------------------------------------------------------------------------

    async def bring(self, slot: Slot) -> tuple[torch.Tensor, Any]:
        """(uint8[nbytes] on the device, what Transfer.use takes) of a piece that somebody holds and whose storage is
        gone. OSError if the drive fails.
        """
        piece = slot()  # it lives until this is done, whatever becomes of the caller
        self._bury()
        self._check_open()
        if piece is None:
            raise TierzeroError(
                "the activations that were asked for are gone: an exception has ended the wait for them"
            )
        found = slot.ahead
        if slot.data is not None:
            raise TierzeroError(
                "the storage of a tensor that forward had saved for backward was resized since, and its values with "
                "it: resize it after backward, or save a copy"
            )
        if found is not None:
            slot.ahead = self._ahead = None
        else:
            self._cursor = slot.index
            self._brings += 1
            slot.holds += 1
            try:
                while slot.place is Place.AWAY:
                    await self._come(slot)
                    self._check_open()
                found = self._copy_back(slot)
            finally:
                slot.holds -= 1
                self._brings -= 1
        del piece
        self._cursor = slot.index
        asyncio.get_running_loop().call_soon(self._look_ahead)  # after the answer
        return found

    async def _come(self, slot: Slot) -> None:
        """Have a piece read from the drives."""
        if slot.task is not None:
            await asyncio.wait([slot.task])  # what was read ahead and failed is read again
            return
        offset = await self._room(slot.size, brings=1)
        if slot.task is not None or slot.place is not Place.AWAY:
            self._runs.give(offset, slot.size)
            return
        reading = self._read_into(slot, offset)
        await asyncio.wait([reading])
        try:
            reading.result()
        finally:
            del reading  # its exception refers to this frame

    def _check_open(self) -> None:
        if self.closed:
            raise TierzeroError(
                "backward needs activations that were given up when the engine was closed by tierzero.close(): run "
                "backward before that"
            )

    def _copy_back(self, slot: Slot) -> tuple[torch.Tensor, Any]:
        found = self._transfer.bring(self._view(slot))
        self._metrics.add("activations_restored", slot.nbytes)
        if found[1] is not None:
            slot.holds += 1
            self._begin(self._hold(slot, found[1]))
        return found

    async def _hold(self, slot: Slot, event: Any) -> None:
        """Leave the slot's run alone until it is copied."""
        try:
            await self._transfer.arrived(event)
        finally:
            slot.holds -= 1
            if slot() is None:
                self._release(slot)

    def _look_ahead(self) -> None:
        """Bring what backward uses next: one piece to the device, and from the drives what the pool has room for."""
        if self._cursor < 0 or self.closed:
            return
        self._bury()
        self._copy_ahead()
        while self._reading < READS:
            slot = self._slots.youngest(Place.AWAY, self._cursor)
            if slot is None:
                return
            offset = self._room_now(slot.size, below=slot.index)
            if offset is None:
                return
            self._reading += 1
            self._read_into(slot, offset).add_done_callback(self._read_ahead)

    def _read_ahead(self, task: asyncio.Task[None]) -> None:
        self._reading -= 1
        if task.exception() is None:  # or the drive fails: whoever needs the bytes hears of it
            self._look_ahead()

    def _copy_ahead(self) -> None:
        found = [self._slots.youngest(place, self._cursor) for place in (Place.DIRTY, Place.CLEAN, Place.AWAY)]
        slot = max((slot for slot in found if slot is not None), key=lambda slot: slot.index, default=None)
        if slot is self._ahead:
            return
        self._drop_ahead()
        if slot is not None and slot.place is not Place.AWAY:
            slot.ahead, self._ahead = self._copy_back(slot), slot

    def usage(self) -> dict[str, int]:
        """Bytes in use now and at most, for `stats`."""
        self._bury()
        spill = self.spill
        return {
            "activations_host": self.capacity - self._runs.free_bytes,
            "activations_host_peak": self.peak,
            "activations_nvme": spill.used if spill is not None else 0,
            "activations_nvme_peak": spill.peak if spill is not None else 0,
            "activations_waiting": self._behind,
        }

    async def stop(self) -> None:
        """Wait for what is on its way and give everything up; what is in a graph still cannot be unpacked any more."""
        self.closed = True
        await self.drained()
        self.abandon()

    async def drained(self) -> None:
        """Return when nothing is on its way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def abandon(self) -> None:
        """The same without waiting: whoever does I/O keeps its file open until that is done."""
        self.closed = True
        self._drop_ahead()
        if self.spill is not None:
            self.spill.close()
