"""Pins: who keeps a unit resident.

Note [weak pins]
A unit refers to its pins weakly, so a holder that is gone pins nothing: no exception, wherever it comes from, can leave
a pin that nobody will take back. Adding and discarding are one operation on a dict each, and doing either twice is
doing it once.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection


class Pin:
    """Keeps units resident: one running forward, say."""

    __slots__ = ("__weakref__",)

    def lends(self, uid: int) -> bool:
        """Whether it keeps the unit for a module that reads its weights."""
        return False


class Hold(Pin):
    """The pin of an `unsharded` block, which lasts whatever becomes of forwards."""

    __slots__ = ()


class Pins:
    """The pins of one unit. See Note [weak pins]."""

    __slots__ = ("_refs",)

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Pin]] = {}

    def __len__(self) -> int:
        return sum(ref() is not None for ref in tuple(self._refs.values())) if self._refs else 0

    def others(self, pin: Pin) -> bool:
        """Whether a pin that is not `pin` is there."""
        refs = self._refs
        return len(refs) > (id(pin) in refs) and any(
            key != id(pin) and ref() is not None for key, ref in tuple(refs.items())
        )

    def __contains__(self, pin: Pin) -> bool:
        return id(pin) in self._refs

    def lent(self, uid: int) -> bool:
        """Whether they keep the unit, `uid`, for a module that reads its weights."""
        pins = [ref() for ref in tuple(self._refs.values())]
        return any(pin is not None and pin.lends(uid) for pin in pins)

    def add(self, pin: Pin) -> None:
        """Add `pin`."""
        self._refs[id(pin)] = weakref.ref(pin)

    def discard(self, pin: Pin) -> None:
        """Take `pin` away, if it is there."""
        self._refs.pop(id(pin), None)

    def keep(self, running: Collection[Pin]) -> None:
        """Take all away but `running` and those of `unsharded` blocks."""
        for key, ref in list(self._refs.items()):
            pin = ref()
            if pin is None or not (isinstance(pin, Hold) or pin in running):
                self._refs.pop(key, None)
