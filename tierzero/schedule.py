"""What comes next, what to keep and what to fetch: pure functions of one recorded step, without torch or tierzero.

Note [trace]
The sequence of unit uses of one training step (forward, recomputation, backward, update) is recorded and expected
again in the next step, cyclically. A use that is not the expected one is a *departure*: it costs a prefetch, never
correctness. A departure may have skipped units (a branch not taken) or inserted one (a block used twice); which of
the two shows at the next use. So both positions are kept: the one behind the nearest later occurrence, and the old
one, and whichever matches next wins. A step that differed becomes the expected one at its end; a few earlier ones are
remembered, so that alternating steps are recognised at their first difference, and each remembers which step came
after it.

Distances count uses from the current position: 0 is the very next use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

Unit = int  # a unit's id

FAR = 1 << 62  # the distance of a use that no trace knows
_KNOWN = 4  # steps remembered
_LONGEST = 1 << 18  # uses recorded before a step that nobody ends is taken to have ended


@dataclass(eq=False)
class _Step:
    """One recorded step: the uses in order, and where each unit occurs.

    Immutable but for `after`, the step that followed it.
    """

    uses: tuple[Unit, ...]
    at: dict[Unit, list[int]] = field(default_factory=dict)
    after: _Step | None = None

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


class _Follower:
    """Follows one stream of steps. See Note [trace]."""

    def __init__(self, guess: Sequence[Unit] = ()) -> None:
        self.step = _Step(tuple(guess))
        self.known: list[_Step] = []  # most recent first
        self.position = 0
        self.other = -1  # the position to go back to when a departure turns out to have been an insertion
        self.exact = True  # the step so far is a prefix of the expected one
        self.now: list[Unit] = []
        self.due: dict[
            Unit, int
        ] = {}  # unit -> where it comes next, counted from the step's start; right while not behind `position`

    def begin(self) -> None:
        if self.known:
            self.step = self.known[0].after or self.known[0]
        self.position, self.other, self.exact = 0, -1, True
        self.now = []
        self.due = {}

    def use(self, uid: Unit) -> bool:
        if len(self.now) >= _LONGEST:
            self.end()
        self.now.append(uid)
        uses, position = self.step.uses, self.position
        if position < len(uses) and uses[position] == uid:
            self.position = position + 1
            return True
        if 0 <= self.other < len(uses) and uses[self.other] == uid:
            self.position, self.other, self.due = self.other + 1, -1, {}
            return False
        if self.exact and self._switch():
            return False
        self.exact = False
        found = self.step.ahead(uid, position)
        if found < 0 and self.other >= 0:
            found, position = self.step.ahead(uid, self.other), self.other
        if found >= 0:
            self.position, self.other, self.due = found + 1, position, {}
        return False

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
            step = self.step if self.step.uses == uses else _Step(uses)
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

    def following(self) -> _Step:
        """The step expected after the present one."""
        if self.step.after is not None:
            return self.step.after
        return self.step

    def next_use(self, uid: Unit) -> int:
        due = self.due.get(uid, -1)
        if due < self.position:
            due = self.due[uid] = self._find(uid)
        return due - self.position if due < FAR else FAR

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

    def expected(self) -> Iterator[Unit]:
        step, position, following = self.step, self.position, self.following()
        for index in range(position, len(step.uses)):
            yield step.uses[index]
        yield from following.uses
        if following is not step:
            yield from step.uses


class Trace:
    """The expected order of unit uses.

    `guess` is an order to expect before the first step was recorded (it may be empty).

    `use` belongs to one thread; `next_use` and `upcoming` may be called from another and see either the old or the
    new position. A forward without gradients passes ``grad=False``: it follows a trace of its own and leaves the
    training trace where it was. Nobody needs to begin or end it.
    """

    def __init__(self, guess: Sequence[Unit] = ()) -> None:
        self._train = _Follower(guess)
        self._eval = _Follower()
        self._active = self._train
        self._used: dict[Unit, int] = {}  # unit -> tick of its last use, for units that no trace knows
        self._tick = 0
        self.departures = 0  # training uses that were not the expected one
        self.steps = 0
        self.recorded = False

    def begin_step(self, *, grad: bool = True) -> None:
        """Start a step.

        What an unfinished one had recorded is dropped, so a step that ended in an exception may simply be begun
        again.
        """
        self._active = self._train if grad else self._eval
        self._active.begin()

    def use(self, uid: Unit, *, grad: bool = True) -> bool:
        """Record one use; whether it was the expected one."""
        self._tick += 1
        self._used[uid] = self._tick
        follower = self._train if grad else self._eval
        self._active = follower
        if not grad and follower.now and follower.now[0] == uid:
            follower.end()  # evaluation has no optimizer step: the first unit again is the next forward
        matched = follower.use(uid)
        if grad and self.recorded and not matched:
            self.departures += 1
        return matched

    def end_step(self, *, grad: bool = True) -> bool:
        """End a step and expect it again, or the one that followed it last time; whether it was one not seen before."""
        follower = self._train if grad else self._eval
        if grad and follower.now:
            self.recorded = True
            self.steps += 1
        self._active = self._train
        return follower.end()

    def upcoming(self, limit: int | None = None) -> Iterator[Unit]:
        """The next distinct units from the current position on, cyclically, at most `limit` of them, each once."""
        seen: set[Unit] = set()
        if limit is not None and limit <= 0:
            return
        for uid in self._active.expected():
            if uid not in seen:
                seen.add(uid)
                yield uid
                if len(seen) == limit:
                    return

    def next_use(self, uid: Unit) -> int:
        """Uses until `uid` is next expected (0: the very next); for a unit no trace knows at least FAR / 2, more the
        longer ago it was used.
        """
        active = self._active
        due = active.due.get(uid, -1)
        if active.position <= due < FAR:
            return due - active.position  # the usual case, without another call
        distance = active.next_use(uid)
        if distance == FAR and active is not self._train:
            distance = self._train.next_use(uid)
            if distance < FAR:
                distance += len(active.step.uses)
        return distance if distance < FAR else FAR - self._used.get(uid, 0)

    def due(self, uid: Unit) -> int:
        """When a unit is next used, on a clock that ticks with every use; constant until then if all goes well."""
        return self._tick + min(self.next_use(uid), FAR)


def choose_victims(
    resident: Mapping[Unit, int], need: int, next_use: Callable[[Unit], int], keep: Collection[Unit] = frozenset()
) -> list[Unit] | None:
    """The units to evict so that at least `need` bytes come free.

    Furthest next use first (MIN), and none that could stay.

    `resident` maps each unit to its bytes; those in `keep` stay. None if even evicting all others is not enough.
    """
    if need <= 0:
        return []
    candidates = [
        (next_use(uid), index, uid)
        for index, (uid, nbytes) in enumerate(resident.items())
        if nbytes > 0 and uid not in keep
    ]
    chosen: list[Unit] = []
    freed = 0
    count = 4
    ordered = nlargest(count, candidates, key=_distance)
    for index in range(len(candidates)):
        if index == len(ordered):
            ordered = nlargest(len(candidates), candidates, key=_distance)  # rare: many small victims
        uid = ordered[index][2]
        chosen.append(uid)
        freed += resident[uid]
        if freed >= need:
            break
    if freed < need:
        return None
    # sizes differ: a later, larger victim may have made an earlier one needless; spare the soonest used first
    for uid in reversed(chosen[:-1]):
        if freed - resident[uid] >= need:
            freed -= resident[uid]
            chosen.remove(uid)
    return chosen


def _distance(candidate: tuple[int, int, Unit]) -> int:
    return candidate[0]


@dataclass(frozen=True)
class Fetch:
    """One unit to fetch, after evicting `victims`."""

    uid: Unit
    victims: tuple[Unit, ...] = ()


def prefetch_order(
    upcoming: Iterable[Unit],
    resident: Mapping[Unit, int],
    sizes: Mapping[Unit, int] | Callable[[Unit], int],
    budget: int,
    next_use: Callable[[Unit], int],
    *,
    keep: Collection[Unit] = frozenset(),
    depth: int | None = None,
    reserved: int = 0,
) -> list[Fetch]:
    """Which units to fetch ahead, in this order, so that residency stays within `budget` bytes throughout.

    `upcoming` are the next distinct units (`Trace.upcoming`), `resident` maps what is resident or on its way to its
    bytes, `reserved` bytes of the budget are not to be used. Looks at the next `depth` units, resident ones included;
    None looks as far ahead as the budget reaches. Evicts only units whose next use lies further than the fetched
    one's and that are not in `keep`. Stops at the first unit that does not fit: fetching one behind it would take the
    space that it needs sooner.
    """
    size_of = sizes if callable(sizes) else sizes.__getitem__
    free = budget - reserved - sum(resident.values())
    plan: list[Fetch] = []
    order: list[tuple[int, int, Unit]] | None = None  # evictable, the soonest used first
    for ahead, uid in enumerate(upcoming):
        if depth is not None and ahead >= depth:
            break
        if uid in resident:
            continue
        need = size_of(uid) - free
        victims: list[Unit] = []
        if need > 0:
            if order is None:
                order = sorted(
                    (next_use(u), i, u)
                    for i, (u, nbytes) in enumerate(resident.items())
                    if nbytes > 0 and u not in keep
                )
            reach = next_use(uid)
            freed = 0
            while freed < need and len(victims) < len(order) and order[-1 - len(victims)][0] > reach:
                victim = order[-1 - len(victims)][2]
                victims.append(victim)
                freed += resident[victim]
            if freed < need:
                break
            del order[len(order) - len(victims) :]
            free += freed
        free -= size_of(uid)
        plan.append(Fetch(uid, tuple(victims)))
    return plan
