"""What the last step did: its wall time by part, its links, and how much of the I/O was hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tierzero.monitoring.clock import ACTIVATION, D2H, FETCH, GRADIENT, PARTS, UPDATE

LINKS = ("nvme_read", "nvme_written", "h2d", "d2h")
_WAITS = (FETCH, UPDATE, GRADIENT, ACTIVATION)


@dataclass(frozen=True)
class Link:
    """`busy_s`: seconds in which at least one transfer was under way."""

    bytes: int
    busy_s: float

    @property
    def gb_per_s(self) -> float:
        """While it was busy; 0 if it never was."""
        return self.bytes / 1e9 / self.busy_s if self.busy_s > 0 else 0.0


@dataclass(frozen=True)
class Mark:
    """The running totals at one moment. `parts` and `busy` (by link, and "background") in nanoseconds, `moved` bytes by
    link, `counts` whatever else is counted.
    """

    now: int
    parts: Sequence[int]
    busy: Mapping[str, int]
    moved: Mapping[str, int]
    counts: Mapping[str, float]


@dataclass(frozen=True)
class StepStats:
    """One step, from the end of the optimizer's step before it to the end of its own.

    parts_s: what the training thread did, by part; they add up to `wall_s`. exposed_io_s: what of it was waiting and
    copying. hidden_io_s: how long fetches and updates were under way beyond that. Peaks are bytes.
    """

    number: int
    skipped: bool
    wall_s: float
    parts_s: dict[str, float]
    exposed_io_s: float
    hidden_io_s: float
    links: dict[str, Link]
    hits: int
    misses: int
    prefetched: int
    prefetch_wasted: int
    device_peak: int

    @property
    def hit_rate(self) -> float:
        """Share of uses that found their unit on the device; 1 if there were none."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else 1.0

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, with the rates."""
        links = {name: {**asdict(link), "gb_per_s": link.gb_per_s} for name, link in self.links.items()}
        return {**asdict(self), "links": links, "hit_rate": self.hit_rate}


def between(before: Mark, after: Mark, *, number: int, skipped: bool, device_peak: int) -> StepStats:
    """The step that lies between two marks."""
    spent = [b - a for a, b in zip(before.parts, after.parts, strict=True)]
    waited = sum(spent[part] for part in _WAITS)
    background = after.busy["background"] - before.busy["background"]
    counts = {name: int(after.counts[name] - before.counts[name]) for name in _COUNTS}
    return StepStats(
        number=number,
        skipped=skipped,
        wall_s=(after.now - before.now) / 1e9,
        parts_s={name: nanoseconds / 1e9 for name, nanoseconds in zip(PARTS, spent, strict=True)},
        exposed_io_s=(waited + spent[D2H]) / 1e9,
        hidden_io_s=max(0, background - waited) / 1e9,
        links={
            link: Link(after.moved[link] - before.moved[link], (after.busy[link] - before.busy[link]) / 1e9)
            for link in LINKS
        },
        device_peak=device_peak,
        **counts,
    )


_COUNTS = ("hits", "misses", "prefetched", "prefetch_wasted")
