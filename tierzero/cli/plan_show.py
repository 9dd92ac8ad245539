"""How `tierzero plan` shows its answer on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierzero.cli.plan import Answer
from tierzero.hardware.endurance import DAY
from tierzero.planning.forecast import Forecast
from tierzero.planning.phases import Phase
from tierzero.sizes import format_decimal, format_size

_LINKS = (
    ("compute", "compute"),
    ("h2d", "bus to the device"),
    ("d2h", "bus to the host"),
    ("drive", "drives"),
    ("adam", "CPU's Adam"),
)
_STALLS = (
    ("fetch", "parameters"),
    ("update", "updates"),
    ("gradients", "gradients' place"),
    ("norm", "the norm"),
    ("overhead", "Python"),
)


def show(answer: Answer, console: Console | None = None) -> None:
    """Print it."""
    console = console or Console()
    say = lambda text, style="": console.print(Text(text, style=style), soft_wrap=True)
    plan, subject = answer.plan, answer.subject
    params = f", {plan.params:,} parameters in {subject.dtype}" if plan is not None else f" in {subject.dtype}"
    tokens = f"{subject.accumulate} x {subject.tokens:,}" if subject.accumulate > 1 else f"{subject.tokens:,}"
    say(f"{subject.what}{params}, {tokens} tokens a step")
    if plan is not None:
        console.print(_phases(answer, plan.phases, wrap=console.width < 80))
        if plan.forecast is not None:
            console.print(_times(plan.forecast))
            for line in forecast_lines(plan.forecast):
                say(line)
        for row in plan.activation_row():
            say(
                f"activations off the device: host {row[2]}, "
                + ("the drives" if row[3] != "-" else "the device")
                + " what exceeds it"
            )
        for line in wear_lines(answer):
            say(line)
    say(smallest_line(answer))
    for name, source in (answer.machine.sources if answer.machine is not None else {}).items():
        say(f"{name}: {source}", "dim")
    for note in answer.notes:
        say(note, "yellow")
    if plan is not None and plan.warning:
        say(f"warning: {plan.warning}", "yellow")
    if answer.why:
        for sentence in answer.why:
            say(f"no: {sentence}", "red")
    else:
        say("yes: it fits", "green")


def _phases(answer: Answer, phases: tuple[Phase, ...], wrap: bool) -> Table:
    size = lambda nbytes: format_size(nbytes) if nbytes else "-"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    count = len(answer.budgets.weights)
    headings = ("device", "host", "each drive" if count > 1 else "drive", "read", "written", "to device", "to host")
    table.add_column("", no_wrap=not wrap, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=not wrap, overflow="fold")
    for phase in phases:
        cells = (phase.device, phase.host, max(phase.drives, default=0))
        moved = (phase.read, phase.written, phase.h2d, phase.d2h)
        table.add_row(phase.name, *map(size, (*cells, *moved)))
    table.add_section()
    device = size(answer.budgets.device)
    free = answer.budgets.free
    drive = "" if free is None else f"{format_size(free // max(1, count))} free"
    table.add_row("budget", device, size(answer.budgets.host), drive)
    return table


def _times(forecast: Forecast) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("one step", "busy", "of the step"):
        table.add_column(heading, justify="left" if heading == "one step" else "right", overflow="fold")
    step = forecast.step
    work = {"compute": step.stalls["compute"], **step.busy}
    for key, name in _LINKS:
        if work[key] > 0:
            style = "bold" if key == step.bottleneck else ""
            table.add_row(name, seconds(work[key]), f"{work[key] / step.seconds:.0%}", style=style)
    return table


def forecast_lines(forecast: Forecast) -> list[str]:
    """What a step takes, in words."""
    waits = [
        f"{name} {seconds(forecast.step.stalls[key])}"
        for key, name in _STALLS
        if forecast.step.stalls[key] > 0.005 * forecast.seconds
    ]
    lines = [
        f"a step takes about {seconds(forecast.seconds)}, {rate(forecast.tokens_per_second)} tokens/s, limited by "
        f"{forecast.bottleneck}" + (f"; compute waits for {', '.join(waits)}" if waits else "")
    ]
    if forecast.deferred.seconds > 1.01 * forecast.seconds:
        lines.append(f"while every step is clipped: {seconds(forecast.deferred.seconds)}")
    if forecast.hidden_tokens is not None:
        lines.append(f"I/O hides behind compute from about {forecast.hidden_tokens:,} tokens a step on")
    return lines


def wear_lines(answer: Answer) -> list[str]:
    """What a step costs the drives."""
    plan = answer.plan
    if plan is None or not plan.step_nvme_written:
        return []
    line = f"drives: {format_decimal(plan.step_nvme_written)} written a step"
    if plan.forecast is not None:
        line += f", {format_decimal(plan.step_nvme_written * DAY / plan.forecast.seconds)} a day"
    if plan.steps_to_tbw is not None:
        line += f"; their rating lasts {plan.steps_to_tbw:,} steps"
        if plan.forecast is not None:
            line += f", {plan.steps_to_tbw * plan.forecast.seconds / DAY:,.1f} days"
    return [line]


def smallest_line(answer: Answer) -> str:
    """The least that works."""
    names = {"host": "host", "device": "device", "nvme": "drives"}
    parts = [f"{names[key]} {format_size(nbytes)}" for key, nbytes in answer.smallest.items() if nbytes]
    return (
        f"smallest budgets that work: {', '.join(parts)}; activations about {format_size(answer.subject.activations)}"
    )


def rate(value: float) -> str:
    """A number with three digits or more, never with an exponent: 1.24, 37,200."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    """A time with three digits: 1.24 s, 380 ms."""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value / 3600:.3g} h"
