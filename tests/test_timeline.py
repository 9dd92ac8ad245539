"""The recorder: spans that nest, rows that do not cross, and a trace file that others can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tierzero.monitoring.timeline import ROWS, TRAINING, Recorder

KEYS = st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 9))


def crossing(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of spans of one row of which neither holds the other, nor comes before it."""
    found = []
    for tid in {event.get("tid") for event in events}:
        spans = [event for event in events if event["ph"] == "X" and event["tid"] == tid]
        spans.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_: list[dict[str, Any]] = []
        for span in spans:
            while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= span["ts"] + 1e-6:
                open_.pop()
            if open_ and span["ts"] + span["dur"] > open_[-1]["ts"] + open_[-1]["dur"] + 1e-6:
                found.append((open_[-1]["name"], span["name"]))
            open_.append(span)
    return found


@given(st.lists(KEYS, max_size=40))
def test_the_training_threads_spans_nest(moves: list[tuple[bool, int, int]]) -> None:
    """Whatever is begun and ended in whatever order; a span that is open already does not begin again."""
    now = 0
    recorder = Recorder(lambda: now)
    open_: list[int] = []
    begun = 0
    for begins, key, wait in moves:
        now += 1000 * wait
        if begins:
            begun += key not in open_
            open_ += [key] if key not in open_ else []
            recorder.track.begin(key, "forward", str(key))
        else:
            open_ = open_[: open_.index(key)] if key in open_ else open_
            recorder.track.end(key)
        assert len(recorder.spans) == begun - len(open_)
    recorder.track.clear()
    assert len(recorder.spans) == begun
    events = list(recorder.events())
    assert crossing(events) == []
    assert len({event["tid"] for event in events if event["ph"] == "X"}) <= 1


@given(
    st.lists(
        st.tuples(st.sampled_from(ROWS), st.integers(0, 20), st.integers(0, 10)).map(
            lambda each: (each[0], each[1], each[1] + each[2])
        ),
        max_size=30,
    )
)
def test_rows_do_not_cross(spans: list[tuple[str, int, int]]) -> None:
    """Every span is in the trace, in a row of its kind, at its time; side by side there are as few rows as need be."""
    recorder = Recorder(lambda: 0)
    for row, start, end in spans:
        recorder.add(row, "fetch", f"{row} {start} {end}", 1000 * start, 1000 * end)
    events = list(recorder.events())
    assert crossing(events) == []
    rows = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    drawn = [
        (rows[event["tid"]], event["ts"], event["ts"] + event.get("dur", 0)) for event in events if event["ph"] in "Xi"
    ]
    expected = [(row, float(start), float(start if row == "evict" else end)) for row, start, end in spans]
    assert sorted(drawn) == sorted(expected)
    for row in set(ROWS) - {TRAINING}:
        at_once = max(
            (sum(s <= t < e for r, s, e in spans if r == row) for t in range(31)),
            default=0,
        )
        lanes = sum(name == row for name in rows.values())
        assert lanes <= max(1, at_once) + any(r == row and s == e for r, s, e in spans)


def test_file(tmp_path: Path) -> None:
    """JSON, whole or not there; rates from totals; what began before the recorder begins with it."""
    now = 5_000_000
    recorder = Recorder(lambda: now)
    recorder.add("fetch", "fetch", "early", 1_000_000, 6_000_000, bytes=7)
    recorder.add("fetch", "fetch", "long over", 1_000_000, 2_000_000)
    recorder.sample(nvme_read=0, device_held=1 << 20)
    now += 1_000_000
    recorder.sample(nvme_read=3_000_000, device_held=2 << 20)
    recorder.moment("evict", "evict", "evict a", bytes=3)
    recorder.write(tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    found = json.loads((tmp_path / "trace.json").read_text())
    by_name = {event["name"]: event for event in found["traceEvents"]}
    assert by_name["early"]["ts"] == 0
    assert by_name["early"]["dur"] == 1000
    assert by_name["early"]["args"] == {"bytes": 7}
    assert "long over" not in by_name
    assert by_name["nvme_read GB/s"]["args"] == {"nvme_read GB/s": 3.0}
    assert by_name["device MiB"]["args"] == {"device MiB": 2.0}
    assert by_name["evict a"]["ph"] == "i"


def test_a_recorder_does_not_grow_without_end() -> None:
    recorder = Recorder(lambda: 1)
    recorder.most = 2
    for index in range(5):
        recorder.add("fetch", "fetch", str(index), 1, 1)
    assert [span.name for span in recorder.spans] == ["0", "1"]
    assert recorder.dropped == 3
