"""The report as a person reads it: tables, and the rate of a long write over time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tierzero.bench.nvme import Report
from tierzero.bench.search import Found, summary
from tierzero.bench.stream import KINDS
from tierzero.sizes import format_size

_HEIGHT = 6  # lines of the plot
_BAR = 18  # columns of a bar


def show(console: Console, report: Report) -> None:
    """Print everything."""
    for path, found, saved in zip(report.paths, report.found, report.saved, strict=True):
        console.print(_target(str(path), found, console.encoding))
        if saved is not None:
            _say(console, f"stored as the profile of this drive in {saved}")
    if report.together is not None:
        label = f"all {len(report.paths)} together, striped {':'.join(map(str, report.weights))}"
        console.print(_target(label, report.together, console.encoding))
    read, written = report.totals()
    _say(
        console,
        f"{report.seconds:.0f} s, {format_size(read)} read, {format_size(written)} written; nothing left behind",
    )
    for note in report.notes:
        _say(console, f"note: {note}")


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)  # a path may look like markup


def _target(label: str, found: Found, encoding: str) -> RenderableType:
    winner = found.winner
    assert winner is not None
    how = "O_DIRECT" if found.direct else "buffered"
    head = (
        f"{label}: {format_size(found.size)}, {how}, {found.huge_pages:.0%} of the buffers in huge pages\n"
        f"best: {winner.engine}, blocks of {format_size(winner.block)}, {winner.depth} in flight"
    )
    return Group(Text(head, style="bold"), _grid(found, encoding), _rates(found), *_plot(found, encoding))


def _grid(found: Found, encoding: str) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in ("engine", "block", "depth"):
        table.add_column(name, justify="left" if name == "engine" else "right", overflow="fold")
    for kind in KINDS:
        table.add_column(f"{kind} GB/s", justify="right", overflow="fold")
    table.add_column("mixed", overflow="fold")
    top = max(found.rate(setting, "mixed") for setting in found.settings)
    for setting in found.ranking():
        share = found.rate(setting, "mixed") / top if top else 0.0
        table.add_row(
            setting.engine,
            format_size(setting.block),
            str(setting.depth),
            *(f"{found.rate(setting, kind) / 1e9:.2f}" for kind in KINDS),
            _bar(share, encoding),
            style="bold green" if setting == found.winner else "",
        )
    return table


def _rates(found: Found) -> Table:
    winner = found.winner
    assert winner is not None
    table = Table(box=None, pad_edge=False)
    table.add_column("at the best setting", overflow="fold")
    names = ["GB/s", "burst", "sustained", "for", "CPU s/GB"]
    for name in names + (["fio GB/s", "ratio", "fio CPU s/GB"] if found.against else []):
        table.add_column(name, justify="right", overflow="fold")
    for kind in KINDS:
        row = summary(found, kind)
        cells = [
            f"{row['GBps']:.2f}",
            f"{row['burst_GBps']:.2f}",
            f"{row['sustained_GBps']:.2f}",
            f"{row['sustained_seconds']:.0f} s",
            f"{row['cpu_s_per_GB']:.4f}",
        ]
        if found.against:
            cells += [f"{row['fio_GBps']:.2f}", f"{row['ratio']:.3f}", f"{row['fio_cpu_s_per_GB']:.4f}"]
        table.add_row(kind, *cells)
    if found.fio_job is not None:
        table.caption = Text(f"fio: {found.fio_job.label}; in turns with the engine")
        table.caption_justify = "left"
    return table


def _bar(share: float, encoding: str) -> str:
    return ("█" if _blocks(encoding) else "#") * round(share * _BAR)


def _blocks(encoding: str) -> bool:
    try:
        "█▁".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _plot(found: Found, encoding: str) -> Sequence[Text]:
    """The long write: a column for every part of the time, as high as the rate."""
    long = found.long["write"]
    top = max(long.line) or 1.0
    steps = " ▁▂▃▄▅▆▇█" if _blocks(encoding) else " .:#"
    fine = len(steps) - 1
    lines = []
    for level in range(_HEIGHT - 1, -1, -1):
        cells = (round(rate / top * _HEIGHT * fine) - level * fine for rate in long.line)
        row = "".join(steps[min(max(cell, 0), fine)] for cell in cells)
        label = f"{top / 1e9:6.2f} " if level == _HEIGHT - 1 else " " * 7
        lines.append(Text(label + ("┤" if fine == 8 else "|") + row, style="cyan"))
    foot = f"{0.0:6.2f} {'└' if fine == 8 else '+'}{('─' if fine == 8 else '-') * len(long.line)}"
    title = f"write, GB/s over {long.sample.seconds:.0f} s"
    return [Text(title), *lines, Text(foot, style="cyan")]
