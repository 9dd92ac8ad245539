"""The search for a prefetch depth, on curves instead of drives; and where theory puts the knee."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.bench.depths import ROUNDS, Found, knee, search, step_of

times = st.floats(1e-4, 1.0)


def simulated(depth: int, units: int, compute: float, transfer: float, delay: float) -> float:
    """The mean time between uses of `units` units in a row: a link that moves one after the other, each arriving
    `delay` later, and a fetch that may begin when the unit `depth` uses before begins.
    """
    link = now = 0.0
    began = []
    for unit in range(units):
        asked = began[unit - depth] if 0 < depth <= unit else now if depth == 0 else 0.0
        link = max(link, asked) + transfer
        now = max(now, link + delay)
        began.append(now)
        now += compute
    half = units // 2
    return (began[-1] - began[half]) / (units - 1 - half)


@given(times, times, st.one_of(st.just(0.0), times), st.integers(0, 12))
def test_theory_is_what_a_link_does(compute: float, transfer: float, delay: float, depth: int) -> None:
    steady = simulated(depth, 400, compute, transfer, delay)
    assert steady == pytest.approx(step_of(depth, compute, transfer, delay), rel=0.12)


@given(times, times, st.one_of(st.just(0.0), times))
def test_the_knee_is_the_least_depth_that_is_as_fast_as_any(compute: float, transfer: float, delay: float) -> None:
    at = knee(compute, transfer, delay)
    unlimited = max(compute, transfer)
    assert step_of(at, compute, transfer, delay) == pytest.approx(unlimited, rel=1e-6)
    assert step_of(at - 1, compute, transfer, delay) > unlimited


def test_a_link_without_delay_has_its_knee_at_one() -> None:
    assert {knee(c, f, 0.0) for c in (0.1, 1.0) for f in (0.01, 1.0, 5.0)} == {1}
    assert knee(1.0, 0.0, 0.0) == 0
    assert knee(0.01, 0.01, 0.05) == 6


def noisy(curve: Callable[[int], float], seed: int, noise: float) -> tuple[Callable[[int, float], float], list[float]]:
    """Measurements of a curve, and what each of them cost."""
    draw, cost = random.Random(seed), []

    def measure(depth: int, limit: float) -> float:
        seconds = curve(depth) * (1 + noise * draw.uniform(-1, 1))
        cost.append(seconds * (1 if seconds > limit else 2))  # a loser stops after its first step
        return seconds

    return measure, cost


def falling(compute: float, transfer: float, delay: float) -> Callable[[int], float]:
    return lambda depth: 32 * step_of(depth, compute, transfer, delay)


@settings(max_examples=300)
@given(times, times, st.one_of(st.just(0.0), st.floats(0, 5)), st.integers(0, 64), st.integers(0, 999))
def test_within_three_per_cent_without_noise(
    compute: float, transfer: float, delay: float, largest: int, seed: int
) -> None:
    curve = falling(compute, transfer, delay)
    measure, _ = noisy(curve, seed, 0.0)
    found = search(measure, largest)
    assert found.chosen is not None
    assert 0 <= found.chosen <= largest
    best = min(curve(depth) for depth in range(largest + 1))
    assert curve(found.chosen) <= 1.03 * best
    near = [depth for depth in range(largest + 1) if curve(depth) <= 1.03 * best]
    assert found.chosen <= near[0] + 1, "the knee, not somewhere on the flat behind it"


@settings(max_examples=300)
@given(times, times, st.one_of(st.just(0.0), st.floats(0, 5)), st.integers(16, 64), st.integers(0, 999))
def test_noise_of_one_per_cent_costs_no_more_than_it_is(
    compute: float, transfer: float, delay: float, largest: int, seed: int
) -> None:
    curve = falling(compute, transfer, delay)
    measure, cost = noisy(curve, seed, 0.01)
    found = search(measure, largest)
    assert found.chosen is not None
    best = min(curve(depth) for depth in range(largest + 1))
    assert curve(found.chosen) <= 1.055 * best
    exhaustive = sum(2 * ROUNDS * curve(depth) for depth in range(largest + 1))
    assert sum(cost) <= exhaustive / 3


def test_where_depths_cannot_be_told_apart_the_deeper_one_wins() -> None:
    """A curve that goes on falling slowly, under noise as large as its slope: few searches end at its shallow end."""
    curve = lambda depth: 1.5 if depth == 0 else 1.08 if depth == 1 else 1.03 * (1 - 0.004 * depth)
    chosen = [search(noisy(curve, seed, 0.03)[0], 12).chosen for seed in range(200)]
    assert sum(curve(depth or 0) > 1.03 * curve(12) for depth in chosen) <= 5


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 999))
def test_a_curve_that_rises_again(bottom: int, largest: int, seed: int) -> None:
    """Depth that hurts: the search ends near the bottom, or at least not worse than both of its ends."""
    curve = lambda depth: 1.0 + 0.05 * abs(depth - bottom)
    measure, _ = noisy(curve, seed, 0.0)
    found = search(measure, largest)
    assert found.chosen is not None
    assert curve(found.chosen) <= min(curve(0), curve(largest)) * 1.03


@given(st.integers(0, 30), st.integers(0, 12))
def test_it_stops_when_time_is_over_and_still_chooses(largest: int, patience: int) -> None:
    left = [patience]

    def over() -> bool:
        left[0] -= 1
        return left[0] < 0

    found = search(lambda depth, limit: 10.0 / (1 + depth), largest, over=over)
    assert found.count <= patience + 1
    assert found.chosen in found.samples
    assert found.complete == (left[0] >= 0)


def test_bad_range() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        search(lambda depth, limit: 1.0, -1)


def test_losers_are_told_their_limit() -> None:
    limits = []

    def measure(depth: int, limit: float) -> float:
        limits.append(limit)
        return 1.0 if depth >= 4 else 9.0

    found = search(measure, 20)
    assert limits[0] == float("inf")
    assert set(limits[1:]) == {1.5}
    assert found.chosen == 4
    assert isinstance(found, Found)
