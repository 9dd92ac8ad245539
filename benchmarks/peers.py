"""Training steps of a 110 M GPT, optimizer states on a drive, against everybody else who runs on this CPU.

The built-in decoder (12 layers x 768, vocabulary 16,384) in bf16 under AdamW without clipping, batches of 2 x 128
tokens:

- tierzero: states on the drive, parameters in host memory, a third of them on the device at a time;
- plain torch with everything in memory: bf16 parameters, float32 masters, fused AdamW (its losses must be tierzero's,
  bit by bit; a difference ends the program);
- DeepSpeed ZeRO-3 in bf16 with the optimizer on the same drive, and FSDP2 with CPU offload, by the Python given with
  --peers-python (torch of the same version and deepspeed: `DS_BUILD_OPS=0 pip install deepspeed`, libaio-dev, ninja).
  They are left out without one.

Each runs in a process of its own; all train in turns, a few steps at a time after one that is not counted. A sample is
the mean of those steps, and medians of the samples after the first round count. Memory is the peak of resident memory
after initialisation; bytes are those of /proc/self/io, per parameter and step.

    python benchmarks/peers.py [--json] [--nvme DIR] [--rounds 6] [--steps 3] [--peers-python PYTHON]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from nvme_worker import Worker
from turns import case, in_turns, load, say

import tierzero

TARGETS = {"deepspeed": 1 / 2.2, "fsdp2": None, "torch": 1.6}
PORTS = {"fsdp2": "29611", "deepspeed": "29612"}


def seconds_of(answer: dict[str, Any]) -> str:
    return f"{statistics.mean(answer['seconds']):.3f} s a step"


def worker(stack: ExitStack, kind: str, python: str, directory: str, small: bool) -> Worker:
    """The process that trains as `kind` does."""
    place = Path(directory) / kind
    place.mkdir()
    here, sources = Path(__file__).parent, Path(tierzero.__file__).parent / "cli"
    command = [python, str(here / "peers_worker.py"), kind, str(place), str(sources), *(["--small"] * small)]
    environment = {"DS_ACCELERATOR": "cpu", "MASTER_PORT": PORTS.get(kind, "29610")}
    return stack.enter_context(Worker(command, environment))


def compare(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """All rounds."""
    pythons = {"tierzero": sys.executable, "torch": sys.executable}
    if args.peers_python:
        pythons |= {"fsdp2": args.peers_python, "deepspeed": args.peers_python}
    with ExitStack() as stack:
        workers = {}
        for kind, python in pythons.items():
            say(f"starting {kind}")
            workers[kind] = worker(stack, kind, python, directory, args.small)
            workers[kind].ask(steps=1)  # one after the other: most of them compile or allocate much
        asks = {kind: partial(one.ask, steps=args.steps) for kind, one in workers.items()}
        answers = in_turns(asks, args.rounds + 1, seconds_of)
    check(answers)
    measured = {kind: [statistics.mean(answer["seconds"]) for answer in many[1:]] for kind, many in answers.items()}
    cases = []
    for kind, target in TARGETS.items():
        if kind not in measured:
            continue
        made = case(f"s/step / {kind}", measured["tierzero"], measured[kind], target)
        made["tokens_per_second"] = {"ratio": 1 / made["ratio"]}
        cases.append(made)
    trainers = {
        kind: {
            "seconds": statistics.median(measured[kind]),
            "optimizer": statistics.median(answer["optimizer"] for answer in many[1:]),
            "disk": many[-1]["disk"],
            "counted": many[-1]["counted"],
            "peak": many[-1]["peak"],
            "first_losses": many[0]["losses"],
        }
        for kind, many in answers.items()
    }
    own, params = trainers["tierzero"], answers["tierzero"][0]["params"]
    for name, value, bound in (
        ("bytes read / 12 a parameter", own["counted"][0], 12),
        ("bytes written / 12 a parameter", own["counted"][1], 12),
        ("peak RSS / 1.5 GB", own["peak"], 1.5e9),
    ):
        cases.append({"name": name, "ratio": value / bound, "target": 1.0, "value": value, "bound": bound})
    return {
        "cases": cases,
        "trainers": trainers,
        "parameters": params,
        "rounds": args.rounds,
        "steps": args.steps,
        "kernel": platform.release(),
        "load": load(),
    }


def check(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Losses equal to plain torch's, to the last bit."""
    own, plain = ([loss for answer in answers[kind] for loss in answer["losses"]] for kind in ("tierzero", "torch"))
    for step, (a, b) in enumerate(zip(own, plain, strict=True)):
        assert a == b, f"step {step + 1}: tierzero's loss is {a!r}, plain torch's {b!r}"


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nvme", default="", help="directory on the drive to use (default: a temporary one here)")
    parser.add_argument("--rounds", type=int, default=6, help="after one that is not counted")
    parser.add_argument("--steps", type=int, default=3, help="in a row, of each in each round")
    parser.add_argument("--small", action="store_true", help="a model of 4 M, to see that it works")
    parser.add_argument("--peers-python", default="", help="a Python with torch and deepspeed")
    args = parser.parse_args()
    if not args.peers_python or not Path(args.peers_python).exists():
        missing = f"there is no {args.peers_python}" if args.peers_python else "no --peers-python is given"
        say(f"{missing}: DeepSpeed and FSDP2 are left out")
        args.peers_python = ""
    with tempfile.TemporaryDirectory(dir=args.nvme or Path.cwd(), prefix="tierzero-peers-") as directory:
        result = compare(args, directory)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{'':10} {'s/step':>8} {'optimizer':>10} {'read':>6} {'written':>8} B/param {'peak RSS':>9}  first loss")
    for kind, one in result["trainers"].items():
        read, written = one["disk"] or (float("nan"), float("nan"))
        print(
            f"{kind:10} {one['seconds']:8.3f} {one['optimizer']:10.3f} {read:6.1f} {written:8.1f} "
            f"{one['peak'] / 1e9:14.2f} GB  {one['first_losses'][0]:.6f}"
        )
    for made in result["cases"]:
        tokens = f" (tokens/s: {made['tokens_per_second']['ratio']:.2f} x)" if "tokens_per_second" in made else ""
        target = "" if made["target"] is None else f"  <= {made['target']:.3f}"
        print(f"{made['name']:32} {made['ratio']:7.3f}{target}{tokens}")
    say(f"load {result['load']:.1f}")


if __name__ == "__main__":
    main()
