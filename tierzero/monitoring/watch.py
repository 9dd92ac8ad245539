"""Who is told what the training thread does: a recorder, a profiler, both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Sink(Protocol):
    """Hears of spans of the training thread, which nest. `key` tells a span from the others that are open."""

    def begin(self, key: object, kind: str, name: str) -> None:
        """A span begins inside those that are open."""
        ...

    def end(self, key: object) -> None:
        """It ends, and with it whatever is still open inside it; nothing happens if it is not open."""
        ...

    def clear(self) -> None:
        """Nothing is open any more."""
        ...


class Watch:
    """Tells several sinks the same."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = tuple(sinks)

    def begin(self, key: object, kind: str, name: str) -> None:
        for sink in self.sinks:
            sink.begin(key, kind, name)

    def end(self, key: object) -> None:
        for sink in self.sinks:
            sink.end(key)

    def clear(self) -> None:
        for sink in self.sinks:
            sink.clear()


class Nest(Generic[T]):
    """The spans that are open, outermost first, as Sinks keep them: a key each, and what belongs to it."""

    def __init__(self) -> None:
        self._open: list[tuple[object, T]] = []

    def __contains__(self, key: object) -> bool:
        return any(other is key or other == key for other, _ in self._open)

    def push(self, key: object, what: T) -> None:
        """Open one more."""
        self._open.append((key, what))

    def pop(self, key: object) -> list[T]:
        """Close `key` and what is inside it, innermost first; what was pushed for each."""
        if key not in self:
            return []
        closed: list[T] = []
        while True:
            other, what = self._open.pop()
            closed.append(what)
            if other is key or other == key:
                return closed

    def pop_all(self) -> list[T]:
        """Close all, innermost first."""
        closed = [what for _, what in reversed(self._open)]
        self._open.clear()
        return closed


__all__ = ["Nest", "Sink", "Watch"]
