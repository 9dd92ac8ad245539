"""Where time goes, by a clock of the test's own: parts that add up, busy time as a union, steps between marks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierzero.monitoring import clock, metrics
from tierzero.monitoring.clock import COMPUTE, D2H, ENGINE, FETCH, GRADIENT, PARTS, SAVE, Busy, Clock
from tierzero.monitoring.metrics import DriveTotals, Metrics


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, len(PARTS) - 1)), max_size=30))
def test_parts_add_up(moves: list[tuple[int, int]]) -> None:
    """To the nanosecond, whatever is entered and left in whatever order."""
    hand = Hand()
    one = Clock(hand)
    expected = [0] * len(PARTS)
    for wait, part in moves:
        expected[one.part] += wait
        hand.now += wait
        one.enter(part)
    now, spent = one.read()
    assert spent == expected
    assert sum(spent) == now - one.started


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_busy_is_a_union(spans: list[tuple[int, int]]) -> None:
    """Overlapping spans count once."""
    hand = Hand()
    hand.now = 0
    busy = Busy(hand)
    changes = sorted((at, change) for start, length in spans for at, change in ((start, 1), (start + length, -1)))
    under_way = 0
    for at, change in sorted(changes, key=lambda each: (each[0], -each[1])):
        hand.now = at
        under_way += change
        busy.__enter__() if change > 0 else busy.__exit__()
        assert busy.total == sum(any(s <= t < s + n for s, n in spans) for t in range(at))
    assert under_way == 0


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """The time that everything in metrics goes by."""
    hand = Hand()
    monkeypatch.setattr(metrics, "Clock", lambda: Clock(hand))
    monkeypatch.setattr(metrics, "Busy", lambda: Busy(hand))
    return hand


def test_a_step(hand: Hand) -> None:
    """Every figure of a step, from known times and bytes."""
    own = Metrics()
    drives = DriveTotals(100, 200, 30, 40)
    own.drives = lambda: drives
    hand.now += 5  # before the first forward: no step's
    own.begin_first()

    @own.engine
    def hook() -> None:
        hand.now += 10
        with own.timed("stall_fetch_s"):
            with own.h2d_busy, own.background:
                hand.now += 300
        own.add("misses")

    hook()
    hand.now += 1_000
    own.add("hits", 3)
    own.add("h2d", 64)
    with own.background:
        hand.now += 700
    with own.inside(D2H):
        hand.now += 20
    with own.inside(SAVE), own.timed("stall_grad_s"):
        hand.now += 7
    own.device(500)
    own.device(-400)
    drives = DriveTotals(400, 300, 90, 50)
    own.end_step(skipped=False)
    step = own.last_step
    assert step is not None
    assert step.parts_s == {
        name: nanoseconds / 1e9 for name, nanoseconds in zip(PARTS, (1_700, 300, 0, 7, 0, 20, 10, 0), strict=True)
    }
    assert step.wall_s == 2_037 / 1e9
    assert (step.exposed_io_s, step.hidden_io_s) == (327 / 1e9, (1_000 - 307) / 1e9)
    assert (step.hits, step.misses, step.hit_rate, step.number, step.device_peak) == (3, 1, 0.75, 1, 500)
    assert {name: (link.bytes, round(link.busy_s * 1e9)) for name, link in step.links.items()} == {
        "nvme_read": (300, 60),
        "nvme_written": (100, 10),
        "h2d": (64, 300),
        "d2h": (0, 0),
    }
    assert step.links["h2d"].gb_per_s == pytest.approx(64 / 300)
    assert step.links["d2h"].gb_per_s == 0
    hand.now += 11
    own.add("hits")
    own.end_step(skipped=True)
    second = own.last_step
    assert second is not None
    assert (second.number, second.skipped, second.wall_s, second.device_peak) == (2, True, 11 / 1e9, 100)


def test_two_optimizers_end_one_step(hand: Hand) -> None:
    """The second of two `step()` calls in a row makes the step longer instead of beginning an empty one."""
    own = Metrics()
    own.begin_first()
    own.add("hits")
    hand.now += 100
    own.end_step(skipped=False)
    hand.now += 10
    own.end_step(skipped=False)
    assert own.last_step is not None
    assert (own.last_step.wall_s, own.last_step.hits) == (110 / 1e9, 1)
    own.add("hits")
    hand.now += 40
    own.end_step(skipped=False)
    assert (own.last_step.wall_s, own.last_step.hits) == (40 / 1e9, 1)


def test_an_exception_goes_back_to_the_part_before(hand: Hand) -> None:
    own = Metrics()

    @own.engine
    def fails() -> None:
        with own.timed("stall_update_s"):
            hand.now += 3
            raise OSError

    with pytest.raises(OSError):
        fails()
    assert own.clock.part == COMPUTE
    assert own.stall_update_s == 3 / 1e9


def test_names() -> None:
    """The numbers stand for what the names say."""
    numbers: dict[str, Any] = vars(clock)
    assert [numbers[name.upper()] for name in PARTS] == list(range(len(PARTS)))
    assert {FETCH, GRADIENT, ENGINE} < set(range(len(PARTS)))
