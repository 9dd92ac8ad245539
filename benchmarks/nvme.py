"""The I/O engine at its defaults against the best of fio and of DeepSpeed's aio handle, on one file.

First fio's settings are swept for the best at reading, writing and both at once (engine, block, depth, registered
buffers and files, huge pages), and the settings of DeepSpeed's handle in huge pages. Then everything is measured in
turns, round after round, each in a process of its own; medians count. All use O_DIRECT on the same file, which was
written in full before, and move the same bytes: a sample is its size --passes times, with the queue's end in it.

They use the same memory, too. A few MiB that are used over and over stay in the caches, and the drive of a virtual
machine, or one that puts its data there (DDIO), fills them faster than memory: fio's best setting is often one of few
and small buffers. The engine is asked for as much as fit into fio's buffers, and, against DeepSpeed, which reads the
whole file into one tensor, into as large a memory; "large memory" against fio's best is what that costs.

    python benchmarks/nvme.py [--json] [--nvme DIR] [--kinds read] [--rounds 7] [--deepspeed-python PYTHON]

How fast memory is to a drive depends on where it happens to lie, which stays so while it is used: here two pieces of
2 GiB differ by 2.5 % in huge pages, by far more in 4 KiB pages. So every sample is in new memory; huge pages are given
back before the next, so that all draw from the same. DeepSpeed's handle at its defaults keeps its 4 KiB pages until it
gets others: just taken out of huge ones they would lie side by side, as in no process that has run for a while.

DeepSpeed is not needed: its cases are left out without --deepspeed-python, a Python with torch and deepspeed installed
(`DS_BUILD_OPS=0 pip install deepspeed`, libaio-dev, ninja). Ratios of rates are better above 1, those of CPU seconds
per GB below.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nvme_peers import HANDLE_DEFAULTS, best_fio, best_handle, deepspeed_worker
from nvme_worker import Worker

from tierzero.bench import fio
from tierzero.sizes import parse_size

KINDS = ("read", "write", "mixed")
LARGE = ", large memory"
Sample = dict[str, float]  # nbytes, seconds, cpu
Measure = Callable[[], Sample]


def by_fio(job: fio.Job, kind: str, file: str, size: int, passes: int) -> Sample:
    whole = replace(job, extra=(*job.extra, f"--io_size={passes * size // job.threads}"))
    result = fio.run(whole, kind, [file], size)
    return {"nbytes": result.nbytes, "seconds": result.seconds, "cpu": result.cpu}


def in_turns(measures: dict[str, Measure], rounds: int, say: Callable[[str], None]) -> dict[str, list[Sample]]:
    """Every measure once a round, each round beginning with another one."""
    samples: dict[str, list[Sample]] = {name: [] for name in measures}
    names = list(measures)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            sample = measures[name]()
            samples[name].append(sample)
            say(f"round {turn + 1}/{rounds} {name}: {rate(sample):.2f} GB/s, {cpu(sample):.4f} CPU s/GB")
    return samples


def rate(sample: Sample) -> float:
    """GB/s."""
    return sample["nbytes"] / sample["seconds"] / 1e9


def cpu(sample: Sample) -> float:
    """CPU seconds per GB."""
    return sample["cpu"] / sample["nbytes"] * 1e9


def case(
    name: str, unit: str, own: list[Sample], other: list[Sample], of: Callable[[Sample], float], setting: Any
) -> dict[str, Any]:
    """One row: the ratio of the medians, the median of the rounds' own ratios, and what they were made of."""
    mine, theirs = [of(sample) for sample in own], [of(sample) for sample in other]
    return {
        "name": name,
        "ratio": over(statistics.median(mine), statistics.median(theirs)),
        "paired_ratio": statistics.median(over(a, b) for a, b in zip(mine, theirs, strict=True)),
        "unit": unit,
        "tierzero": {"median": statistics.median(mine), "spread": spread(mine), "samples": mine},
        "other": {"median": statistics.median(theirs), "spread": spread(theirs), "samples": theirs},
        "setting": setting,
    }


def over(own: float, other: float) -> float:
    """Their ratio; a short sample may have taken no CPU time that is counted."""
    return own / other if other else float("inf")


def spread(values: list[float]) -> float:
    """(largest - smallest) / median."""
    return over(max(values) - min(values), statistics.median(values))


