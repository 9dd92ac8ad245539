"""What saves and loads cost: their throughput, what training beside one loses, their memory, and snapshots.

- `save`: `tz.save(..., wait=True)` with states in host memory, and with everything on the drive, which then is read as
  well; bytes per second against the drive's own sequential write: as many bytes by the same engine to a new file in
  the same directory, made durable; and against a copy of as many bytes on the same drive. In turns; medians count.
- `read`: load and verify of a checkpoint, load of weights from safetensors, and export, with states in host memory and
  with everything on the drive, against what the drive does with as many bytes by itself: sequential read, sequential
  write, or a copy.
- `beside`: a step while a save goes on against a step without one, in turns, AdamW as it comes, states on the drive and
  parameters in host memory. Compute that waits instead of multiplying, as long as two streamed steps, as one, or as a
  quarter of one.
- `memory`: peak resident memory above the start during save, load, resume and export, each in the process that does it,
  against that of the training steps; everything on the drive.
- `snapshot`: seconds of `tz.snapshot` after a step, with states in host memory against writing what has changed, and
  with states on the drive against one streamed step.

    python benchmarks/save.py [--json] [--nvme DIR] [--kind save read beside memory snapshot] [--blocks 16] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from overlap_loops import WIDTH, Clock, Offloaded, waiting_task
from save_reads import Sample, copied, reads, sequential
from turns import case, head, in_turns, load, row, say

import tierzero as tz
from tierzero.api import engine_of
from tierzero.native import NATIVE

LEVELS = {"compute-bound": 2.0, "balanced": 1.0, "I/O-bound": 0.25}  # compute / streamed step
NEVER = 1e9  # limit of the norm
FORWARD = 1 / 3  # of the compute


def saved_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def blocking(model: Any, optimizer: Any, directory: str) -> Sample:
    """One save, waited for."""
    path = Path(directory) / "save"
    tz.synchronize(model)
    start = time.perf_counter()
    tz.save(model, path, optimizer, wait=True)
    seconds = time.perf_counter() - start
    try:
        return {"bytes": saved_bytes(path), "seconds": seconds}
    finally:
        shutil.rmtree(path)


def tiers_of(model: Any, directory: Path, *, host: bool) -> tz.Tiers:
    """Everything in host memory, or on the drive."""
    ample = tz.plan(model, tz.Tiers(nvme=directory, host="64GiB", device="64GiB", compute="cpu"))
    return tz.Tiers(nvme=directory, host=ample.host_needed if host else ample.host_min, device="1GiB", compute="cpu")


def offloaded(args: argparse.Namespace, directory: Path, *, host: bool) -> tuple[Any, Any]:
    """The waiting model after one step, in host memory or on the drive."""
    task = waiting_task(args.blocks, Clock(), args.width)
    model = task.make()
    tz.offload(model, tiers_of(model, directory, host=host))
    optimizer = tz.AdamW(model.parameters())
    one_step(task, model, optimizer, 0)
    return model, optimizer


def one_step(task: Any, model: Any, optimizer: Any, number: int) -> None:
    task.loss(model, number, "").backward()
    optimizer.step()
    optimizer.zero_grad()
    tz.synchronize(model)


def rate(sample: Sample) -> float:
    """GB/s."""
    return sample["bytes"] / sample["seconds"] / 1e9


def save(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """The cases of throughput: ratios are better above 1."""
    models = {
        name: offloaded(args, Path(directory) / name.replace(" ", "-"), host=name == "from host memory")
        for name in ("from host memory", "from the drive")
    }
    measures: dict[str, Callable[[], Sample]] = {
        name: partial(blocking, model, optimizer, directory) for name, (model, optimizer) in models.items()
    }
    nbytes = int(measures["from host memory"]()["bytes"])
    measures["sequential write"] = partial(sequential, directory, nbytes)
    measures["copy"] = partial(copied, directory, nbytes)
    measures["copy"]()
    samples = in_turns(measures, args.rounds, lambda sample: f"{rate(sample):.2f} GB/s")
    for model, _ in models.values():
        tz.close(model)
    rates = {name: [rate(sample) for sample in many] for name, many in samples.items()}
    measured = partial(case, unit="GB/s", bytes=nbytes)
    return [
        *(measured(f"save, {name}", rates[name], rates["sequential write"], None, least=0.8) for name in models),
        measured("save, from the drive / a copy on it", rates["from the drive"], rates["copy"], None),
        measured("a copy on the drive", rates["copy"], rates["sequential write"], None),
    ]


def read(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """The cases of reading."""
    names = {"states in host memory": True, "all on the drive": False}
    models = {name: offloaded(args, Path(directory) / name, host=host) for name, host in names.items()}
    bare = {}
    for name, host in names.items():
        model = waiting_task(args.blocks, Clock(), args.width).make()
        bare[name] = tz.offload(model, tiers_of(model, Path(directory) / f"bare, {name}", host=host))
    stepped = {}
    for name, host in names.items():
        model = waiting_task(args.blocks, Clock(), args.width).make()
        stepped[name] = tz.offload(model, tiers_of(model, Path(directory) / f"stepped, {name}", host=host))
        tz.AdamW(model.parameters())

    def fresh() -> tuple[Any, Any]:
        """States in host memory before the first step."""
        model = waiting_task(args.blocks, Clock(), args.width).make()
        tz.offload(model, tiers_of(model, Path(tempfile.mkdtemp(dir=directory)), host=True))
        return model, tz.AdamW(model.parameters())

    found = reads(args.rounds, models, bare, stepped, fresh, Path(directory))
    for model in [*(model for model, _ in models.values()), *bare.values(), *stepped.values()]:
        tz.close(model)
    return found


def beside(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """The cases of training beside a save."""
    torch.set_num_threads(1)  # the little that is multiplied
    clock = Clock()
    loop = Offloaded(waiting_task(args.blocks, clock, args.width), NEVER, str(Path(directory) / "store"), 0.25)
    loop.steps(2, "")
    alone = min(loop.updates_alone("") for _ in range(3))
    path = Path(directory) / "save"
    last: dict[str, Sample] = {}

    def at(level: str, work: Callable[[], float]) -> float:
        compute = LEVELS[level] * alone / args.blocks
        clock.forward, clock.backward = FORWARD * compute, (1 - FORWARD) * compute
        try:
            return work()
        finally:
            clock.forward = clock.backward = 0.0

    def with_save(level: str) -> float:
        """Seconds a step of those that begin before the save is over."""
        loop.end("", loop.begin(""))
        waited = tz.stats(loop.model)["stall_save_s"]
        start = time.perf_counter()
        saving = tz.save(loop.model, path, loop.optimizer)
        called, count = time.perf_counter() - start, 0
        while count == 0 or not saving.done():
            loop.end("", loop.begin(""))
            count += 1
        seconds = (time.perf_counter() - start) / count
        saving.result()
        waited = tz.stats(loop.model)["stall_save_s"] - waited
        last[level] = {"steps": count, "call_s": called, "waited_s": waited, "bytes": saved_bytes(path)}
        shutil.rmtree(path)
        return seconds

    measures: dict[str, Callable[[], float]] = {}
    for level in LEVELS:
        measures[f"{level}, alone"] = partial(at, level, partial(loop.steps, args.steps, ""))
        measures[f"{level}, beside"] = partial(at, level, partial(with_save, level))
    samples = in_turns(measures, args.rounds, lambda seconds: f"{seconds:.3f} s a step")
    loop.check()
    loop.close()
    return [
        case(
            f"a step beside a save, {level}",
            samples[f"{level}, beside"],
            samples[f"{level}, alone"],
            1.05,
            updates_alone=alone,
            save=last[level],
        )
        for level in LEVELS
    ]


def snapshot(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """The cases of snapshots."""
    cases = []
    for name, host in (("states in host memory", True), ("everything on the drive", False)):
        task = waiting_task(args.blocks, Clock(), args.width)
        model, optimizer = offloaded(args, Path(directory) / str(host), host=host)
        homes, units = engine_of(model).homes, engine_of(model).units
        tz.snapshot(model, optimizer)
        own, other, changed = [], [], 0
        for number in range(1, args.rounds + 1):
            start = time.perf_counter()
            one_step(task, model, optimizer, number)
            step = time.perf_counter() - start
            changed = homes.host_bytes(units, changed=True)
            other.append(sequential(directory, changed)["seconds"] if host else step)
            start = time.perf_counter()
            tz.snapshot(model, optimizer)
            own.append(time.perf_counter() - start)
            say(f"snapshot, {name}: {own[-1]:.3f} s against {other[-1]:.3f} s")
        tz.close(model)
        shutil.rmtree(Path(directory) / str(host))
        cases.append(case(f"a snapshot, {name}", own, other, None, bytes=changed))
    return cases


# -- memory, each part in a process of its own -------------------------------------------------------------------------


def part(name: str, layers: int, directory: str) -> dict[str, Any]:
    """Peak bytes above the start of what `name` does."""
    import torch._dynamo  # torch's own optimizer imports it on first use: part of the baseline

    from tierzero.cli.decoder import DecoderConfig, build_decoder
    from tierzero.cli.memory import reset_peak, resident, resident_peak, return_free_memory

    model = build_decoder(DecoderConfig(layers=layers), "meta", torch.bfloat16, recompute=True)
    params = sum(param.numel() for param in model.parameters())
    tiers = tz.Tiers(nvme=f"{directory}/store", host=2 * params + (48 << 20), device=40 << 20, compute="cpu")
    return_free_memory()
    reset_peak()
    before, peaks = resident(), {}
    tz.offload(model, tiers, resume=name == "resume")
    optimizer = tz.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(0))

    def steps(count: int = 3) -> None:
        for _ in range(count):
            model(tokens, tokens).backward()
            tz.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        tz.synchronize(model)

    def save_beside() -> None:
        saving = tz.save(model, f"{directory}/beside", optimizer)
        steps()
        saving.result()

    def measured(what: str, work: Callable[[], Any]) -> None:
        reset_peak()
        work()
        peaks[what] = resident_peak() - before

    if name == "train":
        tz.initialize(model)
        measured("training", steps)
        measured("save", lambda: tz.save(model, f"{directory}/save", optimizer, wait=True))
        measured("save beside training", save_beside)
        measured("export", lambda: tz.export(model, f"{directory}/model.safetensors"))
        measured("snapshot", lambda: tz.snapshot(model, optimizer))
    elif name == "resume":
        tz.restore(model, optimizer)
        peaks["resume"] = resident_peak() - before
    else:
        tz.load(model, f"{directory}/save", optimizer)
        peaks["load"] = resident_peak() - before
    tz.close(model)
    largest = max(param.numel() * param.element_size() for param in model.parameters())
    return {"peaks": peaks, "params": params, "largest_tensor": largest}


def memory(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """The cases of memory."""
    found: list[dict[str, Any]] = []
    for name in ("train", "resume", "load"):
        store = Path(directory) / "store"
        if name == "load":
            shutil.rmtree(store)
        command = [sys.executable, __file__, "--part", name, "--layers", str(args.layers), "--nvme", directory]
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    peaks = {what: peak for one in found for what, peak in one["peaks"].items()}
    training = peaks.pop("training")
    more = {"unit": "bytes", "params": found[0]["params"], "largest_tensor": found[0]["largest_tensor"]}
    return [case(f"peak memory, {what}", [peak], [training], 1.05, **more) for what, peak in peaks.items()]


WORK = {"save": save, "read": read, "beside": beside, "memory": memory, "snapshot": snapshot}


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nvme", default="", help="directory on the drive to use (default: a temporary one here)")
    parser.add_argument("--kind", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--blocks", type=int, default=16, help="of the waiting model")
    parser.add_argument("--width", type=int, default=WIDTH, help="of a block, which has 4 x width^2 parameters")
    parser.add_argument("--layers", type=int, default=64, help="of the decoder whose memory is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a row, for one sample without a save")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        print(json.dumps(part(args.part, args.layers, args.nvme)))
        return
    if NATIVE is None:
        parser.error("the native extension was not built, and its engine is what is measured")
    cases = []
    for kind in args.kind:
        with tempfile.TemporaryDirectory(dir=args.nvme or Path.cwd(), prefix="tierzero-save-") as directory:
            cases += {"save": save, "read": read, "beside": beside, "memory": memory, "snapshot": snapshot}[kind](
                args, directory
            )
    result = {"cases": cases, "rounds": args.rounds, "kernel": platform.release(), "load": load()}
    if args.json:
        print(json.dumps(result))
        return
    say(f"load {result['load']:.1f}")
    print(head("held against"))
    for made in cases:
        unit = f" ({made['unit']})" if "unit" in made else ""
        print(row({**made, "name": made["name"] + unit}))


if __name__ == "__main__":
    main()
