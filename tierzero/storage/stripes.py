"""How one data file lies over several drives: weights from measured bandwidths, and what fits. Pure arithmetic.

Note [stripes]
Member i of n takes `weights[i]` stripes of every sum(weights) consecutive ones, so it holds weights[i] / sum(weights)
of the bytes and, if the weights are in proportion to the bandwidths, all members finish a long transfer together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STRIPE = 1 << 20  # bytes; a record of a few MiB then already lies on every drive
WEIGHTS_MAX = 64  # sum of the weights: few enough stripes in a period that a record sees the right proportion


@dataclass(frozen=True)
class Layout:
    """The members of one data file: a random store id, and per member its file's name and weight; `stripe` in bytes."""

    store: str
    files: tuple[str, ...]
    weights: tuple[int, ...]
    stripe: int

    @property
    def count(self) -> int:
        """How many members there are."""
        return len(self.files)


def stripe_weights(bandwidths: Sequence[float | None]) -> list[int]:
    """Small integers in proportion to `bandwidths` (bytes/s): at least 1 each, at most 64 together.

    Equal where any bandwidth is unknown (None), not positive or not finite. With more than 64 members all are 1.
    """
    known = [value for value in bandwidths if value is not None and 0 < value < math.inf]
    if not 0 < len(known) <= WEIGHTS_MAX or len(known) < len(bandwidths):
        return [1] * len(bandwidths)
    best = [1] * len(known)
    error = _error(best, known)
    for total in range(len(known) + 1, WEIGHTS_MAX + 1):
        weights = _shares(known, total)
        now = _error(weights, known)
        if now < error - 0.01:  # a longer period must save a hundredth of the time: measurements are no better
            best, error = weights, now
    common = math.gcd(*best)
    return [weight // common for weight in best]


def _shares(bandwidths: Sequence[float], total: int) -> list[int]:
    """`total` handed out one by one, each to the member that is the fastest for its weight; at least 1 each."""
    weights = [1] * len(bandwidths)
    for _ in range(total - len(bandwidths)):
        index = max(range(len(weights)), key=lambda i: bandwidths[i] / (weights[i] + 1))
        weights[index] += 1
    return weights


def _error(weights: Sequence[int], bandwidths: Sequence[float]) -> float:
    """The time that the slowest member takes, against the time if all finished together, less 1."""
    slowest = max(weight / bandwidth for weight, bandwidth in zip(weights, bandwidths, strict=True))
    return slowest * math.fsum(bandwidths) / sum(weights) - 1


def room(drives: Sequence[int], free: Mapping[int, int], weights: Sequence[int]) -> tuple[int, int]:
    """(bytes that the data file may still grow by, the index of the member that decides).

    drives: which drive each member lies on; members on one drive share what is `free` (bytes) there.
    """
    total = sum(weights)
    most: tuple[int, int] | None = None
    for index, drive in enumerate(drives):
        share = sum(weight for other, weight in zip(drives, weights, strict=True) if other == drive)
        grows = max(free[drive], 0) * total // share
        if most is None or grows < most[0]:
            most = (grows, index)
    assert most is not None
    return most


def shortest(sizes: Sequence[int], weights: Sequence[int]) -> int:
    """The member whose file of `sizes` bytes holds the least for its weight."""
    return min(range(len(sizes)), key=lambda index: sizes[index] / weights[index])
