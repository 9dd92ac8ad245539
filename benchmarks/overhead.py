"""What the engine adds to a unit when all bytes are resident: hooks, the trace, the schedule.

Stacks of tiny linear layers, each a unit, against the same stack in plain PyTorch. "forward": without gradients.
"forward and backward": frozen, so that nothing becomes stale and no gradient moves. "with gradients": their way to host
memory too. Microseconds per unit, of both directions together where there are two. "train": two whole steps through
half the device memory, with AdamW.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from turns import case, load, say

import tierzero as tz

BOUND = 100e-6  # seconds per unit and direction that the engine may take
WIDTH = 8
KINDS = {"forward": 1, "forward and backward": 2, "with gradients": 2}  # and their directions


class Stack(nn.Module):
    """`count` layers in a row."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def passes(model: nn.Module, kind: str, rounds: int) -> list[float]:
    """Seconds of each round, after two that are not counted."""
    x = torch.randn(4, WIDTH, requires_grad=kind != "forward")
    times = []
    for _ in range(rounds + 2):
        gc.collect()
        start = time.perf_counter()
        with torch.set_grad_enabled(kind != "forward"):
            y = model(x).sum()
        if kind != "forward":
            y.backward()
        times.append(time.perf_counter() - start)
    return times[2:]


def resident(count: int, kind: str, rounds: int) -> dict[str, Any]:
    """One kind on a stack of `count` units: seconds per unit and direction that the engine adds, against the bound."""
    torch.manual_seed(0)
    model = Stack(count).requires_grad_(kind == "with gradients")
    plain = passes(model, kind, rounds)
    tz.offload(model, tz.Tiers(host="4GiB", device="1GiB", compute="cpu"), units=list(model.layers))
    own = passes(model, kind, rounds)
    stats = tz.stats(model)
    tz.close(model)
    added = [(a - b) / count / KINDS[kind] for a, b in zip(sorted(own), sorted(plain), strict=True)]
    made = case(f"{count} units, {kind}", added, [BOUND], 1.0, units=count, misses=stats["misses"])
    say(f"{made['name']}: {made['tierzero']['median'] * 1e6:.1f} us a unit and direction")
    return made


def train(count: int, rounds: int) -> dict[str, Any]:
    """Whole steps through a device budget for half the units; seconds per unit and step, against the smallest stack."""
    torch.manual_seed(0)
    model = Stack(count)
    flat = tz.plan(model, tz.Tiers(host="4GiB", device="1GiB", compute="cpu"), units=list(model.layers)).param_host

    def timed(what: Callable[[], Any]) -> float:
        start = time.perf_counter()
        what()
        return time.perf_counter() - start

    tiers = tz.Tiers(host="4GiB", device=flat // 2 + (1 << 20), compute="cpu")
    offload = timed(lambda: tz.offload(model, tiers, units=list(model.layers)))
    optimizer = tz.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(4, WIDTH)).square().mean().backward()
        tz.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    steps = [timed(step) for _ in range(rounds)]
    close = timed(lambda: tz.close(model))
    say(f"{count} units: offload {offload:.1f} s, step {min(steps):.2f} s, close {close:.1f} s")
    return {"units": count, "offload_s": offload, "step_s": steps, "units_per_s": count / min(steps), "close_s": close}


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--units", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [resident(count, kind, args.rounds) for count in args.units for kind in KINDS]
    trained = [train(count, 2) for count in args.units]
    if args.json:
        print(json.dumps({"cases": cases, "train": trained, "bound_s": BOUND, "load": load()}))
        return
    for made in cases:
        own = made["tierzero"]
        rate = 1 / own["median"]
        print(f"{made['name']:36} {own['median'] * 1e6:7.1f} us ±{own['spread'] / 2:4.0%} {rate:9.0f} units/s")
    for each in trained:
        print(f"{each['units']} units, trained: {each['units_per_s']:.0f} units/s, offload {each['offload_s']:.1f} s")


if __name__ == "__main__":
    main()
