"""Gates: what a save has still to read of a unit keeps waiting what would change it.

Note [gates]
A save that goes on beside training reads a unit's records and gradients as they were when it began. What lies in the
store stays readable by itself (see versions' Note [copy on write]); host memory is written in place, and a second copy
of it would be memory that nobody has granted. So whoever changes host bytes of a unit waits until the save has read
them, and the save reads first what somebody waits for. A gate is closed and opened on the loop thread; other threads
look at it, and wait on the loop. `unit.gate` is None when nothing is being saved.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Gate:
    """One unit's. `before`: the update that was queued when the save began; its results are what is saved.
    `gradients`: whether they are saved too.
    """

    def __init__(self, before: Any, *, gradients: bool) -> None:
        self.before = before
        self.wanted = False  # somebody waits
        self._records = asyncio.Event()
        self._gradients = asyncio.Event()
        if not gradients:
            self._gradients.set()

    def holds(self, update: Any) -> bool:
        """Whether `update` (None: any other change of the records) has to wait."""
        return not self._records.is_set() and (update is None or update is not self.before)

    @property
    def holds_gradients(self) -> bool:
        """Whether what changes the gradients has to wait."""
        return not self._gradients.is_set()

    async def records(self) -> None:
        """Return when the records may change."""
        self.wanted |= not self._records.is_set()
        await self._records.wait()

    async def gradients(self) -> None:
        """Return when the gradients may change."""
        self.wanted |= not self._gradients.is_set()
        await self._gradients.wait()

    def open_gradients(self) -> None:
        """Let the gradients change from here on."""
        self._gradients.set()
        self.wanted &= not self._records.is_set()

    def open(self, *, gradients: bool = True) -> None:
        """Let the records change from here on, and the gradients."""
        self._records.set()
        if gradients:
            self._gradients.set()
        self.wanted &= self.holds_gradients


def held(unit: Any) -> bool:
    """Whether the unit's queued update waits for a save."""
    gate: Gate | None = unit.gate
    return gate is not None and unit.pending is not None and gate.holds(unit.pending)
