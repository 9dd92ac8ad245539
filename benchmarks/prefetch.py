"""How much of what is fetched is hidden behind compute, once the trace is known.

The waiting model of overlap.py (compute that leaves the CPU free) with its parameters on a real drive, and in host
memory behind a link that is held below a rate. Compute is set to `--slack` times what fetches alone take, so that the
link is not the bottleneck; from the third step on, every use should be a hit and next to nothing be waited for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from overlap_loops import Clock, waiting_task
from turns import case, load, say

import tierzero as tz
from tierzero.api import engine_of

BOUND = 0.03  # of a step that may be spent waiting for fetches
LINK = 1_000_000_000  # bytes per second of the link that is held back


def run(where: str, blocks: int, steps: int, slack: float, directory: str) -> dict[str, Any]:
    """The exposed share of each step from the third on; the parameters are not trained, so nothing else moves."""
    clock = Clock()
    task = waiting_task(blocks, clock)
    model = task.make().requires_grad_(False)
    nvme = directory if where == "drive" else None
    ample = tz.plan(model, tz.Tiers(nvme=nvme, host="64GiB", device="64GiB", compute="cpu"))
    host = ample.host_min if where == "drive" else ample.host_needed
    limit = LINK if where == "link" else None
    tiers = tz.Tiers(nvme=nvme, host=host, device=3 * ample.device_needed, compute="cpu", link_limit=limit)
    tz.offload(model, tiers)
    shares, misses = [], []

    def step(number: int) -> None:
        x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16).requires_grad_()
        model(x).backward()
        engine_of(model).pager.step([], [])  # the step ends here: no optimizer is there to say so

    step(0)
    before = tz.stats(model)["h2d"]
    start = time.perf_counter()
    step(1)  # fetches alone: nothing to hide behind
    alone = time.perf_counter() - start
    fetched = tz.stats(model)["h2d"] - before
    clock.forward = clock.backward = slack * alone / (2 * blocks)
    for number in range(2, steps + 2):
        old = tz.stats(model)
        start = time.perf_counter()
        step(number)
        seconds = time.perf_counter() - start
        new = tz.stats(model)
        if number >= 3:
            shares.append((new["stall_fetch_s"] - old["stall_fetch_s"]) / seconds)
            misses.append(int(new["misses"] - old["misses"]))
    tz.close(model)
    made = case(f"waited for fetches, {where}", shares, [BOUND], 1.0, misses=misses, fetched=fetched, alone_s=alone)
    say(f"{where}: {made['tierzero']['median']:.2%} of a step, misses {misses}, {fetched / alone / 1e9:.2f} GB/s alone")
    return made


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nvme", default="", help="directory on the drive to use (default: a temporary one here)")
    parser.add_argument("--blocks", type=int, default=12, help="of 8 MiB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--slack", type=float, default=1.5, help="compute, in times of what fetches take alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.nvme or Path.cwd(), prefix="tierzero-prefetch-") as directory:
        cases = [run(where, args.blocks, args.steps, args.slack, directory) for where in ("drive", "link")]
    if args.json:
        print(json.dumps({"cases": cases, "bound": BOUND, "link": LINK, "load": load()}))
        return
    for made in cases:
        own = made["tierzero"]
        print(f"{made['name']:32} {own['median']:7.2%} of a step (<= {BOUND:.0%}), misses {made['misses']}")


if __name__ == "__main__":
    main()
