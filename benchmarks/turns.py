"""What the benchmarks share: measures in turns, medians with their spread, and cases."""

from __future__ import annotations

import os
import resource
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def say(text: str) -> None:
    """Progress, where it does not mix with results."""
    print(text, file=sys.stderr, flush=True)


def in_turns(
    measures: Mapping[str, Callable[[], T]], rounds: int, show: Callable[[T], str] = str
) -> dict[str, list[T]]:
    """Every measure once a round, each round beginning with another one."""
    samples: dict[str, list[T]] = {name: [] for name in measures}
    names = list(measures)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(measures[name]())
            say(f"round {turn + 1}/{rounds} {name}: {show(samples[name][-1])}")
    return samples


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """`median`, `spread` ((largest - smallest) / median) and `samples`."""
    median = statistics.median(samples)
    return {"median": median, "spread": (max(samples) - min(samples)) / median if median else 0.0, "samples": samples}


def case(name: str, own: Sequence[float], other: Sequence[float], target: float | None, **more: Any) -> dict[str, Any]:
    """One row: the ratio of the medians, what it was made of, and what it should not exceed (None: only shown)."""
    mine, theirs = summary(own), summary(other)
    return {
        "name": name,
        "ratio": mine["median"] / theirs["median"],
        "target": target,
        "tierzero": mine,
        "other": theirs,
        **more,
    }


def row(case: Mapping[str, Any], width: int = 44) -> str:
    """A case of seconds as a line of a table."""
    own, other, target = case["tierzero"], case["other"], case["target"]
    return (
        f"{case['name']:{width}} {own['median']:8.3f} ±{own['spread'] / 2:4.0%} {other['median']:8.3f} "
        f"±{other['spread'] / 2:4.0%} {case['ratio']:7.3f}" + (f"  <= {target:.2f}" if target else "")
    )


def head(other: str, width: int = 44) -> str:
    """The line above those."""
    return f"{'seconds':{width}} {'tierzero':>14} {other:>14} {'ratio':>7}"


def cpu() -> float:
    """User and system seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def load() -> float:
    """Processes that want a core, a mean over the last minute."""
    return os.getloadavg()[0]
