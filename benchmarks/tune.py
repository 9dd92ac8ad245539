"""The prefetch depth: where a throttled link has its knee, and `tierzero tune` against measuring every depth.

- `knee`: modules that sleep instead of multiplying, behind a link of known bandwidth and delay. Every depth is
  measured, in turns, and the curve held against the bandwidth-delay product (Note [knee] in tierzero/bench/depths.py).
  The ratio is the time at theory's knee over the flat part, which is the median of the deeper half.
- `search`: on the same model and on the built-in decoder (real compute, a real drive, `tiers.link_limit`) the search
  that `tierzero tune` does, with the same measurements, as many of a finalist as the sweep takes of every depth. The
  ratios are the time of a step at its choice over that of the depth which was fastest in the sweep of all, both
  measured again in turns, for the fastest of many is lucky as well (the median of the turns' own ratios, for a
  machine's mood changes slower than they do), and its seconds over those of the sweep.

    python benchmarks/tune.py [--json] [--nvme DIR] [--kind waiting decoder] [--fetch 0.5 3.5] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from overlap_loops import Clock, WaitingBlock
from torch import nn
from turns import case, in_turns, load, row, say

import tierzero as tz
from tierzero.api import engine_of
from tierzero.bench.depths import NEAR, ROUNDS, knee, search, step_of
from tierzero.cli.config import load as configure
from tierzero.cli.trial import Trial, largest_depth, opened
from tierzero.pace import Pacer

WIDTH = 256  # of the waiting model: 0.5 MB a unit
COMPUTE = 0.005  # seconds of each unit, forward as backward
RATE = 250e6  # of the link, bytes per second: a third of that
FETCHES = (0.5, 1.5, 3.5, 5.5)  # seconds of a fetch, in units of COMPUTE
Measure = Callable[[int, float], float]


class Waiting:
    """A model in host memory whose compute sleeps; half of it fits the device. `measure` is as in Trial."""

    def __init__(self, blocks: int) -> None:
        torch.manual_seed(0)
        self.clock = Clock()
        layers = [WaitingBlock(self.clock, WIDTH) for _ in range(blocks)]
        self.model = nn.Sequential(*layers).to(torch.bfloat16)
        unit = sum(param.nbytes for param in self.model[0].parameters())
        ample = tz.plan(self.model, tz.Tiers(host="8GiB", device="8GiB", compute="cpu"))
        budget = ample.device_needed + unit * (blocks // 2)
        tz.offload(self.model, tz.Tiers(host="8GiB", device=budget, compute="cpu"))
        self.optimizer = tz.AdamW(self.model.parameters(), lr=1e-4, overlap="deferred")
        self.engine = engine_of(self.model)
        self.unit = unit
        self.largest = largest_depth(
            [unit.layout.flat_bytes for unit in self.engine.units], self.engine.pager.residency.ahead.budget
        )
        self.clock.forward = self.clock.backward = COMPUTE
        self.steps = 0
        self._steps(2)

    def link(self, fetch: float) -> tuple[float, float]:
        """A link whose fetches take `fetch` seconds; (transfer, delay)."""
        transfer = min(fetch, self.unit / RATE)
        self.engine.pager.residency.transfer.pacer = Pacer(self.unit / transfer, fetch - transfer)
        self._steps(1)
        self.steps, self.moved = 0, tz.stats(self.model)["h2d"]
        return transfer, fetch - transfer

    def fetched(self) -> float:
        """Units a step since `link`."""
        return float((tz.stats(self.model)["h2d"] - self.moved) / self.unit / self.steps)

    def measure(self, depth: int, limit: float) -> float:
        self.engine.pager.look_ahead(depth)
        self._steps(1)
        samples = self._steps(1)
        if samples[0] <= limit:
            samples += self._steps(1)
        return statistics.median(samples)

    def _steps(self, count: int) -> list[float]:
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            self.model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            samples.append(time.perf_counter() - start)
        self.steps += count
        return samples

    def close(self) -> None:
        tz.close(self.model)


def sweep(measure: Measure, largest: int, rounds: int) -> tuple[dict[int, list[float]], float]:
    """Every depth, in turns: (samples by depth, seconds that it took)."""
    start = time.perf_counter()
    measures = {str(depth): partial(measure, depth, math.inf) for depth in range(largest + 1)}
    samples = in_turns(measures, rounds, lambda seconds: f"{seconds:.3f} s")
    return {int(name): many for name, many in samples.items()}, time.perf_counter() - start


def compare(name: str, measure: Measure, largest: int, rounds: int, **more: Any) -> list[dict[str, Any]]:
    """The sweep and the search, and what came of both."""
    samples, exhaustive = sweep(measure, largest, rounds)
    start = time.perf_counter()
    found = search(measure, largest, rounds=rounds)
    seconds = time.perf_counter() - start
    chosen = found.chosen
    assert chosen is not None
    best = min(samples, key=lambda depth: statistics.median(samples[depth]))
    again = in_turns({str(depth): partial(measure, depth, math.inf) for depth in {chosen, best}}, 3 * rounds)
    pairs = zip(again[str(chosen)], again[str(best)], strict=True)
    say(f"{name}: tune chose {chosen} in {found.count} measurements, the fastest of the sweep is {best}")
    told = {"chosen": chosen, "best": best, "largest": largest, "measurements": found.count, **more}
    told["curve"] = {depth: statistics.median(many) for depth, many in samples.items()}
    step = case(f"search, {name}: its step / the best", again[str(chosen)], again[str(best)], 1.03, **told)
    return [
        step | {"ratio": statistics.median(own / other for own, other in pairs), "ratio_of_medians": step["ratio"]},
        case(f"search, {name}: its seconds / the sweep's", [seconds], [exhaustive], 1 / 3, **told),
    ]


def waiting(args: argparse.Namespace, _: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    model, cases = Waiting(args.blocks), []
    for times in args.fetch:
        transfer, delay = model.link(times * COMPUTE)
        name = f"a fetch as long as {times:g} units' compute"
        own = compare(name, model.measure, model.largest, args.rounds)
        curve = own[0]["curve"]
        flat = statistics.median(curve[depth] for depth in curve if depth > model.largest // 2)
        theory = min(knee(COMPUTE, transfer, delay), model.largest)
        measured = min(depth for depth in curve if curve[depth] <= (1 + NEAR) * flat)
        each, fetched = max(COMPUTE, transfer), model.fetched()
        predicted = {depth: flat + fetched * (step_of(depth, COMPUTE, transfer, delay) - each) for depth in curve}
        worst = max(abs(curve[depth] / predicted[depth] - 1) for depth in curve)
        say(f"knee, {name}: theory {theory}, measured {measured}; the curve is within {worst:.0%} of theory's")
        told = {"theory": theory, "measured": measured, "curve": curve, "predicted": predicted, "worst": worst}
        cases.append(case(f"knee, {name}", [curve[theory]], [flat], 1.05, **told))
        cases += own
    model.close()
    return cases


def decoder(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """The trial of the command itself."""
    settings = ["model.preset=tiny", f"model.layers={args.layers}", "model.hidden=256", "data.sequence=64"]
    settings += ["data.batch=2", "tiers.device=256MiB", "tiers.link_limit=60MB/s", f"train.out={directory}/run"]
    with opened(configure(None, settings)) as trial:
        assert isinstance(trial, Trial)
        return compare("the decoder on a link of 60 MB/s", trial.measure, trial.largest, args.rounds)


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nvme", default="", help="directory on the drive to use (default: a temporary one here)")
    parser.add_argument("--kind", nargs="+", choices=["waiting", "decoder"], default=["waiting", "decoder"])
    parser.add_argument("--fetch", type=float, nargs="+", default=FETCHES, help="its time, in units' compute")
    parser.add_argument("--blocks", type=int, default=24, help="of the waiting model, 0.3 M parameters each")
    parser.add_argument("--layers", type=int, default=12, help="of the decoder, 0.9 M parameters each")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    cases = []
    for kind in args.kind:
        with tempfile.TemporaryDirectory(dir=args.nvme or Path.cwd(), prefix="tierzero-tune-") as directory:
            cases += {"waiting": waiting, "decoder": decoder}[kind](args, directory)
    result = {"cases": cases, "rounds": args.rounds, "kernel": platform.release(), "load": load()}
    if args.json:
        print(json.dumps(result))
        return
    say(f"load {result['load']:.1f}")
    for made in cases:
        print(row(made, 64))


if __name__ == "__main__":
    main()
