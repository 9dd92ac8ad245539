"""Recorded steps, and following one: where a training step is in the order of uses that is expected of it.

Note [trace]
The sequence of unit uses of one training step (forward, recomputation, backward, update) is recorded and expected
again in the next step, cyclically. A use that is not the expected one is a *departure*: it costs a prefetch, never
correctness. A departure may have skipped units (a branch not taken) or inserted one (a block used twice); which of
the two shows at the next use. So both positions are kept: the one behind the nearest later occurrence, and the old
one, and whichever matches next wins. A step that differed becomes the expected one at its end; a few earlier ones are
remembered, so that alternating steps are recognised at their first difference, and each remembers which step came
after it.

A place is a position in the expected step; places behind its end are in the step expected after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Unit = int  # a unit's id

FAR = 1 << 62  # the place of a use that no trace knows
_KNOWN = 4  # steps remembered
_LONGEST = 1 << 18  # uses recorded before a step that nobody ends is taken to have ended


@dataclass(eq=False)
class Step:
    """One recorded step: the uses in order, and where each unit occurs.

    Immutable but for `after`, the step that followed it.
    """

    uses: tuple[Unit, ...]
    at: dict[Unit, list[int]] = field(default_factory=dict)
    after: Step | None = None

    def __post_init__(self) -> None:
        for index, uid in enumerate(self.uses):
            self.at.setdefault(uid, []).append(index)

    def ahead(self, uid: Unit, position: int) -> int:
        """The first occurrence of `uid` at or after `position`, or -1."""
        places = self.at.get(uid)
        if places is None:
            return -1
        index = bisect_left(places, position)
        return places[index] if index < len(places) else -1


class Follower:
    """Follows one stream of steps. See Note [trace]."""

    def __init__(self, guess: Sequence[Unit] = ()) -> None:
        self.step = Step(tuple(guess))
        self.known: list[Step] = []  # most recent first
        self.position = 0
        self.other = -1  # the position to go back to when a departure turns out to have been an insertion
        self.exact = True  # the step so far is a prefix of the expected one
        self.now: list[Unit] = []
        self.changes = 0  # how often places came to mean something else
        self.due: dict[Unit, int] = {}  # unit -> the place of its next use; right while not behind `position`

    def begin(self) -> None:
        if self.known:
            self.step = self.known[0].after or self.known[0]
        self.position, self.other, self.exact = 0, -1, True
        self.now = []
        self.due = {}
        self.changes += 1

    def use(self, uid: Unit) -> bool:
        if len(self.now) >= _LONGEST:
            self.end()
        self.now.append(uid)
        uses, position = self.step.uses, self.position
        if position < len(uses) and uses[position] == uid:
            self.position = position + 1
            return True
        if 0 <= self.other < len(uses) and uses[self.other] == uid:
            self._go(self.other + 1, -1)
            return False
        if self.exact and self._switch():
            return False
        self.exact = False
        found = self.step.ahead(uid, position)
        if found < 0 and self.other >= 0:
            found, position = self.step.ahead(uid, self.other), self.other
        if found >= 0:
            self._go(found + 1, position)
        return False

    def _go(self, position: int, other: int) -> None:
        self.changes += position < self.position
        self.position, self.other, self.due = position, other, {}

    def _switch(self) -> bool:
        """Change to a remembered step that begins exactly as this one did."""
        count = len(self.now)
        for step in self.known:
            if (
                step is not self.step
                and len(step.uses) >= count
                and step.uses[count - 1] == self.now[-1]
                and list(step.uses[:count]) == self.now
            ):
                self.step, self.position, self.other, self.due = step, count, -1, {}
                self.changes += 1
                return True
        return False

    def end(self) -> bool:
        """Adopt the step just recorded; whether it was a new one."""
        uses = tuple(self.now)
        if not uses:
            return False
        previous = self.known[0] if self.known else None
        step = next((known for known in self.known if known.uses == uses), None)
        new = step is None
        if step is None:
            step = self.step if self.step.uses == uses else Step(uses)
        else:
            self.known.remove(step)
        if previous is not None:
            previous.after = step
        self.known.insert(0, step)
        for dropped in self.known[_KNOWN:]:
            dropped.after = None
            for known in self.known:
                if known.after is dropped:
                    known.after = None
        del self.known[_KNOWN:]
        self.begin()
        return new

    def following(self) -> Step:
        """The step expected after the present one."""
        if self.step.after is not None:
            return self.step.after
        return self.step

    def place(self, uid: Unit) -> int:
        """Where `uid` comes next, or FAR."""
        due = self.due.get(uid, -1)
        if due < self.position:
            due = self.due[uid] = self._find(uid)
        return due

    def _find(self, uid: Unit) -> int:
        step = self.step
        found = step.ahead(uid, self.position)
        if found >= 0:
            return found
        following = self.following()
        places = following.at.get(uid)
        if places is not None:
            return len(step.uses) + places[0]
        places = step.at.get(uid)
        return len(step.uses) + len(following.uses) + places[0] if places is not None else FAR

    def at(self, place: int) -> Unit | None:
        """The unit expected at `place`; None behind the last place that anything is known of."""
        step, following = self.step, self.following()
        if place < len(step.uses):
            return step.uses[place]
        place -= len(step.uses)
        if place < len(following.uses):
            return following.uses[place]
        place -= len(following.uses)
        return step.uses[place] if following is not step and place < len(step.uses) else None

    def expected(self) -> Iterator[Unit]:
        step, position, following = self.step, self.position, self.following()
        for index in range(position, len(step.uses)):
            yield step.uses[index]
        yield from following.uses
        if following is not step:
            yield from step.uses
