"""The streamed AdamW step with its states on a drive, against moving the same bytes without any arithmetic.

One step updates a model of consecutive records (master, exp_avg and exp_avg_sq in float32, gradients in bf16 in host
memory) as training does: each record is read, updated and written to a second place, and its bf16 parameters go to host
memory ("host") or to the drive ("drive"). It is held against two movers of the same bytes over the same file:

- `move`: reads and writes of the same sizes and as many of them, through the same engine and the same buffers, as many
  bytes in flight, no request waiting for another;
- `bench`: what `tierzero bench nvme` measures as reads and writes at once, with its large requests and its own buffers.

Everything is measured in turns; medians count.

    python benchmarks/step.py [--json] [--nvme DIR] [--records 12] [--elements 10000000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import platform
import select
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch
from turns import case, cpu, head, in_turns, load, row, say, summary

from tierzero.bench.stream import Buffers, Setting
from tierzero.bench.stream import run as run_mixed
from tierzero.native import NATIVE
from tierzero.optim.streamed import Hyper
from tierzero.paging.waiting import WIDTH
from tierzero.planning.placement import BUFFERS
from tierzero.tiers.config import Tiers
from tierzero.tiers.host import HostArena
from tierzero.units.layout import CHUNK_ALIGN, CHUNK_MAX, SLOT_BYTES, STATE_BYTES, round_up

SLOTS = BUFFERS[0][0]
TARGET = 1.05
Sample = dict[str, float]  # seconds, cpu


class Bench:
    """A file with two places for every record, the engine with its buffers, and gradients and parameters in memory."""

    def __init__(self, directory: str, records: int, elements: int, slots: int) -> None:
        assert NATIVE is not None, "the native extension was not built"
        self.records, self.slots = records, slots
        self.elements = round_up(elements, CHUNK_ALIGN)
        self.state_bytes, self.param_bytes = STATE_BYTES * self.elements, 2 * self.elements
        self.engine = NATIVE.Engine()
        path = str(Path(directory) / "states")
        self.file = NATIVE.File(path)
        self.half = records * (self.state_bytes + self.param_bytes)
        self.file.preallocate(2 * self.half)
        self.arena = HostArena(records * 2 * self.param_bytes + slots * SLOT_BYTES * CHUNK_MAX + (64 << 20))
        self.buffers = self.arena.allocate(slots * SLOT_BYTES * CHUNK_MAX, "chunk buffers").tensor
        self.engine.register(self.buffers)
        self.grads = [self._noise(self.param_bytes) for _ in range(records)]
        self.params = [self.arena.allocate(self.param_bytes, "parameters").tensor for _ in range(records)]
        self.stepper = NATIVE.Stepper(self.engine, self.buffers, CHUNK_MAX, Tiers().crew()[0])
        self.version = 0
        self.steps = 0
        setting = Setting(self.engine.name, self.engine.describe()["block"], self.engine.describe()["depth"])
        self.mixed = setting, Buffers([setting])
        self._first_states()

    def _noise(self, nbytes: int) -> torch.Tensor:
        block = self.arena.allocate(nbytes, "gradients").tensor
        block.view(torch.bfloat16).normal_(std=0.01)
        return block

    def _first_states(self) -> None:
        """Write real numbers over the whole file."""
        piece = self.buffers[: STATE_BYTES * CHUNK_MAX]
        floats = piece.view(torch.float32)
        floats[:CHUNK_MAX].normal_(std=0.02)
        floats[CHUNK_MAX : 2 * CHUNK_MAX].normal_(std=0.001)
        floats[2 * CHUNK_MAX :].uniform_(1e-6, 1e-4)
        for at in range(0, 2 * self.half, piece.numel()):
            self.engine.write(self.file, at, piece[: min(piece.numel(), 2 * self.half - at)]).result()
        self.engine.reap()

    def place(self, record: int, version: int) -> int:
        """Where a record's state lies; its parameters follow."""
        return version * self.half + record * (self.state_bytes + self.param_bytes)

    def step(self, to_drive: bool) -> Sample:
        """One streamed step over all records, at most as many queued at a time as training queues."""
        self.steps += 1
        scalars = Hyper(1e-4, 0.9, 0.999, 1e-8, 0.01, self.steps, 1.0).scalars()
        segments = [(0, self.elements, 0, "bf16", 0, "bf16", *scalars, 0, 0)]
        old, self.version = self.version, 1 - self.version
        waiting: deque[Any] = deque()
        begun, start = cpu(), time.perf_counter()
        for record in range(self.records):
            if len(waiting) == WIDTH:
                waiting.popleft().result()
            to = self.place(record, self.version)
            out: dict[str, Any] = {"out": self.params[record]}
            if to_drive:
                out = {"out_file": (self.file, to + self.state_bytes, self.param_bytes)}
            src = (self.file, self.place(record, old))
            waiting.append(
                self.stepper.submit(self.elements, segments, self.grads[record], src=src, dst=(self.file, to), **out)
            )
        while waiting:
            waiting.popleft().result()
        sample = {"seconds": time.perf_counter() - start, "cpu": cpu() - begun}
        self.engine.reap()
        return sample

    def move(self, to_drive: bool) -> Sample:
        """The same bytes in the same requests: every slot always has one on its way."""
        requests: list[tuple[Any, int, int]] = []
        for record in range(self.records):
            src, dst = self.place(record, self.version), self.place(record, 1 - self.version)
            for first in range(0, self.elements, CHUNK_MAX):
                count = min(CHUNK_MAX, self.elements - first)
                requests.append((self.engine.read, src + STATE_BYTES * first, STATE_BYTES * count))
                requests.append((self.engine.write, dst + STATE_BYTES * first, STATE_BYTES * count))
                if to_drive:
                    requests.append((self.engine.write, dst + self.state_bytes + 2 * first, 2 * count))
        slot = SLOT_BYTES * CHUNK_MAX
        free = [self.buffers[i * slot : (i + 1) * slot] for i in range(self.slots)]
        flying: dict[Any, torch.Tensor] = {}
        poll = select.poll()
        poll.register(self.engine.eventfd, select.POLLIN)
        begun, start = cpu(), time.perf_counter()
        left = iter(requests)
        more = True
        while more or flying:
            while more and free:
                request = next(left, None)
                if request is None:
                    more = False
                    break
                submit, offset, nbytes = request
                memory = free.pop()
                flying[submit(self.file, offset, memory[:nbytes])] = memory
            if not flying:
                break
            poll.poll(1000)
            for ticket in self.engine.reap():
                ticket.result()
                free.append(flying.pop(ticket))
        return {"seconds": time.perf_counter() - start, "cpu": cpu() - begun}

    def bench(self, to_drive: bool) -> Sample:
        """As many bytes as `tierzero bench nvme` moves them; it reads as much as it writes."""
        setting, buffers = self.mixed
        total = self.records * (2 * self.state_bytes + (self.param_bytes if to_drive else 0))
        result = run_mixed(
            setting, _Whole(self.file, 2 * self.half), buffers, "mixed", nbytes=total, engine=self.engine
        )
        return {"seconds": result.seconds * total / result.moved, "cpu": result.cpu}

    def close(self) -> None:
        self.stepper.close()
        self.engine.close()
        self.file.close()


