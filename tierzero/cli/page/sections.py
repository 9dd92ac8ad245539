"""The parts of the page, from what a run left behind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from tierzero.cli.page.charts import line_chart, share_chart
from tierzero.cli.page.html import NAMES, bar, legend, paragraph, section, table, tiles
from tierzero.cli.page.rundata import Run, median, number
from tierzero.cli.page.timeline import timeline
from tierzero.hardware.endurance import days_left, per_day
from tierzero.monitoring.clock import PARTS
from tierzero.monitoring.step_stats import LINKS
from tierzero.sizes import format_decimal, format_size

_LINK_NAMES = {
    "nvme_read": "NVMe read",
    "nvme_written": "NVMe written",
    "h2d": "to the device",
    "d2h": "from the device",
}
UNKNOWN = "-"


def sections(run: Run) -> Iterator[str]:
    """HTML, top to bottom."""
    yield _head(run)
    yield section("Loss", line_chart(run.steps, run.of("loss"), "compute", "the loss of each step"))
    yield section(
        "Tokens per second",
        line_chart(run.steps, run.of("tokens_per_s"), "d2h", "tokens per second of each step", from_zero=True),
    )
    yield _time(run)
    yield _timeline(run)
    yield _traffic(run)
    yield _budgets(run)
    yield _wear(run)


def _size(nbytes: float) -> str:
    return format_size(round(nbytes)) if math.isfinite(nbytes) else UNKNOWN


def _fixed(value: float, digits: int, unit: str = "") -> str:
    return f"{value:,.{digits}f}{unit}" if math.isfinite(value) else UNKNOWN


def _head(run: Run) -> str:
    about, losses = run.about, run.of("loss")
    wall, exposed = run.usual("wall_s"), run.usual("io", "exposed_io_s")
    hidden = run.usual("io", "hidden_io_s")
    hit = number(run.lines[-1], "io", "hit_rate")
    values = [
        ("steps", f"{run.last_step:,} of {run.total_steps:,}"),
        ("loss", f"{_fixed(losses[0], 4)} to {_fixed(losses[-1], 4)}"),
        ("step", _fixed(run.usual("step_s"), 3, " s")),
        ("tokens per second", _fixed(run.usual("tokens_per_s"), 0)),
        ("exposed I/O", _fixed(100 * exposed / wall if wall > 0 else math.nan, 1, " %")),
        ("hidden I/O", _fixed(100 * hidden / (hidden + exposed) if hidden + exposed > 0 else math.nan, 1, " %")),
        ("hits, last step", _fixed(100 * hit, 1, " %")),
    ]
    params = number(about, "params")
    what = [str(about.get("model", "")), f"{params:,.0f} parameters in {about.get('dtype')}" if params > 0 else ""]
    what.append(f"accumulating {about['accumulate']}" if number(about, "accumulate") > 1 else "")
    return (
        f"<h1>{escape(run.title)}</h1>"
        + paragraph(", ".join(part for part in what if part))
        + tiles(values)
        + paragraph(
            "Medians leave the first two steps out, which learn the order of use. Exposed: of the step, what was spent "
            "waiting for I/O and updates; hidden: how much of all I/O and update time was not."
        )
    )


def _time(run: Run) -> str:
    if not any(isinstance(line.get("parts"), dict) for line in run.lines):
        return section("Where the time goes", paragraph("This run's metrics.jsonl does not say."))
    series = [(part, run.of("parts", part)) for part in PARTS]
    wall = run.usual("wall_s")
    rows = [
        (
            NAMES[part],
            _fixed(run.usual("parts", part), 4),
            _fixed(100 * run.usual("parts", part) / wall if wall > 0 else math.nan, 1),
            _fixed(sum(value for value in values if math.isfinite(value)), 1),
        )
        for part, values in series
    ]
    used = [(part, NAMES[part]) for part, values in series if any(value > 0 for value in values)]
    return section(
        "Where the time goes",
        share_chart(run.steps, series, "the share of each step's wall time, by what the training thread did"),
        legend(used),
        "<p></p>",
        table(("", "s a step, median", "% of the step", "s, whole run"), rows),
    )


def _timeline(run: Run) -> str:
    found = timeline(run.events)
    missing = "No step was recorded (trace.json): `tierzero train --trace STEP` records one."
    return section("One step", found if found is not None else paragraph(missing))


def _traffic(run: Run) -> str:
    rows = []
    for link in LINKS:
        moved, expected = run.usual("bytes", link), number(run.about, "step_bytes", link)
        busy, wall = run.usual("busy", link), run.usual("wall_s")
        rate = median(
            [
                number(line, "bytes", link) / 1e9 / number(line, "busy", link)
                for line in run.settled
                if number(line, "busy", link) > 0
            ]
        )
        rows.append(
            (
                _LINK_NAMES[link],
                _size(moved),
                _size(expected),
                _fixed(moved / expected if expected > 0 else math.nan, 3),
                _fixed(100 * busy / wall if wall > 0 else math.nan, 0, " %"),
                _fixed(rate, 2),
            )
        )
    return section(
        "Traffic",
        paragraph("Bytes a step, median, beside what the analytic table says that placement and budgets need."),
        table(("link", "moved", "analytic", "ratio", "busy", "GB/s while busy"), rows),
    )


def _budgets(run: Run) -> str:
    device = max((value for value in run.of("io", "device_peak") if math.isfinite(value)), default=math.nan)
    host, planned = number(run.summary, "host_peak"), ""
    if not math.isfinite(host):  # only a run that came to its end has measured it
        host, planned = number(run.about, "host_needed"), " planned"
    rows = []
    for name, used, budget, how in (
        ("device", device, number(run.about, "device_budget"), ""),
        ("host", host, number(run.about, "host_budget"), planned),
    ):
        if used >= 0 and budget > 0:
            text = f"{_size(used)}{how} of {_size(budget)}"
            rows.append(f"<tr><td>{name}</td><td>{escape(text)}</td><td>{bar(used / budget)}</td></tr>")
    if not rows:
        return section("Budgets", paragraph("The run has left no budgets (run.json)."))
    return section("Budgets, at most", f'<div class="scroll"><table><tbody>{"".join(rows)}</tbody></table></div>')


def _wear(run: Run) -> str:
    written = sum(value for value in run.of("bytes", "nvme_written") if math.isfinite(value))
    seconds = sum(value for value in run.of("wall_s") if math.isfinite(value))
    if not math.isfinite(number(run.lines[-1], "bytes", "nvme_written")):
        return section("Drive wear", paragraph("This run's metrics.jsonl does not say what was written."))
    rows = [("written by the steps", _size(written))]
    if seconds > 0:
        rows.append(("a day at that rate", f"{per_day(int(written), seconds) / 1e12:,.2f} TB"))
    rating = number(run.about, "nvme_tbw")
    if rating > 0:
        rows.append(("of the drives' rating", f"{100 * written / rating:.4f} % of {format_decimal(round(rating))}"))
        left = days_left(int(rating), int(written), seconds) if seconds > 0 else None
        if left is not None and math.isfinite(left):
            rows.append(("until the rating, of new drives", f"{left:,.0f} days"))
    else:
        rows.append(("the drives' rating", "not known: set tiers.nvme_tbw"))
    return section("Drive wear", table(("", ""), rows))
