"""What is left of the host budget, for optimizers that were not known when it was divided."""

from __future__ import annotations

import asyncio

from tierzero.errors import BudgetError
from tierzero.tiers.base import aligned_empty
from tierzero.tiers.host import Block, HostArena
from tierzero.units.layout import PAGE, round_up


class LooseBlock:
    """As a Block, where the arena has no run for it; its pages are ordinary memory, counted in the share."""

    def __init__(self, share: HostShare, nbytes: int) -> None:
        self.tensor = aligned_empty(nbytes)
        self.nbytes = nbytes
        self._share: HostShare | None = share
        share.outside += round_up(nbytes, PAGE)

    def free(self) -> None:
        """Give the bytes back. Harmless when done already."""
        if self._share is not None:
            self._share.outside -= round_up(self.nbytes, PAGE)
            self._share = None


class HostShare:
    """`budget` is the user's, in bytes; the arena may be smaller. `turn`: whoever holds it may use the `work` bytes."""

    def __init__(self, arena: HostArena, budget: int) -> None:
        self.arena = arena
        self.budget = budget
        self.outside = 0
        self.work = 0
        self.turn = asyncio.Lock()

    @property
    def left(self) -> int:
        """Bytes that nobody has."""
        return self.budget - self.arena.used - self.outside - self.work

    def block(self, nbytes: int, what: str) -> Block | LooseBlock:
        """A block of uint8[nbytes] for `what`. BudgetError if the budget cannot hold it."""
        self.check(round_up(nbytes, PAGE), what)
        try:
            return self.arena.allocate(nbytes, what)
        except BudgetError:
            return LooseBlock(self, nbytes)

    def set_aside(self, nbytes: int, what: str) -> None:
        """Have `nbytes` of working memory, or more, for one update at a time. BudgetError if the budget has not."""
        if nbytes > self.work:
            self.check(nbytes - self.work, what)
            self.work = nbytes

    def check(self, more: int, what: str, movable: int = 0) -> None:
        """BudgetError if `what` needs `more` bytes than are left when `movable` bytes of the others are gone."""
        if more > self.left + movable:
            taken = self.budget - self.left - movable
            raise BudgetError(
                f"the host budget of {self.budget} bytes cannot hold {more} more for {what}: {taken} are taken. The "
                f"smallest host budget that works for this is {taken + more} bytes"
            )
