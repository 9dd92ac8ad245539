"""What a checkpoint costs: throughput against the drive's own, memory against training's, and the time of a step while
it is being written.

Trains the built-in decoder with optimizer states in host memory or on NVMe, in a process each, and saves it while
nothing else goes on, while training goes on, and loads it again.

    python benchmarks/save.py [--json] [--nvme DIR] [--layers 40] [--dim 512] [--placement host nvme] [--limit 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK = 4 << 20  # bytes of a write of the drive's own figure, four under way


def sequential(directory: Path, nbytes: int) -> float:
    """Bytes per second of plain sequential writes through the native engine, with the flush at the end."""
    from tierzero.tiers.base import aligned_empty
    from tierzero.tiers.nvme import NativeEngine, NativeFile

    async def write() -> float:
        engine = NativeEngine(depth=4)
        file = NativeFile(str(directory / "sequential.bin"), engine)
        file.preallocate(nbytes)
        block = aligned_empty(BLOCK).fill_(7)
        start = time.perf_counter()
        for at in range(0, nbytes, 4 * BLOCK):
            await asyncio.gather(*(file.write(at + one * BLOCK, block) for one in range(4)))
        await file.sync()
        seconds = time.perf_counter() - start
        file.close()
        engine.close()
        return nbytes / seconds

    try:
        return asyncio.run(write())
    finally:
        (directory / "sequential.bin").unlink(missing_ok=True)


def measure(placement: str, layers: int, dim: int, nvme: str, limit: int) -> dict[str, Any]:
    """One placement; needs a process of its own, because peak memory is per process."""
    import torch
    import torch._dynamo  # torch's own optimizer imports it on first use: part of the baseline, not of the model

    import tierzero as tz
    from tierzero.cli.decoder import DecoderConfig, build_decoder
    from tierzero.cli.memory import reset_peak, resident_peak

    folder = Path(nvme)
    config = DecoderConfig(layers=layers, hidden=dim)
    model = build_decoder(config, "meta", torch.bfloat16, recompute=True)
    params = sum(param.numel() for param in model.parameters())
    host = (16 if placement == "host" else 2) * params + (96 << 20)
    tz.offload(model, tz.Tiers(nvme=folder / "store", host=host, device=16 * dim * dim * 8, compute="cpu"))
    tz.initialize(model)
    opt = tz.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, 256, (4, 128), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        start = time.perf_counter()
        model(tokens, tokens).backward()
        tz.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return time.perf_counter() - start

    for _ in range(2):
        step()
    alone = [step() for _ in range(4)]
    tz.synchronize(model)
    peak = resident_peak()
    drive = sequential(folder, 1 << 30)
    reset_peak()
    start = time.perf_counter()
    tz.save(model, folder / "saves" / "one", opt, wait=True)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in (folder / "saves" / "one").iterdir())
    save_peak = resident_peak()
    reset_peak()
    start = time.perf_counter()
    saving = tz.save(model, folder / "saves" / "two", opt, keep=1, limit=limit)
    returned = time.perf_counter() - start
    beside = []
    while not saving.done():
        beside.append(step())
    saving.result()
    background = time.perf_counter() - start
    beside_peak = resident_peak()
    tz.synchronize(model)
    reset_peak()
    start = time.perf_counter()
    tz.load(model, folder / "saves" / "two", opt)
    load = time.perf_counter() - start
    load_peak = resident_peak()
    tz.close(model)
    shutil.rmtree(folder / "saves")
    return {
        "placement": placement,
        "params": params,
        "bytes": size,
        "drive_write": drive,
        "save_write": size / seconds,
        "save_ratio": size / seconds / drive,
        "returned_s": returned,
        "background_s": background,
        "load_read": size / load,
        "step_s": statistics.median(alone),
        "step_beside_s": sum(beside) / len(beside),
        "steps_beside": len(beside),
        "peak_train": peak,
        "peak_save": save_peak,
        "peak_beside": beside_peak,
        "peak_load": load_peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nvme", default=None)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--placement", nargs="+", default=["host", "nvme"])
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one, args.layers, args.dim, args.nvme, args.limit)))
        return
    cases = []
    for placement in args.placement:
        with tempfile.TemporaryDirectory(dir=args.nvme) as folder:
            words = ["--one", placement, "--nvme", folder, "--layers", str(args.layers), "--dim", str(args.dim)]
            words += ["--limit", str(args.limit)]
            done = subprocess.run(
                [sys.executable, os.path.abspath(__file__), *words], stdout=subprocess.PIPE, check=True
            )
            cases.append(json.loads(done.stdout.splitlines()[-1]))
    if args.json:
        print(json.dumps({"cases": cases}))
        return
    for case in cases:
        slower = case["step_beside_s"] / case["step_s"] - 1
        print(
            f"{case['placement']}: {case['bytes'] / 1e9:.2f} GB at {case['save_write'] / 1e9:.2f} GB/s, "
            f"{case['save_ratio']:.2f} of the drive's {case['drive_write'] / 1e9:.2f}; steps {slower:+.0%} while it is "
            f"written ({case['steps_beside']} steps, {case['background_s']:.1f} s, save() returned after "
            f"{case['returned_s']:.2f}); loaded at {case['load_read'] / 1e9:.2f} GB/s; peaks MiB: "
            + ", ".join(f"{name} {case['peak_' + name] >> 20}" for name in ("train", "save", "beside", "load"))
        )


if __name__ == "__main__":
    main()
