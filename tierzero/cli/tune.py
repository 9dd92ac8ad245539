"""`tierzero tune`: the depth of prefetching, and what else is asked for, that is fastest on this model and drive."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tierzero.bench.depths import NEAR, Found, search
from tierzero.cli.config import Config, load
from tierzero.cli.progress import share_done
from tierzero.cli.rewrite import as_toml, read_to_change, replace, rewritten
from tierzero.cli.stopping import Stopped, signals_stop
from tierzero.errors import BudgetError, ConfigError

LEAST_SECONDS = 1.0
ROUNDS = 3  # measurements of each value of a sweep
BLOCKS = ["1MiB", "4MiB", "8MiB", "16MiB"]
SWEEPS = ("accumulate", "block", "state_dtype")
PLOTS = (".png", ".svg", ".pdf")
_KEYS = {  # what each search sets in the file
    "accumulate": ("train.accumulate", "data.batch"),
    "block": ("tiers.nvme_block",),
    "state_dtype": ("train.state_dtype",),
    "prefetch": ("tiers.prefetch",),
}
Values = dict[str, Any]  # section.key -> value
Progress = Callable[[str, float], None]


@dataclass
class Row:
    """One setting of a sweep. seconds: of a step, the median of `samples`; None where it does not fit the budgets."""

    values: Values
    seconds: float | None
    samples: list[float]


@dataclass
class Result:
    """What was measured. Times are seconds of a step, stalls by cause the same, `bounds` the least that each takes."""

    depths: Found = field(default_factory=Found)
    sweeps: dict[str, list[Row]] = field(default_factory=dict)
    chosen: Values = field(default_factory=dict)
    step_s: float = 0.0
    tokens: int = 0
    largest: int = 0
    stalls: dict[str, float] = field(default_factory=dict)
    stalls_by_depth: dict[int, dict[str, float]] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def bound(self) -> tuple[str, float]:
        """What takes longest, and how long."""
        return max(self.bounds.items(), key=lambda item: item[1])


def run(
    path: Path | None,
    settings: Sequence[str],
    *,
    sweeps: Sequence[str],
    seconds: float,
    plot: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """The whole command. Raises ConfigError, other TierzeroError or OSError; typer.Exit(128 + n) when signal n came."""
    before, unwritten = b"", None
    config = load(path, settings)
    check(config, sweeps, seconds, plot)
    target = None if dry_run else path
    if target is not None:
        before = read_to_change(target)
        rewritten(before.decode(), {key: 0 for name in (*sweeps, "prefetch") for key in _KEYS[name]})
    try:
        with signals_stop() as check_signals, share_done() as show_progress:

            def progress(text: str, share: float) -> None:
                check_signals()
                show_progress(text, share)

            result = tune(config, sweeps, seconds, progress)
    except Stopped as stopped:
        print("stopped; the configuration is as it was, and nothing was left on the drive", file=sys.stderr)
        raise typer.Exit(128 + stopped.number) from None
    if target is not None:
        try:
            replace(target, before, rewritten(before.decode(), result.chosen))
        except (ConfigError, OSError) as error:  # told after what was measured, which is not to be lost
            target, unwritten = None, error
    from tierzero.cli.tune_show import as_dict, save_plot, show

    if as_json:
        print(json.dumps(as_dict(result) | {"written": None if target is None else str(target)}))
    else:
        show(Console(), result)
        where = "for your configuration" if target is None else f"written to {target}"
        print(f"{where}:\n{as_toml(result.chosen)}")
    if unwritten is not None:
        raise unwritten
    if plot is not None:
        save_plot(result, plot)


def check(config: Config, sweeps: Sequence[str], seconds: float, plot: Path | None) -> None:
    """ConfigError for options that cannot be."""
    if not LEAST_SECONDS <= seconds <= 86400:
        raise ConfigError(f"--seconds {seconds:g}: give {LEAST_SECONDS:g} or more, up to a day's 86400")
    for name in sweeps:
        if name not in SWEEPS:
            raise ConfigError(f"--sweep {name}: there are {', '.join(SWEEPS)}")
    if plot is not None:
        if plot.suffix.lower() not in PLOTS:
            raise ConfigError(f"--plot {plot}: a plot is a {', '.join(PLOTS)} file")
        if not plot.absolute().parent.is_dir():
            raise ConfigError(f"--plot {plot}: there is no directory {plot.parent}")
        from tierzero.cli.tune_show import import_pyplot

        import_pyplot()


def candidates(config: Config, name: str) -> list[Values]:
    """What a sweep tries, the configuration's own first."""
    if name == "accumulate":
        rows = config.train.accumulate * config.data.batch
        most = rows // config.train.micro_batches  # a batch has a row for each of its pieces
        splits = [count for count in range(1, most + 1) if rows % count == 0]
        splits.sort(key=lambda count: abs(math.log(count / config.train.accumulate)))
        return [{"train.accumulate": count, "data.batch": rows // count} for count in splits[:4]]
    if name == "block":
        own = config.tiers.nvme_block
        first: list[Any] = [] if own is None else [own]
        return [{"tiers.nvme_block": block} for block in first + [block for block in BLOCKS if block != own]]
    own = config.train.state_dtype
    return [{"train.state_dtype": kind} for kind in (own, *(k for k in ("float32", "bfloat16", "8bit") if k != own))]


def with_values(config: Config, values: Values) -> Config:
    """The configuration with single keys replaced."""
    for name, value in values.items():
        section, _, key = name.partition(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
    return config


class Stages:
    """The time for measuring, shared out evenly over `count` stages, and what is shown of it."""

    def __init__(self, count: int, seconds: float, progress: Progress) -> None:
        self.count = count
        self.each = seconds / count
        self.progress = progress
        self.number = -1

    def begin(self) -> None:
        """The next stage."""
        self.number += 1
        self.begun = time.monotonic()

    def over(self) -> bool:
        """Whether this stage has had its time."""
        return time.monotonic() - self.begun > self.each

    def tell(self, text: str) -> None:
        share = min(1.0, (time.monotonic() - self.begun) / self.each)
        self.progress(text, (self.number + share) / self.count)


def tune(config: Config, sweeps: Sequence[str], seconds: float, progress: Progress) -> Result:
    """Measure in about `seconds`: each sweep's values first, as far ahead as fits, then the depth."""
    from tierzero.cli.trial import opened

    result, start = Result(), time.monotonic()
    stages = Stages(len(sweeps) + 1, seconds, progress)
    for name in sweeps:
        stages.begin()
        rows = result.sweeps[name] = []
        for values in candidates(config, name):
            if rows and stages.over():
                break
            stages.tell(", ".join(f"{key} = {value}" for key, value in values.items()))
            rows.append(_row(with_values(config, values), values))
        best = _fastest(rows)
        result.chosen |= best
        config = with_values(config, best)
    stages.begin()
    stages.tell("loading")
    with opened(config) as trial:
        stages.begun = time.monotonic()  # however long that took

        def measure(depth: int, limit: float) -> float:
            stages.tell(f"prefetch {depth}")
            return trial.measure(depth, limit)

        found = result.depths = search(measure, trial.largest, over=stages.over)
        assert found.chosen is not None
        result.chosen["tiers.prefetch"] = "auto" if found.chosen == trial.largest else found.chosen
        result.tokens, result.largest, result.step_s = trial.tokens, trial.largest, found.time(found.chosen)
        result.stalls_by_depth = {depth: _stalls(reports) for depth, reports in trial.reports.items()}
        result.stalls = result.stalls_by_depth[found.chosen]
        result.bounds = _bounds(trial, found.chosen, result)
    result.seconds = time.monotonic() - start
    return result


def _row(config: Config, values: Values) -> Row:
    from tierzero.cli.trial import opened

    try:
        with opened(config) as trial:
            samples = [trial.measure(trial.largest, math.inf) for _ in range(ROUNDS)]
    except BudgetError:
        return Row(values, None, [])
    return Row(values, statistics.median(samples), samples)


def _fastest(rows: Sequence[Row]) -> Values:
    """The fastest row's values; the first row's, which are those there were, unless it is clearly faster."""
    fits = [row for row in rows if row.seconds is not None]
    if not fits:
        return {}
    best = min(fits, key=lambda row: row.seconds or 0.0)
    first = rows[0]
    if first.seconds is not None and (best.seconds or 0.0) > (1 - NEAR) * first.seconds:
        best = first
    return best.values


def _stalls(reports: Sequence[Any]) -> dict[str, float]:
    return {cause: statistics.fmean(report.stalls[cause] for report in reports) for cause in reports[0].stalls}


def _bounds(trial: Any, depth: int, result: Result) -> dict[str, float]:
    """The least seconds that each part of a step takes, of the parts whose rate is known."""
    reports = trial.reports[depth]
    step = statistics.fmean(report.step_s for report in reports)
    moved = {link: statistics.fmean(report.bytes[link] for report in reports) for link in reports[0].bytes}
    bounds = {"compute": (1 - sum(result.stalls.values()) / step) * result.step_s}
    if trial.rate:
        bounds["drive"] = (moved["nvme_read"] + moved["nvme_written"]) / trial.rate
    limit = trial.engine.tiers.device_limit()
    if limit:
        bounds["link"] = moved["h2d"] / limit
    return bounds
