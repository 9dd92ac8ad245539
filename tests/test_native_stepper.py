"""The streamed step against whole-parameter adamw: every byte of state, copy and checksum, for any chunking."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_records import Case, as_bytes, cases, plain_case, slab_buffers, to_layout

from tierzero import _native


@pytest.fixture(scope="module", params=["auto", "pool"])
def engine(request: pytest.FixtureRequest) -> Iterator[_native.Engine]:
    engine = _native.Engine(kind=request.param, threads=3, block=1 << 16)
    yield engine
    engine.close()


RELAXED = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


@RELAXED
@given(cases(), st.integers(1, 3), st.integers(3, 5))
def test_state_in_memory(engine: _native.Engine, drawn: tuple[Case, int], threads: int, slots: int) -> None:
    case, chunk = drawn
    case.host_out()
    state = to_layout(case.planes, chunk)
    out = torch.full((case.out_size,), 0x5A, dtype=torch.uint8)
    stepper = _native.Stepper(engine, slab_buffers(chunk, slots), chunk, threads)
    ticket = stepper.submit(case.elements, case.segments(), case.grads, state=state, out=out)
    assert ticket.result() == (None, None)
    after = case.expected()
    assert torch.equal(as_bytes(state), as_bytes(to_layout(after, chunk)))
    assert torch.equal(out, case.copies(after, case.out_size, 0x5A))
    stepper.close()


@RELAXED
@given(cases(), st.integers(1, 3), st.booleans(), st.booleans(), st.data())
def test_state_on_file(
    engine: _native.Engine,
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[Case, int],
    threads: int,
    direct: bool,
    in_place: bool,
    data: st.DataObject,
) -> None:
    case, chunk = drawn
    out_first = 2048 * data.draw(st.integers(0, (case.elements - 1) // 2048))
    case.file_out(out_first)
    last = max([p.out_at + 2 * p.numel for p in case.parameters if p.out_at >= 0], default=0)
    nbytes = data.draw(st.integers(max(last, 1), 2 * (case.elements - out_first)))
    file = _native.File(tmp_path_factory.mktemp("step") / "f", direct=direct)
    layout = as_bytes(to_layout(case.planes, chunk))
    base, span = 4096 * data.draw(st.integers(0, 2)), 12 * case.elements
    src, dst = base, base if in_place else base + span
    copy_at = base + 2 * span
    engine.write(file, src, layout).result()
    rounded = -(-nbytes // 4096) * 4096
    engine.write(file, copy_at, torch.full((rounded + 4096,), 0xEE, dtype=torch.uint8)).result()

    stepper = _native.Stepper(engine, slab_buffers(chunk, 3), chunk, threads)
    ticket = stepper.submit(
        case.elements,
        case.segments(),
        case.grads,
        src=(file, src),
        dst=(file, dst),
        out_file=(file, copy_at, nbytes),
        out_first=out_first,
    )
    state_sum, copy_sum = ticket.result()
    after = case.expected()
    want = as_bytes(to_layout(after, chunk))
    got = torch.empty(span, dtype=torch.uint8)
    engine.read(file, dst, got).result()
    assert torch.equal(got, want)
    assert state_sum == _native.checksum(want)
    if not in_place:
        engine.read(file, src, got).result()
        assert torch.equal(got, layout)
    copy = torch.empty(rounded + 4096, dtype=torch.uint8)
    engine.read(file, copy_at, copy).result()
    want_copy = case.copies(after, rounded, 0)
    assert torch.equal(copy[:rounded], want_copy)
    assert bool((copy[rounded:] == 0xEE).all())
    assert copy_sum == _native.checksum(want_copy) == _native.checksum(want_copy[:nbytes])
    stepper.close()


@RELAXED
@given(cases(), st.booleans())
def test_file_state_with_host_copy_and_memory_state_with_file_copy(
    engine: _native.Engine, tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Case, int], from_file: bool
) -> None:
    case, chunk = drawn
    file = _native.File(tmp_path_factory.mktemp("step") / "f")
    layout = to_layout(case.planes, chunk)
    stepper = _native.Stepper(engine, slab_buffers(chunk, 3), chunk)
    span = 12 * case.elements
    if from_file:
        case.host_out()
        engine.write(file, 0, as_bytes(layout)).result()
        out = torch.zeros(case.out_size, dtype=torch.uint8)
        ticket = stepper.submit(case.elements, case.segments(), case.grads, src=(file, 0), dst=(file, span), out=out)
        got = torch.empty(span, dtype=torch.uint8)
        sums = ticket.result()
        engine.read(file, span, got).result()
        assert sums == (_native.checksum(got), None)
    else:
        case.file_out(0)
        nbytes = 2 * case.elements
        ticket = stepper.submit(case.elements, case.segments(), case.grads, state=layout, out_file=(file, 4096, nbytes))
        sums = ticket.result()
        got = as_bytes(layout)
        out = torch.empty(nbytes, dtype=torch.uint8)
        engine.read(file, 4096, out).result()
        assert sums == (None, _native.checksum(out))
    after = case.expected()
    assert torch.equal(got, as_bytes(to_layout(after, chunk)))
    assert torch.equal(out, case.copies(after, out.numel(), 0))
    stepper.close()


@pytest.mark.parametrize(("count", "slots"), [(5, 4), (1, 16), (2, 9)])
def test_records_stream_one_after_another(tmp_path: Path, count: int, slots: int) -> None:
    """Updates of `count` records queued at once, each reading what the turn before wrote, slots enough to run ahead."""
    engine = _native.Engine(threads=4, block=8192)
    file = _native.File(tmp_path / "f")
    chunk, span, turns = 2048, 12 * 5120, 20 // count
    stepper = _native.Stepper(engine, slab_buffers(chunk, slots), chunk, 2)
    records = [plain_case(seed) for seed in range(count)]
    for i, case in enumerate(records):
        engine.write(file, 2 * i * span, as_bytes(to_layout(case.planes, chunk))).result()
    engine.reap()
    tickets = []
    for turn in range(turns):
        for i, case in enumerate(records):
            src, dst = (2 * i + turn % 2) * span, (2 * i + 1 - turn % 2) * span
            tickets.append(stepper.submit(case.elements, case.segments(), case.grads, src=(file, src), dst=(file, dst)))
    sums = [t.result()[0] for t in tickets]
    for turn in range(turns):
        for i, case in enumerate(records):
            case.planes = case.expected()
            want = as_bytes(to_layout(case.planes, chunk))
            assert sums[turn * count + i] == _native.checksum(want)
    for i, case in enumerate(records):
        got = torch.empty(span, dtype=torch.uint8)
        engine.read(file, (2 * i + turns % 2) * span, got).result()
        assert torch.equal(got, as_bytes(to_layout(case.planes, chunk)))
    assert [t for t in engine.reap() if t in tickets] == tickets
    stepper.close()
    engine.close()


@RELAXED
@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.integers(3, 9), st.booleans())
def test_what_shares_bytes_keeps_its_order_whatever_is_due(
    engine: _native.Engine, tmp_path_factory: pytest.TempPathFactory, dues: list[int], slots: int, memory: bool
) -> None:
    """Updates of two records, each reading what the one before wrote, on file or in memory, due in any order."""
    file = _native.File(tmp_path_factory.mktemp("step") / "f")
    chunk, span = 2048, 12 * 5120
    stepper = _native.Stepper(engine, slab_buffers(chunk, slots), chunk)
    records = [plain_case(seed) for seed in range(2)]
    layouts = [to_layout(case.planes, chunk) for case in records]
    for i, layout in enumerate(layouts):
        engine.write(file, 2 * i * span, as_bytes(layout)).result()
    tickets = []
    for turn, due in enumerate(dues):
        i, case = turn % 2, records[turn % 2]
        src, dst = (2 * i + turn // 2 % 2) * span, (2 * i + 1 - turn // 2 % 2) * span
        where = {"state": layouts[i]} if memory else {"src": (file, src), "dst": (file, dst)}
        tickets.append(stepper.submit(case.elements, case.segments(), case.grads, due=due, **where))
    sums = [ticket.result()[0] for ticket in tickets]
    for turn in range(len(dues)):
        case = records[turn % 2]
        case.planes = case.expected()
        if not memory:
            assert sums[turn] == _native.checksum(as_bytes(to_layout(case.planes, chunk)))
    if memory:
        for case, layout in zip(records, layouts, strict=True):
            assert torch.equal(as_bytes(layout), as_bytes(to_layout(case.planes, chunk)))
    stepper.close()


def test_what_is_due_sooner_goes_in_front() -> None:
    """Of the rest of a record that has begun, and of one that has not."""
    engine = _native.Engine()
    stepper = _native.Stepper(engine, slab_buffers(2048, 3), 2048)
    no_grads = torch.empty(0, dtype=torch.uint8)
    states = [torch.zeros(3 * elements) for elements in (1 << 20, 2048, 2048)]
    for _ in range(100):  # the first may be over before the others are there
        long, late, soon = (
            stepper.submit(
                state.numel() // 3, [(0, 1024, -1, "f32", -1, "f32", *([1.0] * 8))], no_grads, state=state, due=due
            )
            for state, due in zip(states, (5, 9, 1), strict=True)
        )
        for ticket in (long, late, soon):
            ticket.result()
        if [ticket for ticket in engine.reap() if ticket in (long, late, soon)] == [soon, long, late]:
            break
    else:
        raise AssertionError("it never went in front")
    stepper.close()
    engine.close()


def test_no_bit_depends_on_how_many_chunks_are_under_way(engine: _native.Engine, tmp_path: Path) -> None:
    """The number is looked for as long as there is always something to do, and stays within 4 and what there is."""
    file = _native.File(tmp_path / "f")
    chunk, span, count, turns = 2048, 12 * 5120, 8, 24
    stepper = _native.Stepper(engine, slab_buffers(chunk, 24), chunk)
    records = [plain_case(seed) for seed in range(count)]
    for i, case in enumerate(records):
        engine.write(file, 2 * i * span, as_bytes(to_layout(case.planes, chunk))).result()
    tickets, seen = [], {stepper.appetite}
    for turn in range(turns):
        for i, case in enumerate(records):
            src, dst = (2 * i + turn % 2) * span, (2 * i + 1 - turn % 2) * span
            tickets.append(stepper.submit(case.elements, case.segments(), case.grads, src=(file, src), dst=(file, dst)))
    sums = []
    for ticket in tickets:
        sums.append(ticket.result()[0])
        seen.add(stepper.appetite)
    assert len(seen) > 1
    assert all(4 <= chunks <= 24 for chunks in seen)
    for turn in range(turns):
        for i, case in enumerate(records):
            case.planes = case.expected()
            assert sums[turn * count + i] == _native.checksum(as_bytes(to_layout(case.planes, chunk)))
    stepper.close()


def test_bytes_moved_are_the_records(tmp_path: Path) -> None:
    engine = _native.Engine()
    file = _native.File(tmp_path / "f")
    case, chunk = plain_case(3), 2048
    case.file_out(0)
    engine.write(file, 0, as_bytes(to_layout(case.planes, chunk))).result()
    before = engine.counters()
    stepper = _native.Stepper(engine, slab_buffers(chunk, 3), chunk)
    span = 12 * 5120
    stepper.submit(
        5120, case.segments(), case.grads, src=(file, 0), dst=(file, span), out_file=(file, 2 * span, 3000)
    ).result()
    after = engine.counters()
    assert after["bytes_read"] - before["bytes_read"] == span
    assert after["bytes_written"] - before["bytes_written"] == span + 4096
    stepper.close()
    engine.close()


def test_times_of_a_record_and_of_the_drive(engine: _native.Engine, tmp_path: Path) -> None:
    """When reads, arithmetic and writes began and ended, as the caller saw it; the drive is busy with them alone."""
    case = plain_case(1)
    file = _native.File(tmp_path / "f")
    layout = as_bytes(to_layout(case.planes, 2048))
    plain = engine.write(file, 0, layout)
    plain.result()
    assert plain.phases is None
    stepper = _native.Stepper(engine, slab_buffers(2048, 3), 2048)
    idle, start = engine.counters(), time.perf_counter_ns()
    on_file = stepper.submit(case.elements, case.segments(), case.grads, src=(file, 0), dst=(file, 1 << 20))
    on_file.result()
    end, after = time.perf_counter_ns(), engine.counters()
    assert on_file.phases is not None
    reads, computes, writes = on_file.phases
    assert start <= reads[0] <= computes[0] <= writes[0] < writes[1] <= end
    assert reads[0] < reads[1] <= computes[1] <= writes[1]
    took = {name: after[name] - idle[name] for name in ("read_ns", "write_ns", "busy_ns")}
    assert max(took["read_ns"], took["write_ns"]) <= took["busy_ns"] <= took["read_ns"] + took["write_ns"]
    assert took["busy_ns"] <= end - start
    in_memory = stepper.submit(case.elements, case.segments(), case.grads, state=to_layout(case.planes, 2048))
    in_memory.result()
    assert in_memory.phases is not None
    assert in_memory.phases[0] == in_memory.phases[2] == (0, 0)
    assert in_memory.phases[1][0] > 0
    assert engine.counters()["busy_ns"] == after["busy_ns"]
    stepper.close()
