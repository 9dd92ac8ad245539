"""Planned steps against measured ones: how long `tierzero.plan` says a step takes, and how long it does.

Each setting is a size of the model, budgets, a limit on the drive and a kind of steps. The compute waits instead of
multiplying (overlap_loops.py), so that the CPU is free as beside a GPU; what little it does compute is timed in the
plain loop. Links are measured here and now: the drive by a short run of `tierzero bench nvme`, memory and the
optimizer's arithmetic by tierzero.hardware.measure. Bytes and peaks are the engine's own counters. At the end every
loss is compared with that of the plain loop, bit by bit.

    python benchmarks/plan.py [--json] [--nvme DIR] [--rounds 3] [--steps 3] [--small]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from overlap_loops import Clock, Offloaded, Plain, Task, waiting_task
from turns import case, head, load, row, say

import tierzero as tz
from tierzero.api import engine_of
from tierzero.bench.nvme import measure
from tierzero.hardware.machine import Machine
from tierzero.hardware.measure import adam_rate, copy_rate, drive_rates, norm_rate
from tierzero.planning.planned import Plan
from tierzero.sim.model import Rates

NEVER = 1e9  # a limit of the norm
BLOCK = 4 << 20  # parameters of one block
BYTES = {"h2d": "h2d", "d2h": "d2h", "nvme_read": "nvme_read", "nvme_written": "nvme_written"}  # forecast: counter


@dataclass(frozen=True)
class Setting:
    """blocks: of the model. cached: parameters lie in host memory. room: units that the device holds. limit: bytes/s of
    the drive. forward: seconds of a block, half of its backward's.
    """

    name: str
    blocks: int
    cached: bool
    room: float
    limit: float | None
    overlap: str
    forward: float


SETTINGS = [
    Setting("small, cached, 500 MB/s, eager", 6, True, 3.5, 0.5e9, "eager", 0.04),
    Setting("small, all on the drive, 500 MB/s, deferred", 6, False, 2.5, 0.5e9, "deferred", 0.06),
    Setting("medium, cached, 1 GB/s, deferred", 12, True, 13, 1e9, "deferred", 0.05),
    Setting("medium, all on the drive, 1 GB/s, eager", 12, False, 4.5, 1e9, "eager", 0.03),
    Setting("medium, all on the drive, no limit, eager", 12, False, 3.5, None, "eager", 0.02),
    Setting("large, cached, no limit, deferred", 24, True, 6.5, None, "deferred", 0.03),
    Setting("large, cached, no limit, deferred, a third of the waiting", 24, True, 6.5, None, "deferred", 0.01),
]
SMALL = [Setting("tiny", 2, True, 2.5, 1e9, "eager", 0.002)]


class Planned(Offloaded):
    """The loop of overlap_loops over the budgets of a setting, and what was planned for it."""

    def __init__(self, task: Task, clock: Clock, setting: Setting, directory: str, machine: Machine) -> None:
        self.task, self.max_norm, self.clock, self.setting = task, NEVER, clock, setting
        self.model = task.make()
        ample = tz.plan(self.model, tz.Tiers(nvme=directory, host="64GiB", device="64GiB", compute="cpu"))
        unit = 2 * BLOCK
        cached = ample.param_host if setting.cached else 0
        tiers = tz.Tiers(
            nvme=directory,
            host=ample.grad_bytes + ample.buffer_bytes + cached + (1 << 20),
            device=int(max(ample.device_needed, (setting.room + 0.6) * unit)),
            compute="cpu",
            nvme_limit=setting.limit,
        )
        self.plan: Plan = tz.plan(
            self.model,
            tiers,
            machine=machine,
            overlap=setting.overlap,  # type: ignore[arg-type]
        )
        tz.offload(self.model, tiers)
        self.optimizer = tz.AdamW(self.model.parameters(), lr=1e-4, overlap=setting.overlap)  # type: ignore[arg-type]
        self.log = []
        self.engine = engine_of(self.model)
        self.counters: dict[str, float] = {}

    def steps(self, count: int, level: Any) -> float:
        """As Offloaded's, at the setting's speed."""
        self.clock.forward, self.clock.backward = self.setting.forward, 2 * self.setting.forward
        try:
            return super().steps(count, level)
        finally:
            self.clock.forward = self.clock.backward = 0.0

    def samples(self, rounds: int, count: int) -> list[float]:
        """Seconds a step of several bursts; `counters` are those of all their steps, for one step."""
        before, done = self.count(), len(self.log)
        samples = [self.steps(count, "") for _ in range(rounds)]
        after, done = self.count(), len(self.log) - done
        self.counters = {name: (after[name] - value) / done for name, value in before.items()}
        return samples

    def count(self) -> dict[str, float]:
        """The engine's counters, when nothing is under way."""
        tz.synchronize(self.model)
        return {name: value for name, value in tz.stats(self.model).items() if isinstance(value, int | float)}

    def result(self, samples: list[float]) -> dict[str, Any]:
        """A case: the planned time against the measured one."""
        forecast = self.plan.forecast
        assert forecast is not None
        peak = tz.stats(self.model)["device_peak"]
        return case(
            self.setting.name,
            [forecast.seconds],
            samples,
            None,
            error=forecast.seconds / statistics.median(samples) - 1,
            peak_ratio=forecast.step.peak / peak,
            bytes_ratio={name: forecast.step.moved[name] / self.counters[key] for name, key in BYTES.items()},
            stalls=forecast.step.stalls,
            measured_stalls={name: value for name, value in self.counters.items() if name.startswith("stall_")},
            busy=forecast.step.busy,
            bottleneck=forecast.bottleneck,
            guesses_right=self.counters["guesses_right"],
        )


