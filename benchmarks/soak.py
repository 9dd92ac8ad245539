"""Endurance of the I/O engine: random requests for a given time, every byte checked against a model in memory.

Run it as `python benchmarks/soak.py PATH... --seconds 1800 --json out.json`. Every kind of engine that works there gets
a plain file and one striped over all paths (over two members where there is one path). Exit status 1: wrong bytes, or
an error. The report has samples of resident memory and open files, and their slopes after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierzero import _native

PAGE = 4096
BLOCK = 1 << 20
LARGEST = 6 << 20  # bytes of a request: what a step of three chunk buffers asks for
SPAN = 24 << 20  # bytes of a file that are used
HOLE = 5 << 30  # where they start in every second file: offsets beyond 32 bits, sparsely
IN_FLIGHT = 24  # requests per file
NOISE = np.random.default_rng(1).integers(0, 256, LARGEST + (1 << 20), np.uint8)


@dataclass
class Request:
    """One request in flight; `expect` is what a read must bring."""

    ticket: Any
    write: bool
    first: int
    last: int
    buffer: np.ndarray[Any, Any]
    slot: int


class Target:
    """A file, the engine that serves it, and what every byte of it must be."""

    def __init__(self, kind: str, direct: bool, paths: list[str], base: int, rng: random.Random) -> None:
        self.kind, self.direct, self.paths, self.base, self.rng = kind, direct, paths, base, rng
        self.weights = [rng.randint(1, 4) for _ in paths]
        self.stripe = PAGE * rng.choice([1, 3, 16, 64])
        self.model = np.zeros(SPAN + PAGE, np.uint8)
        self.flying: list[Request] = []
        self.slab = _native.Slab(4 * LARGEST + 16 * (BLOCK // 4))
        room = self.slab.array()
        sizes = [LARGEST] * 4 + [BLOCK // 4] * 16
        ends = np.cumsum(sizes)
        self.slots = [room[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        self.slots[0][:] = self.slots[1][:] = 0
        self.open_engine()
        self.open_file()
        self.file.truncate(base + SPAN + PAGE)
        self.done, self.bytes = 0, 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.kind}{'' if self.direct else ' buffered'} {self.paths}"

    def open_engine(self) -> None:
        """Make the engine, and have the buffers registered every second time."""
        self.engine = _native.Engine(kind=self.kind, block=BLOCK >> self.rng.randint(0, 6), depth=8, deadline=300)
        self.registered = self.rng.random() < 0.5
        if self.registered:
            self.engine.register(self.slab.array())

    def open_file(self) -> None:
        """Open the file."""
        many = len(self.paths) > 1
        self.file = _native.File(
            self.paths if many else self.paths[0],
            direct=self.direct,
            weights=self.weights if many else None,
            stripe=self.stripe if many else 0,
        )

    def free(self, first: int, last: int, write: bool) -> bool:
        """Whether no request in flight is in the way of this one."""
        return not any(r.first < last and first < r.last and (write or r.write) for r in self.flying)

    def buffer(self, nbytes: int) -> tuple[np.ndarray[Any, Any], int]:
        """A slice of a registered buffer or memory of its own, at any alignment, and the slot it takes (-1: none)."""
        shift = self.rng.choice([0, 0, 0, 1, 512, self.rng.randrange(PAGE)])
        taken = {r.slot for r in self.flying}
        if self.rng.random() < 0.6:
            for slot, memory in enumerate(self.slots):
                if slot not in taken and nbytes + shift <= memory.size:
                    return memory[shift : shift + nbytes], slot
        room = np.empty(nbytes + 2 * PAGE, np.uint8)
        start = -room.ctypes.data % PAGE + shift
        return room[start : start + nbytes], -1

    def submit(self) -> None:
        """Queue one random request, unless another is in its way."""
        rng = self.rng
        nbytes = rng.choice(
            [
                rng.randint(1, 20_000),
                rng.choice([PAGE, self.stripe, BLOCK, self.engine.block]) * rng.randint(1, 3) + rng.randint(-1, 1),
                rng.randint(1, BLOCK),
                rng.randint(1, LARGEST) if rng.random() < 0.2 else PAGE * rng.randint(1, 64),
            ]
        )
        nbytes = min(nbytes, LARGEST - PAGE)
        grain = self.file.alignment
        first = rng.randrange(SPAN - nbytes + 1) // grain * grain
        write = rng.random() < 0.5
        last = -(-(first + nbytes) // grain) * grain
        if not self.free(first, last, write):
            return
        data, slot = self.buffer(nbytes)
        if write:
            start = rng.randrange(NOISE.size - nbytes)
            data[:] = NOISE[start : start + nbytes]
            ticket = self.engine.write(self.file, self.base + first, data)
            self.model[first : first + nbytes] = data
            # a short tail is padded with zeros on a member that does direct I/O
            self.model[first + nbytes : last] = 0
        else:
            data[:] = 0x5A
            ticket = self.engine.read(self.file, self.base + first, data)
        self.flying.append(Request(ticket, write, first, first + nbytes if not write else last, data, slot))

    def reap(self, all_of_them: bool = False) -> None:
        """Check what has completed."""
        self.engine.reap()
        left = []
        for request in self.flying:
            if not all_of_them and not request.ticket.done():
                left.append(request)
                continue
            request.ticket.result()
            self.done += 1
            self.bytes += request.buffer.size
            if not request.write and not np.array_equal(request.buffer, self.model[request.first : request.last]):
                self.mismatch(request)
        self.flying = left

    def mismatch(self, request: Request) -> None:
        """Say where the bytes differ."""
        want = self.model[request.first : request.last]
        wrong = np.flatnonzero(request.buffer != want)
        raise ValueError(
            f"{self.name}: {wrong.size} of {want.size} bytes read at {self.base + request.first} differ, from "
            f"{self.base + request.first + int(wrong[0])} to {self.base + request.first + int(wrong[-1])}"
        )

    def disturb(self) -> None:
        """Something rarer than a transfer: close and reopen with requests in flight, flush, cut and extend."""
        what = self.rng.randrange(6)
        if what == 0:
            self.engine.close()
            self.reap(all_of_them=True)
            self.open_engine()
        elif what == 1:
            self.file.close()
            self.open_file()
        elif what == 2:
            self.file.sync()
        elif what == 3:
            self.reap(all_of_them=True)
            kept = self.rng.randrange(SPAN // PAGE) * PAGE
            self.file.truncate(self.base + kept)
            self.file.truncate(self.base + SPAN + PAGE)
            self.model[kept:] = 0
        elif what == 4:
            self.engine.describe(), self.engine.counters()
            assert self.file.size() >= self.base + SPAN
        else:
            (self.engine.unregister if self.registered else self.engine.register)(self.slab.array())
            self.registered = not self.registered

    def check_all(self) -> None:
        """Read the whole file and compare."""
        self.reap(all_of_them=True)
        whole = np.empty(SPAN, np.uint8)
        self.engine.read(self.file, self.base, whole).result()
        if not np.array_equal(whole, self.model[:SPAN]):
            self.mismatch(Request(None, False, 0, SPAN, whole, -1))

    def close(self) -> None:
        """End the engine and the file."""
        self.engine.close()
        self.file.close()


@dataclass
class Report:
    """What came of it."""

    seconds: float = 0.0
    requests: int = 0
    bytes: int = 0
    errors: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    rss_kb_per_min: float = 0.0
    fds_per_min: float = 0.0
    threads_per_min: float = 0.0
    engines: list[str] = field(default_factory=list)

    def sample(self, since: float, targets: Sequence[Target]) -> None:
        """Note resident memory, open files and threads."""
        with open("/proc/self/statm") as file:
            rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
        self.requests, self.bytes = sum(t.done for t in targets), sum(t.bytes for t in targets)
        self.seconds = round(time.monotonic() - since, 1)
        self.samples.append(
            {
                "seconds": self.seconds,
                "rss_kb": rss,
                "fds": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "requests": self.requests,
            }
        )

    def fit(self, warm_up: float) -> None:
        """Slopes by least squares over the samples after the warm-up."""
        late = [s for s in self.samples if s["seconds"] >= warm_up]
        if len(late) < 3:
            return
        minutes = np.array([s["seconds"] for s in late]) / 60
        slope = {key: float(np.polyfit(minutes, [s[key] for s in late], 1)[0]) for key in ("rss_kb", "fds", "threads")}
        self.rss_kb_per_min = round(slope["rss_kb"], 2)
        self.fds_per_min, self.threads_per_min = round(slope["fds"], 4), round(slope["threads"], 4)


def make_targets(places: list[str], seed: int) -> list[Target]:
    """A plain and a striped file for every engine that works here."""
    rng = random.Random(seed)
    kinds = [("pool", True), ("auto", False)] + ([] if _native.probe_uring() else [("uring", True), ("auto", True)])
    targets = []
    for number, (kind, direct) in enumerate(kinds):
        members = [os.path.join(place, f"{number}-{i}") for i, place in enumerate(places)]
        members += [os.path.join(places[0], f"{number}-more")] if len(places) == 1 else []
        for paths, base in (
            ([os.path.join(rng.choice(places), f"{number}-plain")], HOLE),
            (members, HOLE * (number % 2)),
        ):
            targets.append(Target(kind, direct, paths, base, random.Random(rng.random())))
    return targets


def soak(targets: list[Target], seconds: float, share: float, every: float, report: Report) -> None:
    """Keep all targets busy; at most `share` of one CPU by this thread."""
    start = time.monotonic()
    shown, cpu = start, time.process_time()
    rng = random.Random(7)
    while (now := time.monotonic()) - start < seconds:
        for target in targets:
            while len(target.flying) < IN_FLIGHT and rng.random() < 0.9:
                target.submit()
            target.reap()
            if rng.random() < 0.02:
                target.disturb()
            if rng.random() < 0.001:
                target.check_all()
        if now - shown >= every:
            shown = now
            report.sample(start, targets)
            last = report.samples[-1]
            print(
                f"{last['seconds']:7.0f} s  {report.requests} requests  {report.bytes / 1e9:.1f} GB  "
                f"rss {last['rss_kb'] / 1024:.0f} MiB  {last['fds']:.0f} files  {last['threads']:.0f} threads",
                flush=True,
            )
        used = time.process_time() - cpu
        time.sleep(max(0.0, min(1.0, used / share - used)))
        cpu = time.process_time()
    for target in targets:
        target.check_all()
    report.sample(start, targets)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 for any wrong byte or error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", metavar="PATH", help="directories on the drives to use")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--cpu", type=float, default=0.5, help="share of a CPU to take")
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    options = parser.parse_args(argv)
    places = [tempfile.mkdtemp(prefix="tierzero-soak-", dir=path) for path in options.paths]
    report = Report()
    targets: list[Target] = []
    try:
        targets = make_targets(places, options.seed)
        report.engines = [target.name for target in targets]
        soak(targets, options.seconds, options.cpu, options.every, report)
    except (OSError, ValueError, AssertionError) as error:
        report.errors.append(f"{type(error).__name__}: {error}")
    finally:
        for target in targets:
            target.close()
        for place in places:
            shutil.rmtree(place)
    report.fit(min(options.seconds / 5, 300))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(vars(report), file, indent=1)
    print(
        f"{report.requests} requests, {report.bytes / 1e9:.1f} GB, {len(report.errors)} errors, slopes per minute: "
        f"{report.rss_kb_per_min} KB resident, {report.fds_per_min} files, {report.threads_per_min} threads"
    )
    for line in report.errors:
        print(line, file=sys.stderr)
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
