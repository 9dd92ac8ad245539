"""One training step as text: what the compute, each link and the updates did, a column for each stretch of time."""

from __future__ import annotations

from tierzero.monitoring.timeline import TRAINING, Recorder, Span

SHADES = " .:-=+*#%@"
COMPUTE = {"forward": "F", "recompute": "R", "backward": "B"}
WAITS = {"wait", "gradient", "optimizer"}
LINKS = (("drive read", "nvme_read"), ("drive write", "nvme_written"), ("to device", "h2d"))


def draw(recorder: Recorder, units: int, columns: int = 100) -> list[str]:
    """Lines of text about the first step that was recorded: compute F(orward), R(ecomputation) or B(ackward), blank
    while it waits; the links by how busy they were, relative to their busiest; updates under way, in tenths of all
    `units`.
    """
    step = next(span for span in recorder.spans if span.kind == "step")
    width = (step.end - step.start) / columns

    def stretch(span: Span) -> range:
        """The columns that lie in a span for the most part."""
        first, last = ((at - step.start) / width for at in (span.start, span.end))
        return range(max(0, round(first)), min(columns, round(last)))

    compute = [" "] * columns
    mine = [span for span in recorder.spans if span.row == TRAINING and span.kind in COMPUTE.keys() | WAITS]
    for span in sorted(mine, key=lambda span: (span.start, -span.end)):
        for column in stretch(span):
            compute[column] = COMPUTE.get(span.kind, " ")
    lines = [f"{'compute':12}|{''.join(compute)}|"]
    for name, link in LINKS:
        moved = [0.0] * columns
        for (_, before), (at, after) in zip(recorder.samples, recorder.samples[1:], strict=False):
            if step.start <= at < step.end:
                moved[min(columns - 1, int((at - step.start) / width))] += after[link] - before[link]
        most = max(moved) or 1.0
        lines.append(f"{name:12}|{''.join(_shade(value / most) for value in moved)}|")
    updates = [0] * columns
    for span in (span for span in recorder.spans if span.row == "update"):
        for column in stretch(span):
            updates[column] += 1
    lines.append(f"{'updates':12}|{''.join(_shade(value / max(units, 1)) for value in updates)}|")
    lines.append(f"{'':12} 0 s{f'{(step.end - step.start) / 1e9:.2f} s':>{columns - 2}}")
    return lines


def _shade(share: float) -> str:
    return SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))] if share > 0 else " "
