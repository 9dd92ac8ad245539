"""The scheduler that keeps its orders from use to use decides what the plain functions decide from scratch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.paging.lookahead import Lookahead
from tierzero.paging.schedule import FAR, Fetch, Trace, choose_victims, prefetch_order
from tierzero.paging.waiting import Waiting

UNITS = 12
STEPS = st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=24)
# what happens next: a use (in training or not), an odd use, the end of a step, a room that is needed, a look ahead
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["use"] * 6 + ["odd", "eval", "end", "begin", "room", "ahead", "gone"]), st.integers(0, 99)
    ),
    max_size=60,
)


def first_fetch(
    ahead: Lookahead, trace: Trace, sizes: list[int], skipped: set[int], kept: set[int], depth: int | None
) -> Fetch | None:
    upcoming = (uid for uid in trace.upcoming() if uid not in skipped)
    plan = prefetch_order(upcoming, ahead.resident, sizes, ahead.budget, trace.next_use, keep=kept, depth=depth)
    return plan[0] if plan else None


@settings(max_examples=300)
@given(
    st.one_of(st.none(), STEPS),
    st.lists(STEPS, min_size=1, max_size=3),
    st.lists(st.integers(0, 9), min_size=UNITS, max_size=UNITS),
    st.integers(0, 60),
    st.one_of(st.none(), st.integers(0, 6)),
    MOVES,
    st.randoms(use_true_random=False),
)
def test_it_decides_what_the_plain_functions_decide(guess, steps, sizes, budget, depth, moves, random) -> None:
    trace = Trace(guess or ())
    ahead = Lookahead(trace, budget)
    skipped: set[int] = set()
    turn = at = 0
    for move, number in moves:
        uses = steps[turn % len(steps)]
        if move == "use":
            trace.use(uses[at % len(uses)])
            at += 1
            if at == len(uses):
                trace.end_step()
                turn, at = turn + 1, 0
        elif move == "odd":
            trace.use(number % UNITS)
        elif move == "eval":
            trace.use(number % 4, grad=False)
        elif move == "end":
            trace.end_step()
            turn, at = turn + 1, 0
        elif move == "begin":
            trace.begin_step()
            at = 0
        elif move == "gone" and ahead.resident:
            ahead.remove(sorted(ahead.resident)[number % len(ahead.resident)])
        kept = set(random.sample(range(UNITS), number % 3))
        if move == "room":
            need = number % 40
            victims = ahead.victims(need, kept.__contains__)
            assert victims == choose_victims(ahead.resident, need, trace.next_use, kept)
        if random.random() < 0.1:
            skipped = set(random.sample(range(UNITS), number % 3))
            ahead.rewind()
        if random.random() < 0.7:
            fetch = first_fetch(ahead, trace, sizes, skipped, kept, depth)
            assert not (ahead.settled and fetch)
            assert ahead.fetch(sizes.__getitem__, skipped.__contains__, kept.__contains__, depth) == fetch
            if fetch is not None:
                for victim in fetch.victims:
                    ahead.remove(victim)
                ahead.add(fetch.uid, sizes[fetch.uid])
        assert ahead.used == sum(ahead.resident.values()) <= max(budget, 0)


class Counting(Trace):
    """Counts what a Lookahead asks."""

    asked = 0

    def place(self, uid: int) -> int:
        self.asked += 1
        return super().place(uid)

    def at(self, place: int) -> int | None:
        self.asked += 1
        return super().at(place)


def asked_per_use(units: int, share: float) -> float:
    """Questions to the trace per use, over steps with `share` of the units resident."""
    trace: Any = Counting()
    order = list(range(units))
    step = order + order[::-1]
    for uid in step:
        trace.use(uid)
    trace.end_step()
    ahead = Lookahead(trace, int(units * share))
    trace.asked = 0
    for _ in range(3):
        for uid in step:
            trace.use(uid)
            if uid not in ahead.resident:
                for victim in ahead.victims(1 + ahead.used - ahead.budget, lambda u: False) or ():
                    ahead.remove(victim)
                ahead.add(uid, 1)
            kept = {uid}
            while not ahead.settled and (fetch := ahead.fetch(lambda u: 1, lambda u: False, kept.__contains__, None)):
                for victim in fetch.victims:
                    ahead.remove(victim)
                ahead.add(fetch.uid, 1)
        trace.end_step()
    return trace.asked / (3 * len(step))


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_work_per_use_does_not_grow_with_the_number_of_units(share: float) -> None:
    few, many = asked_per_use(100, share), asked_per_use(3000, share)
    assert many < 1.5 * few + 1


def test_what_is_passed_over_is_ordered_anew() -> None:
    """A departure that skips units, and turns out to have been an insertion, leaves the order right both times."""
    trace = Trace()
    for uid in (0, 1, 2, 3, 4, 5):
        trace.use(uid)
    trace.end_step()
    ahead = Lookahead(trace, 6)
    for uid in range(6):
        ahead.add(uid, 1)
    assert ahead.victims(6, lambda uid: False) == [5, 4, 3, 2, 1, 0]
    trace.use(0)
    trace.use(4)  # skips 1, 2 and 3, as it seems
    assert ahead.victims(6, lambda uid: False) == [4, 3, 2, 1, 0, 5]
    trace.use(1)  # 4 was used twice
    assert ahead.victims(6, lambda uid: False) == [1, 0, 5, 4, 3, 2]


@given(
    STEPS,
    st.lists(
        st.tuples(
            st.sampled_from(["use"] * 4 + ["odd", "end", "add", "add", "urgent", "hurry", "gone"]), st.integers(0, 99)
        ),
        max_size=60,
    ),
)
def test_jobs_take_turns_in_the_order_of_next_use(step: list[int], moves: list[tuple[str, int]]) -> None:
    trace = Trace(step)
    waiting: Waiting[int] = Waiting(trace, lambda job: job % UNITS)
    distance = lambda job: min(trace.next_use(job % UNITS), FAR // 4)  # units that no trace knows are all as far
    jobs: list[int] = []
    urgent: list[int] = []
    at = 0
    for move, number in moves:
        if move == "use":
            trace.use(step[at % len(step)])
            at += 1
        elif move == "odd":
            trace.use(number % UNITS)
        elif move == "end":
            trace.end_step()
            at = 0
        elif move in ("add", "urgent"):
            waiting.add(number, urgent=move == "urgent")
            jobs += [number] * (number not in jobs)
            urgent += [number] * (move == "urgent" and number not in urgent)
        elif move == "hurry":
            waiting.hurry(number)
            urgent += [number] * (number in jobs and number not in urgent)
        else:
            waiting.discard(number)
            jobs, urgent = [j for j in jobs if j != number], [j for j in urgent if j != number]
        assert len(waiting) == len(jobs)
        if urgent:
            assert waiting.first() == (urgent[0], True)
        elif jobs:
            job, hurried = waiting.first()
            assert not hurried
            assert job in waiting
            assert distance(job) == min(map(distance, jobs))
