"""What `tierzero tune` found: tables and plots."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierzero.cli.tune import Result
from tierzero.errors import ConfigError

_HEIGHT = 6  # lines of the plot
_COLUMN = 6  # characters of one depth in it
_QUIET = 0.05  # of the step: less waiting than that limits nothing
CAUSES = {
    "fetch": "it waits for parameters: more host memory keeps them there, a larger device budget fetches them sooner",
    "update": "it waits for the optimizer's traffic: more tokens a step hide it",
    "gradient": "it waits for gradients that an update still uses",
    "activation": "it waits for activations that come back",
}
PARTS = {"compute": "compute", "drive": "the drive", "link": "the link to the device"}


def as_dict(result: Result) -> dict[str, Any]:
    """Everything, as `--json` prints it."""
    found = result.depths
    name, bound = result.bound
    return {
        "chosen": result.chosen,
        "step_s": result.step_s,
        "tokens_per_s": result.tokens / result.step_s,
        "largest_depth": result.largest,
        "complete": found.complete,
        "depths": [
            {
                "depth": depth,
                "step_s": found.time(depth),
                "samples": found.samples[depth],
                "stalls": result.stalls_by_depth[depth],
            }
            for depth in sorted(found.samples)
        ],
        "sweeps": {
            name: [{"values": row.values, "step_s": row.seconds, "samples": row.samples} for row in rows]
            for name, rows in result.sweeps.items()
        },
        "bound_s": bound,
        "bound_by": name,
        "bounds": result.bounds,
        "above_bound": above(result),
        "stalls": result.stalls,
        "limit": limit(result),
        "seconds": result.seconds,
    }


def above(result: Result) -> float:
    """How much longer the chosen step takes than its slowest part: 0.1 is a tenth."""
    return max(0.0, result.step_s / result.bound[1] - 1) if result.bound[1] > 0 else 0.0


def limit(result: Result) -> str:
    """What keeps the step from being shorter, in words."""
    name, _ = result.bound
    if sum(result.stalls.values()) < _QUIET * result.step_s:
        return "compute: it waits for nothing"
    if name != "compute" and above(result) < 2 * _QUIET:
        return f"{PARTS[name]}, which is busy all the time"
    cause = max(result.stalls, key=lambda cause: result.stalls[cause])
    return CAUSES[cause]


def show(console: Console, result: Result) -> None:
    """Print everything."""
    for rows in result.sweeps.values():
        table = Table(box=None, pad_edge=False)
        names = list(rows[0].values)
        for name in names:
            table.add_column(name, justify="right", overflow="fold")
        table.add_column("s/step", justify="right", overflow="fold")
        for row in rows:
            chosen = all(result.chosen.get(name) == row.values[name] for name in names)
            seconds = "does not fit" if row.seconds is None else f"{row.seconds:.3f}"
            cells = [*(str(row.values[name]) for name in names), seconds]
            table.add_row(*map(Text, cells), style="bold green" if chosen else "")
        console.print(table)
    console.print(_depths(result))
    for line in _plot(result, console.encoding):
        console.print(line)
    name, bound = result.bound
    say = lambda text: console.print(Text(text), soft_wrap=True)
    say(
        f"best: {result.step_s:.3f} s a step, {result.tokens / result.step_s:,.0f} tokens/s; {above(result):.0%} above "
        f"the bound of {bound:.3f} s, {PARTS[name]}"
    )
    say(f"limited by {limit(result)}" if limit(result).startswith(tuple(PARTS.values())) else limit(result))
    if not result.depths.complete:
        say("the time was over before the search was: give more --seconds to be sure")
    say(f"{result.seconds:.0f} s, {result.depths.count} measurements; nothing left behind")


def _depths(result: Result) -> Table:
    found = result.depths
    table = Table(box=None, pad_edge=False)
    first, *others = CAUSES
    for name in ("prefetch", "s/step", "tokens/s", f"waited: {first}", *others, "measured"):
        table.add_column(name, justify="right", overflow="fold")
    for depth in sorted(found.samples):
        time, stalls = found.time(depth), result.stalls_by_depth[depth]
        table.add_row(
            f"{depth} (auto)" if depth == result.largest else str(depth),
            f"{time:.3f}",
            f"{result.tokens / time:,.0f}",
            *(f"{stalls[cause]:.3f}" for cause in CAUSES),
            f"{len(found.samples[depth])}x",
            style="bold green" if depth == found.chosen else "",
        )
    return table


def _plot(result: Result, encoding: str) -> list[Text]:
    """Seconds of a step by depth: a column for each that was measured."""
    found = result.depths
    fine_steps, plain_steps = " ▁▂▃▄▅▆▇█", " .:#"
    try:
        fine_steps.encode(encoding)
        steps = fine_steps
    except (UnicodeEncodeError, LookupError):
        steps = plain_steps
    fine, depths = len(steps) - 1, sorted(found.samples)
    axis, corner, floor = ("┤", "└", "─") if steps is fine_steps else ("|", "+", "-")
    top = max(map(found.time, depths))
    lines = [Text("s/step by prefetch")]
    for level in range(_HEIGHT - 1, -1, -1):
        heights = (round(found.time(depth) / top * _HEIGHT * fine) - level * fine for depth in depths)
        row = "".join(f" {steps[min(max(height, 0), fine)] * (_COLUMN - 2)} " for height in heights)
        label = f"{top:7.3f} " if level == _HEIGHT - 1 else " " * 8
        lines.append(Text(label + axis + row, style="cyan"))
    lines.append(Text(f"{0.0:7.3f} {corner}{floor * _COLUMN * len(depths)}", style="cyan"))
    lines.append(Text(" " * 9 + "".join(f"{depth:^{_COLUMN}}" for depth in depths), style="cyan"))
    return lines


def import_pyplot() -> Any:
    """matplotlib's figures, drawn without a screen. ConfigError without matplotlib."""
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'tierzero[plots]'") from None


def save_plot(result: Result, path: Path) -> None:
    """The same as a file, whole or not at all; its kind is that of its name."""
    found, depths = result.depths, sorted(result.depths.samples)
    figure = import_pyplot().Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for depth in depths:
        axes.plot([depth] * len(found.samples[depth]), found.samples[depth], "o", color="tab:blue", alpha=0.35)
    axes.plot(depths, [found.time(depth) for depth in depths], "-", color="tab:blue", label="step, median")
    if found.chosen is not None:
        axes.axvline(found.chosen, color="tab:green", linestyle="--", label=f"chosen: {found.chosen}")
    axes.axhline(result.bound[1], color="tab:grey", linestyle=":", label=f"bound: {PARTS[result.bound[0]]}")
    axes.set(xlabel="prefetch (units ahead)", ylabel="seconds a step", ylim=(0, None))
    axes.legend()
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.absolute().parent)
    os.close(handle)
    try:
        figure.savefig(fresh)
        os.chmod(fresh, 0o644)
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
