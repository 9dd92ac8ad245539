"""Whole training steps with clipping on, against the longer of their parts.

States on a drive, parameters and gradients in host memory, AdamW as it comes, bf16 parameters with float32 masters. The
compute takes about twice as long as the streamed step, as long, or less than half as long. Two kinds of compute:

- `waiting`: modules that sleep instead of multiplying, so that the CPU is free as beside a GPU (with real parameters
  and gradients). Clipping never bites ("eager": updates begin in backward) or bites on every step ("deferred": they
  wait for the norm). Held against max(compute alone, streamed step alone), and, where updates wait for the norm,
  against max(compute alone, backward + streamed step alone).
- `real`: the built-in decoder on the same cores as the engine; held against max(streamed step alone,
  CPU seconds of both alone / cores).

Everything is measured in turns; medians count. At the end every loss is compared with that of the plain loop, bit by
bit; a difference ends the program. A timeline of one step of each case is printed to stderr (in the JSON: `timeline`).

    python benchmarks/overlap.py [--json] [--nvme DIR] [--kind waiting real] [--blocks 32] [--rounds 5] [--steps 3]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from overlap_loops import WIDTH, Clock, Offloaded, Plain, decoder_task, waiting_task
from timeline import draw
from turns import case, cpu, head, in_turns, load, row, say, summary

import tierzero as tz
from tierzero.monitoring.observe import recording

LEVELS = {"compute-bound": 2.0, "balanced": 1.0, "I/O-bound": 0.4}  # compute / streamed step
BATCHES = {"compute-bound": (4, 256), "balanced": (2, 128), "I/O-bound": (1, 32)}  # of the real compute
NEVER, ALWAYS = 1e9, 1e-4  # limits of the norm
FORWARD = 1 / 3  # of the compute
Sample = dict[str, float]  # seconds, cpu


def timed(work: Callable[[], Any]) -> Sample:
    begun, start = cpu(), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - start, "cpu": cpu() - begun}


def show(sample: Sample) -> str:
    return f"{sample['seconds']:.3f} s"


def steps_of(loop: Offloaded, count: int, level: Any) -> Sample:
    """One burst of steps; the CPU seconds are those of all of it, for a step."""
    begun = cpu()
    return {"seconds": loop.steps(count, level), "cpu": (cpu() - begun) / (count + 1)}


def timeline_of(loop: Offloaded, level: Any) -> list[str]:
    """The first of two more steps, drawn: its updates end under the second one."""
    loop.end(level, loop.begin(level))
    with recording(loop.engine) as recorder:
        for _ in range(2):
            loop.end(level, loop.begin(level))
    return draw(recorder, len(loop.engine.units))


def waiting(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """The cases (a)."""
    torch.set_num_threads(1)  # the little that is multiplied
    clock = Clock()
    task = waiting_task(args.blocks, clock, args.width)
    plain = Plain(task, NEVER)
    loops = {
        name: Offloaded(task, limit, str(Path(directory) / name), args.device)
        for name, limit in (("eager", NEVER), ("deferred", ALWAYS))
    }
    for loop in loops.values():
        loop.steps(2, "")
    alone = min(loops["deferred"].updates_alone("") for _ in range(3))

    def at(level: str, work: Callable[[], Sample]) -> Sample:
        compute = LEVELS.get(level, 0.0) * alone / args.blocks
        clock.forward, clock.backward = FORWARD * compute, (1 - FORWARD) * compute
        try:
            return work()
        finally:
            clock.forward = clock.backward = 0.0

    def backward(level: str) -> Sample:
        plain.model.zero_grad()
        loss = task.loss(plain.model, 0, level)
        return timed(loss.backward)

    measures: dict[str, Callable[[], Sample]] = {"updates": lambda: {"seconds": loops["deferred"].updates_alone("")}}
    for level in LEVELS:
        measures[f"compute {level}"] = partial(at, level, lambda level=level: timed(lambda: plain.compute(0, level)))
        measures[f"backward {level}"] = partial(at, level, partial(backward, level))
        for name, loop in loops.items():
            measures[f"{name} {level}"] = partial(at, level, partial(steps_of, loop, args.steps, level))
    samples = in_turns(measures, args.rounds, show)
    seconds = {name: [sample["seconds"] for sample in many] for name, many in samples.items()}
    cases = []
    for name, loop in loops.items():
        before = tz.stats(loop.model)
        updates = summary(seconds["updates"])
        for level in LEVELS:
            compute, back = summary(seconds[f"compute {level}"]), summary(seconds[f"backward {level}"])
            after = back["median"] + updates["median"] if name == "deferred" else updates["median"]
            bound = max(compute["median"], after)
            made = case(
                f"waiting, {level}, {name}",
                seconds[f"{name} {level}"],
                [bound],
                1.05,
                compute=compute,
                backward=back,
                updates=updates,
                timeline=[],
            )
            at(level, lambda loop=loop, made=made: made["timeline"].extend(timeline_of(loop, "")) or {})
            cases.append(made)
        guesses = {key: value for key, value in before.items() if key.startswith("guesses")}
        say(f"{name}: {guesses}")
        assert (guesses["guesses_right"] > 0) == (name == "eager")
    for loop in loops.values():
        loop.check()
        loop.close()
    return cases


def real(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """The cases (b)."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    task = decoder_task(args.layers, args.hidden)
    plain = Plain(task, NEVER)
    loop = Offloaded(task, NEVER, str(Path(directory) / "real"), 1.0)
    for level in BATCHES.values():
        plain.compute(0, level)
        loop.steps(2, level)
    last = BATCHES["I/O-bound"]

    def updates() -> Sample:
        tz.synchronize(loop.model)
        loss = loop.begin(last)

        def work() -> None:
            loop.end(last, loss)
            tz.synchronize(loop.model)

        return timed(work)

    alone = Offloaded(task, NEVER, str(Path(directory) / "alone"), 1.0, overlap="deferred")
    loop, training = alone, loop
    measures: dict[str, Callable[[], Sample]] = {"updates": updates}
    for name, level in BATCHES.items():
        measures[f"compute {name}"] = partial(timed, partial(plain.compute, 0, level))
        measures[f"step {name}"] = partial(steps_of, training, args.steps, level)
    updates()
    samples = in_turns(measures, args.rounds, show)
    seconds = {name: [sample["seconds"] for sample in many] for name, many in samples.items()}
    cpus = {name: summary([sample["cpu"] for sample in many]) for name, many in samples.items()}
    cores = len(os.sched_getaffinity(0))
    cases = []
    for name, level in BATCHES.items():
        both = (cpus["updates"]["median"] + cpus[f"compute {name}"]["median"]) / cores
        cases.append(
            case(
                f"real, {name}",
                seconds[f"step {name}"],
                [max(summary(seconds["updates"])["median"], both)],
                1.10,
                compute=summary(seconds[f"compute {name}"]),
                updates=summary(seconds["updates"]),
                cpu_seconds={
                    "compute": cpus[f"compute {name}"],
                    "updates": cpus["updates"],
                    "step": cpus[f"step {name}"],
                },
                cores=cores,
                timeline=timeline_of(training, level),
            )
        )
    alone.close()
    training.check()
    training.close()
    return cases


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nvme", default="", help="directory on the drive to use (default: a temporary one here)")
    parser.add_argument("--kind", nargs="+", choices=["waiting", "real"], default=["waiting", "real"])
    parser.add_argument("--blocks", type=int, default=32, help="of the waiting model")
    parser.add_argument("--width", type=int, default=WIDTH, help="of a block, which has 4 x width^2 parameters")
    parser.add_argument("--device", type=float, default=0.25, help="share of the waiting model on the device")
    parser.add_argument("--layers", type=int, default=12, help="of the decoder")
    parser.add_argument(
        "--hidden", type=int, default=768, help="of a layer, a multiple of 64; 12 x hidden^2 parameters"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a row, for one sample")
    args = parser.parse_args()
    cases = []
    for kind in args.kind:
        with tempfile.TemporaryDirectory(dir=args.nvme or Path.cwd(), prefix="tierzero-overlap-") as directory:
            cases += {"waiting": waiting, "real": real}[kind](args, directory)
    result = {"cases": cases, "rounds": args.rounds, "kernel": platform.release(), "load": load()}
    if args.json:
        print(json.dumps(result))
        return
    for made in cases:
        say("\n".join([made["name"], *made["timeline"]]))
    say(f"load {result['load']:.1f}")
    print(head("bound"))
    for made in cases:
        print(row(made))


if __name__ == "__main__":
    main()
