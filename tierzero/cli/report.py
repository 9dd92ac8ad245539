"""One step in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LINKS = ("nvme_read", "nvme_written", "h2d", "d2h")
STALLS = ("fetch", "update", "gradient", "activation")
IO = ("exposed_io_s", "hidden_io_s", "hit_rate", "prefetched", "prefetch_wasted", "device_peak")


@dataclass(frozen=True)
class StepReport:
    """What a step did. `grad_norm` is before clipping; bytes and stall seconds are those since the previous step."""

    step: int
    loss: float
    grad_norm: float
    grad_norm_clipped: float
    lr: float
    tokens_per_s: float
    step_s: float
    stalls: dict[str, float]
    bytes: dict[str, int]
    engine: dict[str, Any]  # the engine's own account of the step, stats()["last_step"]

    def line(self) -> dict[str, Any]:
        """The step's line of metrics.jsonl; floats keep every bit."""
        line = {name: value for name, value in vars(self).items() if name != "engine"}
        return {
            **line,
            "wall_s": self.engine["wall_s"],
            "parts": self.engine["parts_s"],
            "busy": {link: self.engine["links"][link]["busy_s"] for link in LINKS},
            "io": {name: self.engine[name] for name in IO},
        }

    def rates(self) -> dict[str, float]:
        """GB/s per link over this step."""
        return {link: self.bytes[link] / 1e9 / self.step_s for link in LINKS}


def clipped_norm(norm: float, limit: float) -> float:
    """The norm after `clip_grad_norm_(limit)`; `limit` 0: no clipping."""
    return norm * min(1.0, limit / (norm + 1e-6)) if limit else norm


class Meter:
    """Turns the running totals of `tierzero.stats` into the bytes and stalls of each step."""

    def __init__(self, stats: dict[str, Any]) -> None:
        self._before = dict(stats)

    def __call__(self, stats: dict[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
        """(seconds waited by cause, bytes by link) since the last call."""
        before, self._before = self._before, dict(stats)
        keys = {"fetch": "stall_fetch_s", "update": "stall_update_s"}
        keys |= {"gradient": "stall_grad_s", "activation": "stall_activation_s"}
        stalls = {name: float(stats[keys[name]] - before[keys[name]]) for name in STALLS}
        moved = {link: int(stats[link] - before[link]) for link in LINKS}
        return stalls, moved
