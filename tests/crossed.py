"""Combinations of several properties: half of all there are, among them every combination of all properties but one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def crossed(*properties: Iterable[Any], two: tuple[Any, Any]) -> list[Any]:
    """Parameters of a test: all combinations of `properties`, each with one of the values in `two`, which is the other
    one for a neighbour in any of them: whichever property one leaves out, the others appear in all combinations.
    """
    found = []
    for numbered in itertools.product(*map(enumerate, properties)):
        values = [value for _, value in numbered]
        values.append(two[sum(number for number, _ in numbered) % 2])
        found.append(pytest.param(*values, id="-".join(map(str, values))))
    return found
