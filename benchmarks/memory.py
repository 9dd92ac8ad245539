"""Peak memory against model size, with parameters and optimizer states on NVMe.

Trains the built-in decoder at three depths, each in a process of its own, and compares what doubling the number of
layers adds to peak resident memory with the gradients it adds (2 bytes a parameter in bf16), which are the only part of
the model kept in host memory.

    python benchmarks/memory.py [--json] [--nvme DIR] [--layers 32 64 128] [--steps 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

BUFFERS = 48 << 20  # bytes of host budget on top of the gradients, the same for every size
DEVICE = 40 << 20  # bytes of device budget, the same for every size


def measure(layers: int, steps: int, nvme: str) -> dict[str, Any]:
    """Train `steps` steps and return sizes in bytes. Needs a process of its own: peak memory is per process."""
    import torch
    import torch._dynamo  # torch's own optimizer imports it on first use: part of the baseline, not of the model

    import tierzero as tz
    from tierzero.cli.decoder import DecoderConfig, build_decoder
    from tierzero.cli.memory import reset_peak, resident, resident_peak

    model = build_decoder(DecoderConfig(layers=layers), "meta", torch.bfloat16, recompute=True)
    params = sum(param.numel() for param in model.parameters())
    tiers = tz.Tiers(nvme=nvme, host=2 * params + BUFFERS, device=DEVICE, compute="cpu")
    reset_peak()
    before = resident()
    tz.offload(model, tiers)
    torch.manual_seed(0)
    tz.initialize(model)
    opt = tz.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(0))
    loss = torch.tensor(0.0)
    for _ in range(steps):
        loss = model(tokens, tokens)
        loss.backward()
        tz.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    tz.synchronize(model)
    stats = tz.stats(model)
    tz.close(model)
    return {
        "layers": layers,
        "params": params,
        "loss": float(loss.detach()),
        "rss_before": before,
        "rss_peak": resident_peak(),
        "gradients": 2 * params,
        "state_bytes": 12 * params,
        "device_peak": stats["device_peak"],
        "host_peak": stats["host_peak"],
    }


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median peak, with the spread of all of them in `rss_peaks`."""
    ordered = sorted(runs, key=lambda run: run["rss_peak"] - run["rss_before"])
    return {**ordered[len(ordered) // 2], "rss_peaks": [run["rss_peak"] - run["rss_before"] for run in ordered]}


def compare(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each step up in size added: `ratio` is bytes of peak memory per byte of gradient."""
    growth = []
    for small, large in pairwise(cases):
        added = (large["rss_peak"] - large["rss_before"]) - (small["rss_peak"] - small["rss_before"])
        gradients = large["gradients"] - small["gradients"]
        growth.append(
            {
                "name": f"{small['layers']} -> {large['layers']} layers",
                "added": added,
                "gradients": gradients,
                "ratio": added / gradients,
            }
        )
    return growth


def main() -> None:
    """Parse arguments, run the cases, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nvme", default="", help="directory on the drive to use (default: a temporary one here)")
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="runs per size; the median counts")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measure(args.case, args.steps, args.nvme)))
        return
    runs: dict[int, list[dict[str, Any]]] = {layers: [] for layers in args.layers}
    for layers in [layers for _ in range(args.repeats) for layers in args.layers]:
        with tempfile.TemporaryDirectory(dir=args.nvme or Path.cwd(), prefix="tierzero-memory-") as directory:
            command = [sys.executable, __file__, "--case", str(layers), "--steps", str(args.steps), "--nvme", directory]
            runs[layers].append(
                json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            )
    cases = [median(runs[layers]) for layers in args.layers]
    growth = compare(cases)
    if args.json:
        print(json.dumps({"cases": growth, "sizes": cases}))
        return
    print(f"{'layers':>7} {'params':>8} {'state':>9} {'gradients':>10} {'peak RSS above start':>21}")
    for case in cases:
        peak = case["rss_peak"] - case["rss_before"]
        print(
            f"{case['layers']:>7} {case['params'] / 1e6:>6.0f} M {case['state_bytes'] / 1e6:>6.0f} MB "
            f"{case['gradients'] / 1e6:>7.0f} MB {peak / 1e6:>18.0f} MB"
        )
    for row in growth:
        print(
            f"{row['name']}: {row['added'] / 1e6:.0f} MB more for {row['gradients'] / 1e6:.0f} MB more gradients, "
            f"ratio {row['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
