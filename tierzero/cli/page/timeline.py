"""One step drawn from trace.json: a row for the training thread, the links, fetches and updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from tierzero.cli.page.charts import SIZE
from tierzero.cli.page.html import legend, paragraph
from tierzero.cli.page.rundata import number

FINEST = 1 / 4000  # of the step: shorter spans of a kind that are as close are drawn as one
LANES = 6  # of a kind, at most
_KINDS = {  # a span's kind -> its colour
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "gradient": "d2h",
    "optimizer": "engine",
    "save": "save",
    "fetch": "fetch",
    "read": "read",
    "write": "write",
    "AdamW": "engine",
    "update": "update",
    "guess": "update",
    "norms": "gradient",
}
_ROWS = (
    ("training thread", "training thread"),
    ("fetch", "fetches"),
    ("update: read", "updates: reading"),
    ("update: AdamW", "updates: AdamW"),
    ("update: write", "updates: writing"),
    ("update", "updates"),
    ("norms", "gradient norms"),
)
_LINKS = (("nvme_read", "drive reads"), ("nvme_written", "drive writes"), ("h2d", "to the device"), ("d2h", "from it"))
_MORE = " and more"
Spans = list[tuple[float, float, str, str]]  # start, end (shares of the step), colour, names


def timeline(events: Sequence[dict[str, Any]]) -> str | None:
    """HTML of the first whole step in a trace's events; None if there is none."""
    spans = [
        event for event in events if event.get("ph") == "X" and math.isfinite(number(event, "ts") + _length(event))
    ]
    step = next((event for event in spans if event.get("cat") == "step" and _length(event) > 0), None)
    if step is None:
        return None
    start, length = number(step, "ts"), _length(step)
    names = {
        event["tid"]: str(event["args"].get("name"))
        for event in events
        if event.get("ph") == "M"
        and event.get("name") == "thread_name"
        and isinstance(event.get("args"), dict)
        and isinstance(event.get("tid"), int)
    }
    rows = []
    for row, shown in _ROWS:
        lanes = [tid for tid, name in names.items() if name == row][:LANES]
        drawn = [_cut([event for event in spans if event.get("tid") == tid], start, length) for tid in lanes]
        drawn = [lane for lane in drawn if lane]
        if drawn:
            rows.append(_row(shown, drawn, 2.2 if row == "training thread" else 0.9))
    for link, shown in _LINKS:
        found = _rates(events, f"{link} GB/s", start, length)
        if found is not None:
            rows.append(f'<div>{escape(shown)}<br><span class="soft">up to {found[0]:.2f} GB/s</span></div>{found[1]}')
    seconds = length / 1e6
    number_of = int(number(step, "args", "step")) if math.isfinite(number(step, "args", "step")) else "?"
    marks = "".join(
        f'<span class="{place}" style="left:{25 * part}%">{seconds * part / 4:.3g} s</span>'
        for part, place in enumerate(("", "between", "", "between", "end"))
    )
    axis = f'<div></div><div class="xs">{marks}</div>'
    return (
        paragraph(f"Step {number_of}, {seconds:.3f} s. Point at a bar to see what it is.")
        + f'<div class="rows">{"".join(rows)}{axis}</div>'
        + legend(
            [
                ("forward", "forward"),
                ("recompute", "recomputation"),
                ("backward", "backward"),
                ("fetch", "fetching, waiting for it, reading"),
                ("update", "updates, waiting for them, writing"),
                ("gradient", "gradient norms, waiting for gradients"),
                ("d2h", "gradients going out"),
                ("engine", "clipping, step, AdamW"),
            ]
        )
    )


def _length(event: dict[str, Any]) -> float:
    return number(event, "dur")


def _colour(event: dict[str, Any]) -> str | None:
    """None for what only holds others."""
    kind, name = str(event.get("cat")), str(event.get("name"))
    if kind == "wait":
        waits = ("fetch", "update", "activation")
        return next((part for part in waits if name.startswith(f"wait for {part}")), "gradient")
    return _KINDS.get(kind)


def _cut(events: list[dict[str, Any]], start: float, length: float) -> Spans:
    """The spans of one lane inside the step, outer ones first, with tiny ones joined."""
    out: Spans = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        colour = _colour(event)
        left, right = (event["ts"] - start) / length, (event["ts"] + event["dur"] - start) / length
        if colour is None or right <= 0 or left >= 1:
            continue
        left, right = max(0.0, left), min(1.0, right)
        text = f"{event.get('name')}, {event['dur'] / 1000:.2f} ms"
        if out and out[-1][2] == colour and right - left < FINEST and left - out[-1][1] < FINEST:
            first, last, _, names = out[-1]
            out[-1] = first, max(last, right), colour, names.removesuffix(_MORE) + _MORE
        else:
            out.append((left, right, colour, text))
    return out


def _row(name: str, lanes: list[Spans], height: float) -> str:
    each = SIZE / len(lanes)
    bars = "".join(
        f'<rect class="f-{colour}" x="{left * SIZE:.2f}" width="{max(0.6, (right - left) * SIZE):.2f}" '
        f'y="{lane * each:.1f}" height="{each * 0.9:.1f}"><title>{escape(text)}</title></rect>'
        for lane, spans in enumerate(lanes)
        for left, right, colour, text in spans
    )
    return f"<div>{escape(name)}</div>{_strip(bars, max(1.4, height * len(lanes)), name)}"


def _strip(marks: str, height: float, name: str) -> str:
    return (
        f'<div class="row" style="height:{height:.1f}rem"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(name)}">{marks}</svg></div>'
    )


def _rates(events: Sequence[dict[str, Any]], name: str, start: float, length: float) -> tuple[float, str] | None:
    """(the most, its row) of a counter inside the step; None where it was never more than nothing."""
    columns = [0.0] * 200
    for event in events:
        at, value = number(event, "ts"), number(event, "args", name)
        if event.get("ph") == "C" and event.get("name") == name and start <= at < start + length and value > 0:
            column = min(len(columns) - 1, int((at - start) / length * len(columns)))
            columns[column] = max(columns[column], value)
    most = max(columns)
    if not most > 0:
        return None
    width = SIZE / len(columns)
    path = "".join(
        f"M{index * width:.0f},{SIZE}V{SIZE * (1 - value / most):.0f}h{width:.0f}V{SIZE}z"
        for index, value in enumerate(columns)
        if value > 0
    )
    colour = "write" if name.startswith("nvme_written") else "d2h" if name.startswith("d2h") else "read"
    return most, _strip(f'<path class="f-{colour}" d="{path}"/>', 2.0, name)
