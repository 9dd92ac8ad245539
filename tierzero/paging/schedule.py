"""What comes next, what to keep and what to fetch: pure functions of recorded steps (see Note [trace] in recorded.py),
without torch.

Distances count uses from the current position: 0 is the very next use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from tierzero.paging.recorded import FAR, Follower, Unit


class Trace:
    """The expected order of unit uses.

    `guess` is an order to expect before the first step was recorded (it may be empty).

    `use` belongs to one thread; `next_use` and `upcoming` may be called from another and see either the old or the
    new position. A forward without gradients passes ``grad=False``: it follows a trace of its own and leaves the
    training trace where it was. Nobody needs to begin or end it.
    """

    def __init__(self, guess: Sequence[Unit] = ()) -> None:
        self._train = Follower(guess)
        self._eval = Follower()
        self._active = self._train
        self._used: dict[Unit, int] = {}  # unit -> tick of its last use, for units that no trace knows
        self._tick = 0
        self._switches = 0  # between training and evaluation
        self.departures = 0  # training uses that were not the expected one
        self.steps = 0
        self.recorded = False

    def begin_step(self, *, grad: bool = True) -> None:
        """Start a step.

        What an unfinished one had recorded is dropped, so a step that ended in an exception may simply be begun
        again.
        """
        self._follow(self._train if grad else self._eval)
        self._active.begin()

    def use(self, uid: Unit, *, grad: bool = True) -> bool:
        """Record one use; whether it was the expected one."""
        self._tick += 1
        self._used[uid] = self._tick
        follower = self._train if grad else self._eval
        self._follow(follower)
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
        self._follow(self._train)
        return follower.end()

    def _follow(self, follower: Follower) -> None:
        if self._active is not follower:
            self._active = follower
            self._switches += 1

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
        place, position = self.place(uid), self._active.position
        return max(place - position, 0) if place < FAR // 2 else place

    def place(self, uid: Unit) -> int:
        """Where `uid` is next expected. Places order units as `next_use` does, and stay the same within an `era`
        but for the units that are used, or passed over by a departure.
        """
        active = self._active
        place = active.due.get(uid, -1)
        if active.position <= place < FAR:
            return place  # the usual case, without another call
        place = active.place(uid)
        if place < FAR:
            return place
        if active is not self._train:
            place = self._train.place(uid)  # known to training only, which goes on when the evaluation is over
            if place < FAR:
                return len(active.step.uses) + place - self._train.position
        return FAR - self._used.get(uid, 0)

    @property
    def position(self) -> int:
        """The place of the very next use."""
        return self._active.position

    @property
    def era(self) -> int:
        """A number that changes whenever places may come nearer: as a step begins, between training and evaluation, and
        as a departure goes back. Within one they only move on, but for units that no trace knows.
        """
        return self._switches + self._train.changes + self._eval.changes

    def at(self, place: int) -> Unit | None:
        """The unit expected at `place`; None behind the last place that anything is known of."""
        return self._active.at(place)

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
                    (next_use(u), -i, u)
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
