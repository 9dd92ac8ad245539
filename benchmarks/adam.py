"""The native AdamW against torch's fused one, DeepSpeedCPUAdam and the memory itself.

Two cases for every size and number of threads. fp32: everything float32. bf16: a bfloat16 gradient in and a bfloat16
copy of the parameter out, which the others do with a cast before and after. The ceiling is a loop that reads four
arrays and writes three. All take turns, round by round, over arrays in huge pages; torch, the ceiling and tierzero over
the same ones. A case's ratio is the faster peer's median time by tierzero's.

    python benchmarks/adam.py [--json] [--millions 32 128 256] [--threads 1 2] [--rounds 9] [--deepspeed-python PYTHON]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCALARS = (1 - 1e-5, 0.1, 0.999, 0.001, 1e-8, 1e-3, 0.5, 1.0)


class Peer:
    """DeepSpeedCPUAdam in a process of its own."""

    def __init__(self, python: str, elements: int, threads: int) -> None:
        script = Path(__file__).with_name("adam_deepspeed.py")
        command = [python, str(script), str(elements), str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.version = self.answer().removeprefix("ready ")

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(
                f"DeepSpeed's process ended with {self.process.wait()}: run its command by hand to see why"
            )
        return line

    def seconds(self, case: str) -> float:
        assert self.process.stdin is not None
        print(case, file=self.process.stdin, flush=True)
        return float(self.answer())

    def close(self) -> None:
        self.process.communicate()


def timed(function: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return run


def contenders(elements: int, threads: int) -> dict[str, dict[str, Callable[[], float]]]:
    """{case: {name: a function that returns the seconds of one update}}."""
    import torch
    from torch.optim.adamw import adamw

    from tierzero import _native

    torch.set_num_threads(threads)

    def array(dtype: torch.dtype) -> torch.Tensor:
        nbytes = elements * torch.empty(0, dtype=dtype).element_size()
        return torch.from_numpy(_native.Slab(nbytes).array()).view(dtype).zero_()

    p, m, v = (array(torch.float32) for _ in range(3))
    grad = array(torch.float32).uniform_(-1, 1)
    p.uniform_(-1, 1)
    small_grad, copy = array(torch.bfloat16).copy_(grad), array(torch.bfloat16)
    step = torch.tensor(10.0)
    fixed: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "lr": 1e-3, "weight_decay": 0.01, "eps": 1e-8}

    def fused() -> None:
        adamw([p], [grad], [m], [v], [], [step], fused=True, amsgrad=False, maximize=False, **fixed)

    def fused_with_casts() -> None:
        grad.copy_(small_grad)
        fused()
        copy.copy_(p)

    return {
        "fp32": {
            "tierzero": timed(lambda: _native.adamw(p, m, v, grad, None, SCALARS, threads)),
            "torch": timed(fused),
            "ceiling": timed(lambda: _native.stream_ceiling(p, m, v, grad, threads)),
        },
        "bf16": {
            "tierzero": timed(lambda: _native.adamw(p, m, v, small_grad, copy, SCALARS, threads)),
            "torch": timed(fused_with_casts),
        },
    }


def measure(millions: int, threads: int, rounds: int, python: str | None) -> list[dict[str, Any]]:
    elements = millions << 20
    cases = contenders(elements, threads)
    peer = Peer(python, elements, threads) if python else None
    out = []
    for case, functions in cases.items():
        if peer is not None:
            functions["deepspeed"] = lambda case=case: peer.seconds(case)
        samples: dict[str, list[float]] = {name: [] for name in functions}
        for turn in range(rounds + 1):
            names = list(functions)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds = functions[name]()
                if turn:  # the first round touches everything once
                    samples[name].append(seconds)
        out.append(summary(f"{case} {millions}M {threads} thread{'s' * (threads > 1)}", elements, samples))
    if peer is not None:
        peer.close()
    return out


def summary(name: str, elements: int, samples: dict[str, list[float]]) -> dict[str, Any]:
    median = {who: statistics.median(seconds) for who, seconds in samples.items()}
    best = min(seconds for who, seconds in median.items() if who in ("torch", "deepspeed"))
    return {
        "name": name,
        "ratio": best / median["tierzero"],
        "of_ceiling": median["ceiling"] / median["tierzero"] if "ceiling" in median else None,
        "elements": elements,
        "median": median,
        "spread": {who: [min(seconds), max(seconds)] for who, seconds in samples.items()},
        "samples": samples,
    }


def show(case: dict[str, Any]) -> None:
    ceiling = "" if case["of_ceiling"] is None else f", {case['of_ceiling']:.2f} of the ceiling"
    print(f"{case['name']}: {case['ratio']:.2f}x the faster peer{ceiling}")
    for who, seconds in case["median"].items():
        low, high = case["spread"][who]
        print(f"  {who:<10} {seconds * 1e3:8.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--millions", type=int, nargs="+", default=[32, 128, 256], help="sizes, in 2**20 elements")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--deepspeed-python", metavar="PYTHON", help="an interpreter that has torch and deepspeed")
    args = parser.parse_args()
    python = args.deepspeed_python
    note = ""
    if python is None:
        note = "DeepSpeed was left out: give --deepspeed-python an interpreter that has it."
    elif not Path(python).exists():
        python, note = None, f"DeepSpeed was left out: there is no {python}."
    from tierzero import _native

    cases = []
    for millions in args.millions:
        for threads in args.threads:
            for case in measure(millions, threads, args.rounds, python):
                cases.append(case)
                if not args.json:
                    show(case)
            gc.collect()
    if args.json:
        print(json.dumps({"benchmark": "adam", "isa": _native.adam_isa(), "note": note, "cases": cases}))
    elif note:
        print(note, file=sys.stderr)


if __name__ == "__main__":
    main()
