"""How far ahead to fetch: where theory puts the knee, and a search for it in few measurements. Pure.

Note [knee]
Equal units, each computing for c seconds and taking f = bytes / bandwidth on a link that moves one after the other,
and arriving l later (the link's delay). With depth d the fetch of a unit begins d uses before its own, so a use takes
at least (f + l) / d; it takes at least c, and at least f. Depth 0 fetches on demand: c + f + l. So the time of a step
falls with the depth until (f + l) / d <= max(c, f), and is flat from there on: the knee is the number of units that
cover a fetch at the rate at which they are used, the bandwidth-delay product in units. Without delay it is 1, whatever
the bandwidth; uneven units, and optimizer traffic on the same drive, move it up.

Note [search]
Because it falls and then is flat, doublings from 1 and the largest depth find a losing and a winning depth next to each
other, halving finds the knee between them, and a final in turns decides between it, its neighbour, whatever was fastest
and the largest depth, which by theory nothing beats, so that a drive's moods hit all of them. Losers are dropped in
between.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

NEAR = 0.03  # of the best: as good as it, as far as one short measurement can tell
EQUAL = 0.005  # the same, in the final
LOST = 1.5  # times the best: not worth another second
ROUNDS = 5  # measurements of a finalist


def step_of(depth: int, compute: float, transfer: float, delay: float) -> float:
    """Seconds between two uses of units at this depth; see Note [knee]. All times are seconds."""
    if depth == 0:
        return compute + transfer + delay
    return max(compute, transfer, (transfer + delay) / depth)


def knee(compute: float, transfer: float, delay: float) -> int:
    """The least depth at which the time is that of unlimited depth."""
    slowest = max(compute, transfer)
    if transfer + delay <= 0:
        return 0  # nothing to wait for
    return max(1, math.ceil((transfer + delay) / slowest - 1e-9))


@dataclass
class Found:
    """Seconds of a step by depth, in the order measured; `chosen` once the search is over, `complete` unless its time
    was over first.
    """

    samples: dict[int, list[float]] = field(default_factory=dict)
    chosen: int | None = None
    complete: bool = True

    def time(self, depth: int) -> float:
        """The median."""
        return statistics.median(self.samples[depth])

    def best(self) -> float:
        """Of all depths; infinite before the first."""
        return min(map(self.time, self.samples), default=math.inf)

    @property
    def count(self) -> int:
        return sum(map(len, self.samples.values()))


# (depth, seconds beyond which it has lost) -> seconds of a step
Measure = Callable[[int, float], float]


class Enough(Exception):
    """The time for measuring is over."""


def search(measure: Measure, largest: int, *, rounds: int = ROUNDS, over: Callable[[], bool] = lambda: False) -> Found:
    """The smallest depth of 0..largest whose step is as fast as the fastest; see Note [search].

    measure: one short measurement; it may end early with any time above its limit. rounds: measurements of each
    finalist. over: whether to stop measuring and choose from what is known. Raises ValueError for largest < 0.
    """
    if largest < 0:
        raise ValueError(f"the largest depth is 0 or more, not {largest}")
    found = Found()

    def take(depth: int) -> float:
        if found.samples and over():
            raise Enough
        seconds = measure(depth, LOST * found.best())
        found.samples.setdefault(depth, []).append(seconds)
        return found.time(depth)

    def wins(depth: int) -> bool:
        return found.time(depth) <= (1 + NEAR) * found.best()

    try:
        loser, winner = _ladder(largest, take, wins, found)
        while winner - loser > 1:
            middle = (loser + winner) // 2
            take(middle)
            if len(found.samples[winner]) < rounds:
                take(winner)
            if wins(middle):
                winner = middle
            else:
                loser = middle
        finalists = _final(largest, winner, rounds, take, found)
    except Enough:
        finalists, found.complete = list(found.samples), False
    best = min(map(found.time, finalists))
    found.chosen = min(depth for depth in finalists if found.time(depth) <= (1 + EQUAL) * best)
    return found


def _rungs(largest: int) -> Iterator[int]:
    rung = 1  # 0, the slowest of all, is looked at only if 1 wins
    while rung < largest:
        yield rung
        rung *= 2


def _ladder(largest: int, take: Callable[[int], float], wins: Callable[[int], bool], found: Found) -> tuple[int, int]:
    """(the largest depth known to lose below all that win or -1, the smallest that wins)."""
    take(largest)
    before = math.inf
    for rung in _rungs(largest):
        time = take(rung)
        if time > (1 - NEAR) * before and wins(rung):
            break  # flat, and as good as any
        before = time
    winner = min(filter(wins, found.samples))
    return max((depth for depth in found.samples if depth < winner), default=-1), winner


def _final(largest: int, winner: int, rounds: int, take: Callable[[int], float], found: Found) -> list[int]:
    """Those that have `rounds` measurements, among them the fastest of all."""
    running = [winner, min(winner + 1, largest)]
    while True:
        fastest = min(found.samples, key=found.time)
        for depth in dict.fromkeys((*running, fastest, largest)):
            if len(found.samples.get(depth, ())) < rounds:
                take(depth)
        best = found.best()
        running = [depth for depth in running if found.time(depth) <= (1 + NEAR) * best]
        fastest = min(found.samples, key=found.time)
        if all(len(found.samples[depth]) >= rounds for depth in (*running, fastest)):
            return [depth for depth, many in found.samples.items() if len(many) >= rounds]
