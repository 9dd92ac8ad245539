"""The simulation of training steps: cases that can be computed by hand, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.planning.simulate import Run, simulate
from tierzero.sim.clock import Clock, Signal
from tierzero.sim.links import Drive, DriveRates, LimitedDrive, Pipe, open_drive
from tierzero.sim.model import Rates, Setup, SimUnit, uses_of
from tierzero.sim.stepper import Job, Stepper

ENDLESS = 1e18
FREE = Rates(ENDLESS, ENDLESS, ENDLESS, ENDLESS, overhead=0.0, latency=0.0)
FROZEN = SimUnit(100, 0, 0, 0, 0, 0, cached=True, on_drive=False, forward=1.0, backward=2.0)
TRAINED = replace(FROZEN, grads=100, grad=50, elements=100, state=1200)


def times(clock: Clock, count: int) -> tuple[list[float], list[Signal]]:
    """When each of `count` signals happened, in a list that fills as the clock runs."""
    found = [-1.0] * count
    signals = [Signal() for _ in range(count)]
    for index, signal in enumerate(signals):
        signal.then(lambda index=index: found.__setitem__(index, clock.now))
    return found, signals


def test_a_pipe_serves_one_after_the_other() -> None:
    clock = Clock()
    pipe, (found, signals) = Pipe(clock, 10.0), times(clock, 2)
    pipe.send(20, signals[0].fire)
    pipe.send(5, signals[1].fire)
    clock.drain()
    assert found == [2.0, 2.5]
    assert pipe.busy == 2.5


def test_a_drive_serves_all_at_once() -> None:
    """Two reads share its rate by their pieces; a write beside a read makes it mixed; alone again it has its own."""
    clock = Clock()
    drive, (found, signals) = Drive(clock, DriveRates(10.0, 20.0, 8.0)), times(clock, 4)
    drive.read(30, 3, signals[0].fire)
    drive.read(30, 1, signals[1].fire)
    clock.drain()
    assert found[:2] == pytest.approx([4.0, 6.0])  # 7.5 and 2.5 a second, then 10
    drive.read(8, 1, signals[2].fire)
    drive.write(24, 1, signals[3].fire)
    clock.drain()
    assert found[2:] == pytest.approx([8.0, 8.8])  # 4 a second each, then 16 bytes at 20
    drive.catch_up()
    assert (drive.read_bytes, drive.written_bytes, drive.busy) == pytest.approx((68, 24, 8.8))


def test_a_limited_drive_takes_reads_first_but_not_for_ever() -> None:
    clock = Clock()
    drive = open_drive(clock, DriveRates(1e9, 1e9, 1e9).under(1.0))
    assert isinstance(drive, LimitedDrive)
    assert isinstance(open_drive(clock, DriveRates(10, 10, 10, limit=20.0)), Drive)
    order: list[str] = []
    drive.read(1, 1, lambda: order.append("r"))  # goes at once
    drive.write(1, 1, lambda: order.append("w"))
    for _ in range(LimitedDrive.OVERTAKES + 1):
        drive.read(1, 1, lambda: order.append("r"))
    clock.drain()
    assert "".join(order) == "r" + "r" * LimitedDrive.OVERTAKES + "w" + "r"
    assert clock.now == len(order)


def test_what_is_due_sooner_goes_in_front_of_what_is_under_way() -> None:
    clock = Clock()
    stepper = Stepper(clock, Drive(clock, DriveRates(1.0, 1.0, 1.0)), replace(FREE, adam=1e9), 3)
    found, signals = times(clock, 2)
    late, soon = (Job([(1, 1.0, 0.0)] * 8, due) for due in (5, 1))
    late.ended.then(signals[0].fire)
    soon.ended.then(signals[1].fire)
    stepper.submit(late)
    stepper.submit(soon)
    clock.drain()
    assert found[1] < found[0] == pytest.approx(16.0)


def test_two_units_with_room_for_one() -> None:
    """Each is fetched once a step, in the way of compute: 1 + (1) + 1 + 2 + (1) + 2 seconds."""
    rates = replace(FREE, h2d=100.0)
    step = simulate([FROZEN] * 2, rates, Setup(100))
    assert step.seconds == pytest.approx(8.0)
    assert step.stalls["fetch"] == pytest.approx(2.0)
    assert (step.fetches, step.moved["h2d"], step.busy["h2d"]) == (2, 200, pytest.approx(2.0))
    assert step.peak == 100
    assert step.bottleneck == "compute"


def test_two_units_with_room_for_both() -> None:
    step = simulate([FROZEN] * 2, replace(FREE, h2d=100.0), Setup(200))
    assert step.seconds == pytest.approx(6.0)
    assert (step.fetches, step.hits) == (0, 4)


def test_prefetching_hides_the_fetch_behind_the_unit_before() -> None:
    """Three units, room for two. What comes next is fetched while the one before computes, if that takes longer."""
    rates = replace(FREE, h2d=200.0)
    ahead, demand = (simulate([FROZEN] * 3, rates, Setup(200, depth=depth)) for depth in (None, 0))
    assert ahead.seconds == pytest.approx(9.0)
    assert ahead.fetches == 2
    assert demand.seconds == pytest.approx(9.0 + demand.fetches * 0.5)


def test_the_next_forward_waits_for_its_own_update() -> None:
    """Updates of a second each in host memory: the first unit waits for its own and its fetch, the second for none."""
    rates = replace(FREE, h2d=100.0, adam=100.0)
    step = simulate([TRAINED] * 2, rates, Setup(200))
    assert step.seconds == pytest.approx(8.0)
    assert step.stalls["update"] + step.stalls["fetch"] == pytest.approx(2.0)
    assert step.busy["adam"] == pytest.approx(2.0)


def test_the_drive_is_what_a_step_takes_when_it_is_slow() -> None:
    """1200 bytes read and written a unit at 100 bytes/s; with guesses they begin in backward, else after it."""
    unit = replace(TRAINED, on_drive=True)
    rates = replace(FREE, drive=DriveRates(100.0, 100.0, 100.0))
    eager, deferred = (
        simulate([unit] * 2, rates, Setup(200, overlap=overlap, chunk=10)) for overlap in ("eager", "deferred")
    )
    for step in (eager, deferred):
        assert step.bottleneck == "drive"
        assert step.moved["nvme_read"] == pytest.approx(2400)
        assert step.moved["nvme_written"] == pytest.approx(2400)
        assert step.busy["drive"] == pytest.approx(48.0)
    assert eager.seconds == pytest.approx(48.0)  # it never rests: what is computed is written under the next forward
    assert 48.0 + 1.0 < deferred.seconds < 48.0 + 6.0


def test_units_around_others_begin_their_backward_first() -> None:
    units = [FROZEN, replace(FROZEN, around=(0,)), replace(FROZEN, around=(0,))]
    forward, backward = uses_of(units)
    assert forward == [
        *[("enter", 0), ("enter", 1), ("compute", 1), ("leave", 1), ("enter", 2), ("compute", 2), ("leave", 2)],
        *[("compute", 0), ("leave", 0)],
    ]
    assert [uid for what, uid in backward if what == "enter"] == [0, 2, 1]
    assert [uid for what, uid in backward if what == "leave"] == [2, 1, 0]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="rates have none"):
        simulate([replace(TRAINED, on_drive=True)], FREE, Setup(200))
    with pytest.raises(ValueError, match="unit 0 does not fit the device budget of 99 bytes"):
        simulate([FROZEN], FREE, Setup(99))
    with pytest.raises(RuntimeError, match="nothing will bring about"):
        Clock().run(Signal())


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[SimUnit], Rates, Setup]:
    """A model under a machine and a setup in which every unit finds room."""
    units = []
    for _ in range(draw(st.integers(1, 6))):
        elements = draw(st.sampled_from([0, 1, 700, 5000]))
        cached, on_drive = draw(st.booleans()), draw(st.booleans())
        flat = 2 * elements + draw(st.sampled_from([64, 1000]))
        seconds = draw(st.sampled_from([0.0, 0.25, 1.0]))
        copy = 0 if cached else 2 * elements
        grads = 2 * elements
        units.append(
            SimUnit(flat, grads, grads // 2, elements, 12 * elements, copy, cached, on_drive, seconds, 2 * seconds)
        )
    root = draw(st.booleans())
    if root:
        units = [units[0], *(replace(unit, around=(0,)) for unit in units[1:])]
    rate = st.sampled_from([100.0, 5000.0, 1e6])
    drive = DriveRates(draw(rate), draw(rate), draw(rate))
    if draw(st.booleans()):
        drive = drive.under(draw(rate))
    rates = Rates(
        *(draw(rate) for _ in range(4)),
        drive,
        inline=draw(st.booleans()),
        overhead=0.0625,
        latency=0.03125,
        staging=512,
    )
    chain = max(unit.flat + sum(units[around].flat for around in unit.around) for unit in units)
    setup = Setup(
        budget=chain + draw(st.sampled_from([0, 500, 20_000])),
        depth=draw(st.sampled_from([None, 0, 1, 3])),
        overlap=draw(st.sampled_from(["eager", "deferred"])),
        slots=draw(st.sampled_from([3, 8])),
        chunk=draw(st.sampled_from([256, 2048])),
        block=4096,
        clip=draw(st.booleans()),
        micro=draw(st.sampled_from([1, 1, 2])),
    )
    return units, rates, setup


@settings(max_examples=200, deadline=None)
@given(cases())
def test_no_step_beats_its_parts_or_its_budget(case: tuple[list[SimUnit], Rates, Setup]) -> None:
    units, rates, setup = case
    run = Run(units, rates, setup)
    steps = [run.step() for _ in range(4)]
    compute = setup.micro * sum(unit.forward + unit.backward for unit in units)
    most = max((unit.grad for unit in units), default=0)
    for step in steps:
        assert step.seconds >= compute * (1 - 1e-9)
        assert all(busy <= step.seconds * (1 + 1e-9) + 1e-9 for busy in step.busy.values()), step.busy
        assert sum(step.stalls.values()) == pytest.approx(step.seconds)
        assert step.peak <= setup.budget + most
    run.clock.drain()
    trained = sum(unit.elements for unit in units)
    drive = run.drive
    assert drive is not None
    drive.catch_up()
    assert run.stepper.elements == pytest.approx(4 * trained)
    read = sum(unit.state for unit in units if unit.on_drive)
    written = read + sum(unit.copy for unit in units)
    assert drive.written_bytes == pytest.approx(4 * written)
    assert drive.read_bytes >= 4 * read * (1 - 1e-6)  # and parameters
    assert run.stepper.free == setup.slots
    assert not run.updates.pending
    assert not run.updates.guesses


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_machine_twice_as_fast_takes_half_the_time(case: tuple[list[SimUnit], Rates, Setup]) -> None:
    """Everything twice as fast changes no order; powers of two leave no rounding."""
    units, rates, setup = case
    assert rates.drive is not None
    drive = DriveRates(*(2 * value for value in vars(rates.drive).values()))
    faster = replace(
        rates,
        **{name: 2 * getattr(rates, name) for name in ("h2d", "d2h", "adam", "norm")},
        drive=drive,
        overhead=rates.overhead / 2,
        latency=rates.latency / 2,
    )
    quick = [replace(unit, forward=unit.forward / 2, backward=unit.backward / 2) for unit in units]
    slow, fast = simulate(units, rates, setup), simulate(quick, faster, setup)
    assert fast.seconds == pytest.approx(slow.seconds / 2, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["h2d", "d2h", "adam", "norm", "drive"]))
def test_without_looking_ahead_no_link_that_is_faster_makes_a_step_slower(
    case: tuple[list[SimUnit], Rates, Setup], name: str
) -> None:
    """Only where nothing overlaps is that so in general: what overlaps may take turns in a worse order."""
    units, rates, setup = case
    units = [replace(unit, elements=0, grads=0, grad=0, copy=0, on_drive=False, state=0) for unit in units]
    setup = replace(setup, depth=0)
    assert rates.drive is not None
    drive = DriveRates(*(4 * value for value in vars(rates.drive).values()))
    faster = replace(rates, drive=drive) if name == "drive" else replace(rates, **{name: 4 * getattr(rates, name)})
    assert simulate(units, faster, setup).seconds <= simulate(units, rates, setup).seconds * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_links_that_take_no_time_leave_the_compute(case: tuple[list[SimUnit], Rates, Setup]) -> None:
    units, rates, setup = case
    free = Rates(ENDLESS, ENDLESS, ENDLESS, ENDLESS, DriveRates(ENDLESS, ENDLESS, ENDLESS), overhead=0.0, latency=0.0)
    step = simulate(units, free, setup)
    assert step.seconds == pytest.approx(setup.micro * sum(unit.forward + unit.backward for unit in units), abs=1e-9)
    assert step.seconds <= simulate(units, rates, setup).seconds * (1 + 1e-9)