class _Whole:
    """The file, as stream.run takes it."""

    def __init__(self, file: Any, size: int) -> None:
        self.file = file
        self.size = size

    def forget_cached(self) -> None:
        """Nothing: transfers are direct where that works."""


def compare(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """All rounds on a new file in `directory`."""
    bench = Bench(directory, args.records, args.elements, args.slots)
    kinds = {"host": False, "drive": True}
    measures = {
        f"{what} {kind}": partial(getattr(bench, what), to_drive)
        for kind, to_drive in kinds.items()
        for what in ("step", "move", "bench")
    }
    for measure in measures.values():
        measure()
    samples = in_turns(measures, args.rounds, lambda sample: f"{sample['seconds']:.3f} s")
    seconds = {name: [sample["seconds"] for sample in many] for name, many in samples.items()}
    cpus = {name: [sample["cpu"] for sample in many] for name, many in samples.items()}
    cases = []
    for kind, to_drive in kinds.items():
        moved = bench.records * (2 * bench.state_bytes + (bench.param_bytes if to_drive else 0))
        for other, target in (("move", TARGET), ("bench", None)):
            name, own = f"parameters to {kind} / {other}", f"step {kind}"
            cpu_seconds = {"tierzero": summary(cpus[own]), "other": summary(cpus[f"{other} {kind}"])}
            cases.append(
                case(name, seconds[own], seconds[f"{other} {kind}"], target, bytes=moved, cpu_seconds=cpu_seconds)
            )
    described = {key: value for key, value in bench.engine.describe().items() if key != "drives"}
    bench.close()
    return {
        "cases": cases,
        "parameters": bench.records * bench.elements,
        "records": bench.records,
        "chunk": CHUNK_MAX,
        "slots": args.slots,
        "engine": described,
        "rounds": args.rounds,
        "kernel": platform.release(),
        "load": load(),
    }


def main() -> None:
    """Parse arguments, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nvme", default="", help="directory on the drive to use (default: a temporary one here)")
    parser.add_argument("--records", type=int, default=12)
    parser.add_argument("--elements", type=int, default=10_000_000, help="parameters of a record")
    parser.add_argument("--slots", type=int, default=SLOTS, help="chunk buffers (default: as in training)")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.nvme or Path.cwd(), prefix="tierzero-step-") as directory:
        result = compare(args, directory)
    if args.json:
        print(json.dumps(result))
        return
    say(f"{result['parameters'] / 1e6:.0f} M parameters, load {result['load']:.1f}")
    print(head("other"))
    for made in result["cases"]:
        print(row(made))


if __name__ == "__main__":
    main()
