"""Charts over steps as inline SVG that stretches with the page, with its labels in HTML so that they stay readable.

The SVG is 1000 by 1000 whatever its size on the page; strokes do not scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

COLUMNS = 400  # groups that a long run is drawn in
SIZE = 1000


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`, both finite; at least one."""
    if not high - low > 1e-300:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)] or [low]


def groups(count: int, most: int = COLUMNS) -> list[range]:
    """`count` things in order, in at most `most` groups of neighbours, none of them empty."""
    parts = min(count, most)
    edges = [count * part // parts for part in range(parts + 1)] if parts else []
    return [range(a, b) for a, b in pairwise(edges)]


def drawable(value: float) -> bool:
    """Whether it is a number that arithmetic on axes does not break."""
    return -1e300 < value < 1e300


def short(value: float) -> str:
    """A number for an axis."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


class Frame:
    """Axes. x runs over [left, right], y over [bottom, top]."""

    def __init__(self, xs: Sequence[float], low: float, high: float) -> None:
        self.left, self.right = self.first, self.last = min(xs), max(xs)
        if self.left == self.right:
            self.left, self.right = self.left - 1, self.right + 1
        if not high - low > 1e-300:
            margin = abs(low) * 0.1 or 1.0
            low, high = low - margin, high + margin
        self.bottom, self.top = low, high

    def x(self, value: float) -> float:
        return SIZE * (value - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        return SIZE * (1 - (value - self.bottom) / (self.top - self.bottom))

    def draw(self, marks: str, label: str, what: str, show: Callable[[float], str] = short) -> str:
        """The chart around the SVG elements `marks`. `what` is said to those who cannot see it; `label` is under x."""
        heights = ticks(self.bottom, self.top)
        grid = "".join(f"M0,{self.y(at):.1f}H{SIZE}" for at in heights)
        ys = "".join(f'<span style="top:{self.y(at) / SIZE * 100:.2f}%">{escape(show(at))}</span>' for at in heights)
        steps = sorted({int(at) for at in ticks(self.left, self.right) if at == int(at)} or {round(self.left)})
        xs = "".join(
            f'<span{_end(self.x(at))} style="left:{self.x(at) / SIZE * 100:.2f}%">{at:,}</span>'
            for at in steps
            if self.first <= at <= self.last
        )
        return (
            f'<div class="chart"><div class="ys">{ys}</div><div class="plot" style="height:15rem">'
            f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" aria-label="{escape(what)}">'
            f'<path class="grid" d="{grid}"/>{marks}</svg></div>'
            f'<div class="xs">{xs}<em>{escape(label)}</em></div></div>'
        )


def _end(x: float) -> str:
    return ' class="end"' if x > 0.97 * SIZE else ""


def line_chart(xs: Sequence[float], ys: Sequence[float], colour: str, what: str, *, from_zero: bool = False) -> str:
    """One line over steps. Where y is not finite the line is broken. Long runs show the least and the most of each
    group of steps, so that no spike is lost.
    """
    finite = [(x, y) for x, y in zip(xs, ys, strict=True) if drawable(y)]
    if not finite:
        return f'<p class="soft">No step has a finite value: {escape(what)}.</p>'
    values = [y for _, y in finite]
    floor = 0.0 if from_zero and min(values) >= 0 else min(values)
    margin = 0.04 * (max(values) - floor)
    frame = Frame(xs, floor if floor == 0.0 else floor - margin, max(values) + margin)
    runs: list[list[str]] = [[]]
    for group in groups(len(xs)):
        points = [(xs[index], ys[index]) for index in group]
        seen = [point for point in points if drawable(point[1])]
        if len(seen) < len(points):
            runs.append([])
        if seen:
            ends = {min(seen, key=lambda point: point[1]), max(seen, key=lambda point: point[1])}
            runs[-1] += [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in sorted(ends)]
    lines = "".join(f"M{'L'.join(run)}" for run in runs if len(run) > 1)
    dots = "".join(f"M{run[0]}h0.01" for run in runs if len(run) == 1)
    marks = f'<path class="s-{colour}" d="{lines}"/><path class="dots s-{colour}" d="{dots}"/>'
    missing = [x for x, y in zip(xs, ys, strict=True) if not drawable(y)]
    chart = frame.draw(marks, "step", what)
    if missing:
        where = f"step {int(missing[0]):,}"
        where = where if len(missing) == 1 else f"{len(missing):,} steps, the first of them {where}"
        chart += f'<p class="soft">Not finite at {where}: the line is broken there.</p>'
    return chart


def share_chart(xs: Sequence[float], parts: Sequence[tuple[str, Sequence[float]]], what: str) -> str:
    """What each of `parts` (colour's name, seconds by step) takes of their sum: columns that are stacked, one a step or
    a group of steps.
    """
    frame = Frame([xs[0] - 0.5, xs[-1] + 0.5], 0.0, 1.0)
    paths = {colour: [] for colour, _ in parts}  # type: dict[str, list[str]]
    for group in groups(len(xs), 160):
        sums = {colour: sum(values[index] for index in group if drawable(values[index])) for colour, values in parts}
        whole = sum(sums.values())
        if whole <= 0:
            continue
        left, right = frame.x(xs[group[0]] - 0.5), frame.x(xs[group[-1]] + 0.5)
        base = 0.0
        for colour, value in sums.items():
            if value > 0:
                top, bottom = frame.y((base + value) / whole), frame.y(base / whole)
                paths[colour].append(f"M{left:.1f},{bottom:.1f}V{top:.1f}H{right:.1f}V{bottom:.1f}z")
            base += value
    marks = "".join(f'<path class="f-{colour}" d="{"".join(found)}"/>' for colour, found in paths.items() if found)
    return frame.draw(marks, "step", what, lambda share: f"{100 * share:.0f} %")
