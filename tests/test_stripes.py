"""Weights of striped drives, and what fits on them: arithmetic, for every input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierzero.storage.stripes import WEIGHTS_MAX, room, shortest, stripe_weights

bandwidths = st.lists(st.floats(1e6, 2e10), min_size=1, max_size=8)


@given(bandwidths)
def test_weights_are_small_and_in_proportion(measured: list[float]) -> None:
    weights = stripe_weights(measured)
    assert len(weights) == len(measured)
    assert all(isinstance(weight, int) and weight >= 1 for weight in weights)
    assert sum(weights) <= WEIGHTS_MAX
    assert math.gcd(*weights) == 1
    for one, fast in zip(weights, measured, strict=True):
        for other, slow in zip(weights, measured, strict=True):
            if fast > slow:
                assert one >= other
    # no worse than equal stripes, and near the best possible where no drive is far slower than the others
    bound = math.fsum(measured) / sum(weights) * max(w / b for w, b in zip(weights, measured, strict=True))
    equal = math.fsum(measured) / len(measured) / min(measured)
    assert bound <= equal * (1 + 1e-9)
    if math.fsum(measured) / min(measured) <= 8:
        assert bound <= 1.15


@given(bandwidths, st.floats(0.5, 2.0))
def test_only_the_proportion_matters(measured: list[float], factor: float) -> None:
    weights = stripe_weights(measured)
    assert len(stripe_weights([factor * value for value in measured])) == len(weights)
    assert stripe_weights([4.0 * value for value in measured]) == weights


@given(bandwidths, st.sampled_from([None, 0.0, -1.0, math.nan, math.inf]), st.integers(0, 7))
def test_unknown_drives_are_taken_as_equal(measured: list[float], odd: float | None, at: int) -> None:
    known: list[float | None] = list(measured)
    known[at % len(known)] = odd
    assert stripe_weights(known) == [1] * len(known)


@pytest.mark.parametrize(
    ("measured", "weights"),
    [
        ([], []),
        ([3e9], [1]),
        ([3e9, 3e9], [1, 1]),
        ([6e9, 3e9], [2, 1]),
        ([3e9, 1e9, 2e9], [3, 1, 2]),
        ([1e9, 1.0], [63, 1]),
        ([7e9, 3.5e9, 3.5e9, 7e9], [2, 1, 1, 2]),
        ([1e9] * 64, [1] * 64),
        ([1e9] * 65, [1] * 65),
    ],
)
def test_plain_proportions(measured: list[float], weights: list[int]) -> None:
    assert stripe_weights(measured) == weights


members = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=6)


@given(members, st.lists(st.integers(-5, 10**12), min_size=4, max_size=4))
def test_the_scarcest_drive_decides(lies: list[tuple[int, int]], free: list[int]) -> None:
    drives, weights = [drive for drive, _ in lies], [weight for _, weight in lies]
    nbytes, index = room(drives, dict(enumerate(free)), weights)
    total = sum(weights)
    for drive in set(drives):
        share = sum(weight for where, weight in lies if where == drive)
        assert nbytes * share <= max(free[drive], 0) * total  # what it adds there is there
    share = sum(weight for where, weight in lies if where == drives[index])
    assert (nbytes + 1) * share > max(free[drives[index]], 0) * total  # one byte more is not
    assert nbytes >= 0


def test_one_drive_has_what_is_free() -> None:
    assert room([7], {7: 12_345}, [1]) == (12_345, 0)
    assert room([7, 7], {7: 12_345}, [3, 1]) == (12_345, 0)


def test_the_member_that_is_short_for_its_weight() -> None:
    assert shortest([4096], [1]) == 0
    assert shortest([2 << 20, 1 << 20], [2, 1]) == 0
    assert shortest([2 << 20, 900_000], [2, 1]) == 1
