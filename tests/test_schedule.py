"""The scheduler: MIN against brute force, budgets never exceeded, traces followed and found again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierzero.paging.schedule import FAR, Trace, choose_victims, prefetch_order


@lru_cache(None)
def victim(distances: tuple[int, ...]) -> int:
    """Which of the resident units `choose_victims` evicts for one byte, all having one, by their next uses."""
    chosen = choose_victims(dict.fromkeys(range(len(distances)), 1), 1, distances.__getitem__)
    assert chosen is not None
    assert len(chosen) == 1
    return chosen[0]


def misses_of_min(uses: Sequence[int], capacity: int) -> int:
    """Misses when `choose_victims` decides, with units of one byte and the future known."""
    again = [uses.index(uid, at + 1) if uid in uses[at + 1 :] else FAR for at, uid in enumerate(uses)]
    resident: dict[int, int] = {}  # unit -> its next use
    misses = 0
    for now, uid in enumerate(uses):
        if uid not in resident:
            misses += 1
            if len(resident) == capacity:
                del resident[list(resident)[victim(tuple(resident.values()))]]
        resident[uid] = again[now]
    return misses


States = dict[frozenset[int], int]  # what may be resident -> the fewest misses so far


def any_policy(states: States, uid: int, capacity: int) -> States:
    """What demand fetching can have come to after one more use, whatever it evicts."""
    after: States = {}
    for resident, misses in states.items():
        if uid in resident:
            ends = [(resident, misses)]
        elif len(resident) < capacity:
            ends = [(resident | {uid}, misses + 1)]
        else:
            ends = [(resident - {gone} | {uid}, misses + 1) for gone in resident]
        for end, count in ends:
            after[end] = min(count, after.get(end, count))
    return after


def fewest_misses(uses: Sequence[int], capacity: int) -> int:
    """The best that any policy of demand fetching can do, by trying all victims."""
    states: States = {frozenset(): 0}
    for uid in uses:
        states = any_policy(states, uid, capacity)
    return min(states.values())


def misses_of_lru(uses: Sequence[int], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for uid in uses:
        if uid in cache:
            cache.move_to_end(uid)
            continue
        misses += 1
        if len(cache) >= capacity:
            cache.popitem(last=False)
        cache[uid] = None
    return misses


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_min_is_as_good_as_brute_force_on_all_short_traces(capacity: int) -> None:
    """All traces of up to 12 uses of 4 units, for 3 sizes of the budget.

    Units are numbered in the order of their first use, and none is used twice in a row: the second time is a hit under
    any policy and leaves everything as it is, so such a trace has the misses of a shorter one.
    """
    seen = 0
    todo: list[tuple[tuple[int, ...], States]] = [((), {frozenset(): 0})]
    while todo:
        uses, states = todo.pop()
        if uses:
            seen += 1
            assert misses_of_min(uses, capacity) == min(states.values()), uses
        if len(uses) < 12:
            units = range(min(max(uses, default=-1) + 2, 4))
            fresh = [uid for uid in units if not uses or uid != uses[-1]]
            todo += [((*uses, uid), any_policy(states, uid, capacity)) for uid in fresh]
    assert seen == 1 + sum((3 ** (length - 2) + 1) // 2 for length in range(2, 13))  # as many as there are


@given(st.lists(st.integers(0, 8), max_size=16), st.integers(1, 6))
def test_min_is_as_good_as_brute_force_on_any_trace(uses: list[int], capacity: int) -> None:
    assert misses_of_min(uses, capacity) == fewest_misses(uses, capacity)


def test_min_beats_lru_on_a_sweep() -> None:
    sweep = [*range(40), *reversed(range(40))] * 6
    assert misses_of_lru(list(range(40)) * 6, 20) == 240  # a cyclic sweep never hits
    assert misses_of_min(list(range(40)) * 6, 20) < 150
    assert misses_of_min(sweep, 10) <= misses_of_lru(sweep, 10)


@given(
    st.dictionaries(st.integers(0, 30), st.integers(0, 50), max_size=12),
    st.integers(-5, 300),
    st.randoms(use_true_random=False),
    st.sets(st.integers(0, 30), max_size=6),
)
def test_victims_are_enough_none_needless_none_kept(resident, need, random, keep) -> None:
    distance = {uid: random.randrange(1000) for uid in resident}
    victims = choose_victims(resident, need, distance.__getitem__, keep)
    available = sum(nbytes for uid, nbytes in resident.items() if uid not in keep)
    if need > available:
        assert victims is None
        return
    assert victims is not None
    assert len(set(victims)) == len(victims)
    assert not set(victims) & keep
    freed = sum(resident[uid] for uid in victims)
    assert freed >= need
    for uid in victims:
        assert freed - resident[uid] < need
    if need > 0 and len(set(resident.values())) == 1:
        stay = [distance[uid] for uid in resident if uid not in keep and uid not in victims]
        assert not stay or min(distance[uid] for uid in victims) >= max(stay)


@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=40),
    st.lists(st.integers(1, 40), min_size=16, max_size=16),
    st.integers(40, 200),
    st.integers(0, 16),
    st.one_of(st.none(), st.integers(0, 8)),
    st.data(),
)
def test_prefetch_never_exceeds_the_budget_by_a_byte(step, sizes, budget, position, depth, data) -> None:
    trace = Trace(step)
    for uid in step[:position]:
        trace.use(uid)
    resident: dict[int, int] = {}
    for uid in data.draw(st.permutations(range(16))):
        if sum(resident.values()) + sizes[uid] <= budget and data.draw(st.booleans()):
            resident[uid] = sizes[uid]
    keep = set(data.draw(st.lists(st.sampled_from(sorted(resident)), max_size=4))) if resident else set()
    before = dict(resident)
    plan = prefetch_order(trace.upcoming(), resident, sizes.__getitem__, budget, trace.next_use, keep=keep, depth=depth)
    assert resident == before  # a pure function
    ahead = list(trace.upcoming(depth))
    fetched = [fetch.uid for fetch in plan]
    assert [uid for uid in ahead if uid in fetched] == fetched
    for fetch in plan:
        for victim in fetch.victims:
            assert victim not in keep
            assert victim not in fetched
            assert trace.next_use(victim) > trace.next_use(fetch.uid)
            del resident[victim]
        assert fetch.uid not in resident
        resident[fetch.uid] = sizes[fetch.uid]
        assert sum(resident.values()) <= budget


def test_prefetch_waits_for_the_next_unit_rather_than_fetching_one_behind_it() -> None:
    trace = Trace([0, 1, 2, 3])
    trace.use(0)
    plan = prefetch_order(trace.upcoming(), {0: 10}, {1: 95, 2: 10, 3: 10}, 100, trace.next_use, keep={0})
    assert plan == []
    plan = prefetch_order(trace.upcoming(), {0: 10}, {1: 60, 2: 30, 3: 10}, 100, trace.next_use, keep={0})
    assert [fetch.uid for fetch in plan] == [1, 2]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=25), st.integers(0, 60))
def test_next_use_and_upcoming_are_those_of_the_cyclic_trace(step: list[int], uses: int) -> None:
    trace = Trace()
    for uid in step:
        trace.use(uid)
    assert trace.end_step()
    for index in range(uses):
        if index and index % len(step) == 0:
            assert not trace.end_step()
        assert trace.use(step[index % len(step)])
    position = uses % len(step) if uses else 0
    endless = step[position:] + step + step
    for uid in range(7):
        expected = endless.index(uid) if uid in step else FAR // 2
        assert trace.next_use(uid) == expected or (uid not in step and trace.next_use(uid) >= expected)
    assert list(trace.upcoming()) == list(dict.fromkeys(endless))
    assert list(trace.upcoming(2)) == list(dict.fromkeys(endless))[:2]
    assert trace.departures == 0


def run(trace: Trace, uses: Sequence[int]) -> list[bool]:
    matched = [trace.use(uid) for uid in uses]
    trace.end_step()
    return matched


def test_units_that_no_trace_knows_are_ordered_by_their_last_use() -> None:
    trace = Trace()
    for uid in (5, 6, 7):
        trace.use(uid)
    assert trace.next_use(8) == FAR
    assert trace.next_use(8) > trace.next_use(5) > trace.next_use(6) > trace.next_use(7) > FAR // 2


def test_a_skipped_unit_costs_one_departure() -> None:
    trace = Trace()
    run(trace, [0, 1, 2, 3, 4, 5])
    assert run(trace, [0, 1, 3, 4, 5]) == [True, True, False, True, True]
    assert trace.departures == 1


def test_an_inserted_use_of_a_later_unit_does_not_lose_the_place() -> None:
    trace = Trace()
    run(trace, [*range(10), *reversed(range(10))])
    matched = run(trace, [0, 1, 8, 2, 3, 4, 5, 6, 7, 8, 9, *reversed(range(10))])
    assert matched[:5] == [True, True, False, False, True]
    assert all(matched[5:])
    assert trace.departures == 2


def test_an_unknown_unit_is_one_departure_and_is_known_next_time() -> None:
    trace = Trace()
    run(trace, [0, 1, 2])
    assert run(trace, [0, 9, 1, 2]) == [True, False, True, True]
    assert run(trace, [0, 9, 1, 2]) == [True] * 4
    assert trace.departures == 1


def test_alternating_steps_are_recognised_and_then_expected() -> None:
    one, two = [0, 1, 2, 3], [0, 4, 5, 3]
    trace = Trace()
    for uses in (one, two, one, two):
        run(trace, uses)
    trace.departures = 0
    for uses in (one, two) * 5:
        assert all(run(trace, uses))
    assert trace.departures == 0
    assert list(trace.upcoming()) == [0, 1, 2, 3, 4, 5]  # this step's, then those of the one that follows it


def test_a_remembered_step_is_followed_from_its_first_difference() -> None:
    one, two = [0, 1, 2, 3], [0, 4, 5, 6, 3]
    trace = Trace()
    for uses in (one, two, one, one, one):
        run(trace, uses)
    assert run(trace, two) == [True, False, True, True, True]


def test_steps_that_never_repeat_keep_memory_bounded() -> None:
    trace = Trace()
    for step in range(50):
        run(trace, [step, step + 1, step * step])
    assert len(trace._train.known) <= 4
    chain, step_seen = trace._train.step, 0
    while chain.after is not None and step_seen < 10:
        chain, step_seen = chain.after, step_seen + 1
    assert step_seen <= 5


def test_evaluation_leaves_the_training_trace_where_it_was() -> None:
    trace = Trace()
    run(trace, [0, 1, 2, 2, 1, 0])
    trace.use(0)
    trace.use(1)
    for _ in range(3):
        for uid in (0, 7, 2):
            trace.use(uid, grad=False)
    assert list(trace.upcoming(3)) == [0, 7, 2]  # evaluation has learnt its own order
    assert trace.next_use(1) < FAR // 2  # known to training only: behind the evaluation
    assert trace.use(2)
    assert list(trace.upcoming(2)) == [2, 1]
    assert all(trace.use(uid) for uid in (2, 1, 0))
    assert trace.departures == 0


def test_a_step_that_ended_in_an_exception_is_begun_again() -> None:
    trace = Trace()
    run(trace, [0, 1, 2])
    trace.use(0)
    trace.begin_step()
    assert run(trace, [0, 1, 2]) == [True] * 3
    assert run(trace, []) == []
    assert trace.steps == 2


def test_five_thousand_units_and_a_departure_each_step() -> None:
    units = list(range(5000))
    trace = Trace(units + units[::-1])
    for step in range(3):
        odd = units[:step] + units[step + 1 :] + units[::-1]
        run(trace, odd)
    assert trace.steps == 3
    assert len(list(trace.upcoming(5000))) == 5000
    assert len(choose_victims(dict.fromkeys(units, 1), 100, trace.next_use) or ()) == 100


@given(st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=8), min_size=1, max_size=12), st.booleans())
def test_any_uses_in_any_order_are_harmless(steps: list[list[int]], grad: bool) -> None:
    trace = Trace([0, 1, 2])
    for uses in steps:
        for uid in uses:
            trace.use(uid, grad=grad or uid % 2 == 0)
            seen = list(trace.upcoming())
            assert len(seen) == len(set(seen))
            assert all(trace.next_use(u) >= 0 for u in range(6))
            distances = [trace.next_use(u) for u in seen]
            assert distances == sorted(distances)
        trace.end_step()
