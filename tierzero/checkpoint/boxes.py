"""How a tensor is cut into pieces that are boxes of its shape and runs of its elements at once: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True)
class Box:
    """A contiguous piece of a tensor: `offsets` and `sizes` in each dimension, elements [first, first + numel)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes(shape: Sequence[int], most: int) -> list[Box]:
    """Boxes of at most `most` elements that make up `shape`, in the order of the elements. A tensor without elements is
    one box.
    """
    shape = tuple(shape)
    if prod(shape) <= most:
        return [Box((0,) * len(shape), shape, 0)]
    cut = len(shape) - 1  # the dimension that is cut into ranges; those before it one by one
    while cut > 0 and prod(shape[cut:]) <= most:
        cut -= 1
    within = prod(shape[cut + 1 :])
    rows = max(most // within, 1)
    found: list[Box] = []
    first = 0
    for outer in product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], rows):
            count = min(rows, shape[cut] - start)
            offsets = (*outer, start, *(0 for _ in shape[cut + 1 :]))
            found.append(Box(offsets, (*(1 for _ in outer), count, *shape[cut + 1 :]), first))
            first += count * within
    return found