def plain_seconds(task: Task, blocks: int) -> tuple[float, float]:
    """(forward, backward) of one block that does not wait."""
    plain = Plain(task, NEVER)
    times: list[tuple[float, float]] = []
    for step in range(6):
        plain.model.zero_grad()
        start = time.perf_counter()
        loss = task.loss(plain.model, step, "")
        middle = time.perf_counter()
        loss.backward()
        times.append(((middle - start) / blocks, (time.perf_counter() - middle) / blocks))
    forward, backward = (statistics.median(each) for each in zip(*times[1:], strict=True))
    return forward, backward


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nvme", default="", help="directory on the drive to use (default: a temporary one here)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="in a row, for one sample")
    parser.add_argument("--seconds", type=float, default=8.0, help="to measure the drive")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of settings, from 0")
    parser.add_argument("--small", action="store_true", help="one tiny setting")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = SMALL if args.small else [SETTINGS[index] for index in args.only or range(len(SETTINGS))]
    with tempfile.TemporaryDirectory(dir=args.nvme or Path.cwd(), prefix="tierzero-plan-") as directory:
        os.environ["TIERZERO_PROFILES"] = str(Path(directory) / "profiles")
        measure(
            [Path(directory)],
            (64 if args.small else 1024) << 20,
            seconds=args.seconds,
            compare=False,
            progress=lambda what, done: None,
        )
        drive = drive_rates([Path(directory)])
        copy, adam, norm = copy_rate(torch.device("cpu")), adam_rate(tz.Tiers().crew()[0]), norm_rate()
        say(f"drive {drive}; copy {copy / 1e9:.1f} GB/s, Adam {adam / 1e9:.2f} G/s, norms {norm / 1e9:.1f} GB/s")
        cases = []
        for setting in settings:
            clock = Clock()
            task = waiting_task(setting.blocks, clock)
            forward, backward = plain_seconds(task, setting.blocks)
            seconds = [(forward + setting.forward, backward + 2 * setting.forward)] * setting.blocks
            machine = Machine(Rates(copy, copy, adam, norm, drive, inline=True), seconds=seconds)
            loop = Planned(task, clock, setting, str(Path(directory) / "store"), machine)
            loop.steps(1, "")
            cases.append(loop.result(loop.samples(args.rounds, args.steps)))
            say(f"{setting.name}: {cases[-1]['error']:+.1%}")
            loop.check()
            loop.close()
            remove(Path(directory) / "store")
    result = {
        "cases": cases,
        "drive": vars(drive),
        "copy": copy,
        "adam": adam,
        "norm": norm,
        "kernel": platform.release(),
        "load": load(),
    }
    if args.json:
        print(json.dumps(result))
        return
    print(head("measured").replace("tierzero", " planned"))
    for made in cases:
        ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in made["bytes_ratio"].items())
        print(row(made) + f"  peak {made['peak_ratio']:.3f}  {ratios}; limited by {made['bottleneck']}")


def remove(directory: Path) -> None:
    """A store that is closed."""
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


if __name__ == "__main__":
    main()
