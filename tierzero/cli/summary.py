"""The end of a run, for a person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierzero.sizes import format_decimal, format_size


def print_summary(console: Console, summary: dict[str, Any], sample: str, out: Path) -> None:
    """The summary as a table, the sample, and where things are."""
    if sample:
        console.rule("sample", style="dim")
        console.print(Text(printable(sample)), soft_wrap=True)
        console.rule(style="dim")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows(summary):
        table.add_row(Text(name), Text(value))
    console.print(table)
    console.print(Text(f"summary {out / 'summary.json'}, weights {out / 'export'}"))


def printable(text: str) -> str:
    """`text` without control characters: what a model makes up must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of what is worth reading."""

    def of(part: str, whole: str) -> str:
        return f"{format_size(summary[part])} of {format_size(summary[whole])}"

    def against(link: str, kernel: str) -> str:
        text = f"{format_size(summary[link])}, analytic {format_size(summary[link + '_expected'])}"
        return text if summary[kernel] is None else f"{text}, the kernel's count {format_size(summary[kernel])}"

    stalls = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in summary["stall_s"].items())
    out = [("steps", f"{summary['steps']}")]
    if summary["first_loss"] is not None:
        out += [
            ("loss", f"{summary['first_loss']:.4f} -> {summary['last_loss']:.4f}"),
            ("step time", f"{summary['step_s']:.2f} s, {summary['tokens_per_s']:,.0f} tokens/s"),
        ]
    return [
        *out,
        ("device peak", of("device_peak", "device_budget")),
        ("host peak", of("host_peak", "host_budget")),
        (
            "resident memory",
            (
                f"{format_size(summary['rss_peak'])} at most, {format_size(summary['rss_before'])} before, "
                f"activations about {format_size(summary['activation_bytes'])}"
            ),
        ),
        ("NVMe read", against("nvme_read", "proc_io_read")),
        ("NVMe written", against("nvme_written", "proc_io_written")),
        ("drive wear", _wear(summary)),
        ("waited for", stalls),
        *([("updates begun early", _guesses(summary))] if summary["guesses"] else []),
        *([("checkpoints", _checkpoints(summary["checkpoints"]))] if summary["checkpoints"] else []),
        ("whole run", f"{summary['seconds']:.0f} s"),
    ]


def _checkpoints(saves: dict[str, Any]) -> str:
    """How many were written, what training waited for them, and where the last one is."""
    text = f"{saves['saved']} saved, {format_size(saves['bytes'])}, training waited {saves['waited_s']:.1f} s"
    text += f", {saves['failed']} failed" if saves["failed"] else ""
    return text + (f"; the last is {saves['last']}" if saves["last"] else "")


def _guesses(summary: dict[str, Any]) -> str:
    """How many of the updates that began in backward were right."""
    return f"{summary['guesses']:,} in backward, {summary['guesses_right']:,} of them as the step then wanted them"


def _wear(summary: dict[str, Any]) -> str:
    """Bytes written per day, and how long the drives' rating lasts if it is known."""
    rate = f"{summary['nvme_written_per_day'] / 1e12:.2f} TB/day"
    if summary["nvme_tbw"] is None:
        return f"{rate}; set tiers.nvme_tbw to see how long the drives last"
    days = summary["drive_days_left"]
    left = "no wear" if days is None else f"{days:,.0f} days to the rated {format_decimal(summary['nvme_tbw'])}"
    return f"{rate}, {left}"
