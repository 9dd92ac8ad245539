"""Combinations of several properties: half of all there are, among them every combination of all properties but one;
all of them with TIERZERO_TEST_ALL=1.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest

ALL = os.environ.get("TIERZERO_TEST_ALL") == "1"


def crossed(*properties: Iterable[Any], two: tuple[Any, Any]) -> list[Any]:
    """Parameters of a test: all combinations of `properties`, each with one of the values in `two`, which is the other
    one for a neighbour in any of them: whichever property one leaves out, the others appear in all combinations.
    """
    found = []
    for numbered in itertools.product(*map(enumerate, properties)):
        values = [value for _, value in numbered]
        turn = sum(number for number, _ in numbered) % 2
        lasts = two if ALL else two[turn : turn + 1]
        found += [pytest.param(*values, last, id="-".join(map(str, [*values, last]))) for last in lasts]
    return found
