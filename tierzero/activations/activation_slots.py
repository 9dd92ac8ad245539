"""What the pool has for each piece of activations, and in which order backward will want them.

Note [places]
A piece of activations is on the device (its copy is on its way, or there is no room for it anywhere), in the pool alone
(DIRTY), in the pool and on the drives (CLEAN), or on the drives alone (AWAY). A clean copy leaves at no cost. A piece
that is being read, written or copied stays where it is.

Note [the end of a piece]
Only autograd's graph refers to a Piece, so whatever drops the graph, a backward or an exception, ends it. A slot is a
weak reference to it with `deque.append` for its callback: C code, in which no signal handler can raise. Whatever the
pool does next takes the bytes back first.
"""

from __future__ import annotations

import asyncio
import enum
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from tierzero.storage.extents import Extent
from tierzero.units.layout import PAGE, round_up


class Place(enum.Enum):
    """See Note [places]."""

    DEVICE = "device"
    DIRTY = "dirty"
    CLEAN = "clean"
    AWAY = "away"


class Piece(Protocol):
    """What autograd's graph holds."""

    @property
    def alive(self) -> bool:
        """Whether its bytes are on the device in any case."""
        ...


class Slot(weakref.ref[Piece]):
    """What the pool has for one piece: `data` is uint8[nbytes] on the device while it lies there. `index` orders the
    pieces by when they were saved. See Note [the end of a piece].
    """

    __slots__ = (
        *("ahead", "behind", "data", "extent", "holds", "index", "mark", "nbytes", "number"),
        *("offset", "place", "size", "task"),
    )

    def __new__(cls, piece: Piece, data: torch.Tensor, mark: Any, number: int, dead: deque[Any]) -> Slot:
        return super().__new__(cls, piece, dead.append)

    def __init__(self, piece: Piece, data: torch.Tensor, mark: Any, number: int, dead: deque[Any]) -> None:
        super().__init__(piece, dead.append)  # type: ignore[call-arg]
        self.data: torch.Tensor | None = data
        self.mark = mark
        self.nbytes = data.numel()
        self.size = round_up(self.nbytes, PAGE)
        self.number = self.index = number
        self.place = Place.DEVICE
        self.behind = False  # its copy out has not been made yet
        self.offset = -1  # of its run in the pool
        self.extent: Extent | None = None
        self.task: asyncio.Task[None] | None = None  # that copies it out, writes or reads it
        self.holds = 0  # copies from its run that are on their way
        self.ahead: tuple[torch.Tensor, Any] | None = None  # its bytes on the device, before they are wanted

    @property
    def whole(self) -> bool:
        """Whether the storage of `data` was not made smaller."""
        data = self.data
        return data is not None and data.untyped_storage().nbytes() >= int(data.storage_offset()) + self.nbytes

    @property
    def ready(self) -> bool:
        """Whether its bytes can be had without waiting for a drive. From any thread."""
        return self.place is not Place.AWAY or self.ahead is not None


class Slots:
    """All slots, by place and age."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._order: dict[Place, list[tuple[int, int]]] = {place: [] for place in Place}  # (index, number)

    def add(self, slot: Slot) -> None:
        """Put in a new one."""
        self._slots[slot.number] = slot
        insort(self._order[slot.place], (slot.index, slot.number))

    def remove(self, slot: Slot) -> bool:
        """Take one out; whether it was in."""
        if self._slots.pop(slot.number, None) is None:
            return False
        order = self._order[slot.place]
        del order[bisect_left(order, (slot.index, slot.number))]
        return True

    def put(self, slot: Slot, place: Place) -> None:
        """Note where its bytes lie now."""
        there = self.remove(slot)
        slot.place = place
        if there:
            self.add(slot)

    def touch(self, slot: Slot, index: int) -> None:
        """Its piece was saved once more: backward uses it sooner."""
        there = self.remove(slot)
        slot.index = index
        if there:
            self.add(slot)

    def oldest(self, place: Place) -> Slot | None:
        """The first one saved that lies there and is not in use."""
        return self._idle(self._order[place])

    def newest(self, place: Place) -> Slot | None:
        """The last one saved that lies there and is not in use."""
        return self._idle(reversed(self._order[place]))

    def _idle(self, order: Iterable[tuple[int, int]]) -> Slot | None:
        for _, number in order:
            slot = self._slots[number]
            if slot.task is None and not slot.holds:
                return slot
        return None

    def youngest(self, place: Place, below: int) -> Slot | None:
        """The last one there that was saved before `below`, and whose bytes are not on their way to the device."""
        order = self._order[place]
        for at in range(bisect_left(order, (below, -1)) - 1, -1, -1):
            slot = self._slots[order[at][1]]
            piece = slot()
            if piece is not None and not piece.alive and (place is not Place.AWAY or slot.task is None):
                return slot
        return None