def compare(args: argparse.Namespace, directory: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Sweeps and rounds on a new file in `directory`."""
    file, size = str(Path(directory) / "data"), parse_size(args.size)
    Path(file).touch()
    with ExitStack() as stack:
        preallocate(file, size)
        own = stack.enter_context(Worker([sys.executable, str(Path(__file__).parent / "nvme_own.py"), file]))
        own.ask(kind="write", passes=1, memory=size)
        measures: dict[str, Measure] = {}
        chosen: dict[str, tuple[fio.Job, fio.Job, list[dict[str, Any]]]] = {}
        for kind in args.kinds:
            best, ring, _ = chosen[kind] = best_fio(kind, file, size, args.sweep_seconds, say)
            for where, memory in (("", best.memory), (LARGE, size)):
                ask = {"kind": kind, "passes": args.passes, "memory": memory}
                measures[f"tierzero {kind}{where}"] = partial(own.ask, **ask)
            measures[f"fio {kind}"] = partial(by_fio, best, kind, file, size, args.passes)
            if ring != best:
                measures[f"fio io_uring {kind}"] = partial(by_fio, ring, kind, file, size, args.passes)
        handles: dict[str, dict[str, Any]] = {}
        if args.deepspeed_python:
            huge = stack.enter_context(deepspeed_worker(args.deepspeed_python, file, huge=True))
            plain = stack.enter_context(deepspeed_worker(args.deepspeed_python, file, huge=False))
            for kind in [kind for kind in ("read", "write") if kind in args.kinds]:
                handles[kind] = best_handle(kind, huge, say)
                ask = {"kind": kind, "passes": args.passes, "anew": True}
                measures[f"deepspeed {kind}"] = partial(huge.ask, release=True, **ask, **handles[kind])
                measures[f"deepspeed defaults {kind}"] = partial(plain.ask, **ask, **HANDLE_DEFAULTS)
        samples = in_turns(measures, args.rounds, say)
        described = own.ask(kind="describe")
    return {
        "cases": list(cases(samples, chosen, handles)),
        "engine": described,
        "huge_pages": {name: many[-1]["huge"] for name, many in samples.items() if "huge" in many[-1]},
        "rounds": args.rounds,
        "size": size,
        "passes": args.passes,
        "kernel": platform.release(),
        "fio": fio.version(),
        "sweep": {kind: swept for kind, (_, _, swept) in chosen.items()},
    }


def preallocate(file: str, size: int) -> None:
    """Give the file its blocks."""
    from tierzero.bench.scratch import native

    handle = native().File(file)
    handle.preallocate(size)
    handle.close()


def cases(
    samples: dict[str, list[Sample]],
    chosen: dict[str, tuple[fio.Job, fio.Job, list[dict[str, Any]]]],
    handles: dict[str, dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The rows."""
    for kind, (best, ring, _) in chosen.items():
        own, large = samples[f"tierzero {kind}"], samples[f"tierzero {kind}{LARGE}"]
        rings = samples.get(f"fio io_uring {kind}", samples[f"fio {kind}"])
        yield case(f"{kind} / best fio", "GB/s", own, samples[f"fio {kind}"], rate, best.label)
        yield case(f"{kind}{LARGE} / best fio", "GB/s", large, samples[f"fio {kind}"], rate, best.label)
        yield case(f"{kind} CPU / fio io_uring", "CPU s/GB", large, rings, cpu, ring.label)
    for kind, handle in handles.items():
        own = samples[f"tierzero {kind}{LARGE}"]
        yield case(f"{kind} / best deepspeed", "GB/s", own, samples[f"deepspeed {kind}"], rate, handle)
        defaults = samples[f"deepspeed defaults {kind}"]
        yield case(f"{kind} / deepspeed defaults", "GB/s", own, defaults, rate, HANDLE_DEFAULTS)


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nvme", default="", help="directory on the drive to use (default: a temporary one here)")
    parser.add_argument("--size", default="2GiB", help="of the file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--passes", type=int, default=2, help="over the file that a measurement is")
    parser.add_argument("--sweep-seconds", type=float, default=0.5, help="of every measurement of fio's sweeps")
    parser.add_argument("--deepspeed-python", default="", help="a Python with deepspeed")
    args = parser.parse_args()
    if fio.version() is None:
        raise SystemExit("fio is not installed, and it is what is compared with: install it (Debian: apt install fio)")
    say = partial(print, file=sys.stderr, flush=True)
    if args.deepspeed_python and not Path(args.deepspeed_python).exists():
        say(f"there is no {args.deepspeed_python}: the cases against DeepSpeed are left out")
        args.deepspeed_python = ""
    elif not args.deepspeed_python:
        say("no --deepspeed-python is given: the cases against DeepSpeed are left out")
    with tempfile.TemporaryDirectory(dir=args.nvme or Path.cwd(), prefix="tierzero-nvme-") as directory:
        result = compare(args, directory, say)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{'':30} {'tierzero':>16} {'other':>16} {'ratio':>7}  setting of the other")
    for row in result["cases"]:
        own, other = row["tierzero"], row["other"]
        digits = 4 if row["unit"] == "CPU s/GB" else 2
        print(
            f"{row['name']:30} {own['median']:8.{digits}f} ±{own['spread'] / 2:5.0%} "
            f"{other['median']:8.{digits}f} ±{other['spread'] / 2:5.0%}  {row['ratio']:7.3f}  {row['setting']}"
        )


if __name__ == "__main__":
    main()
