"""The same transfers by fio, for comparison."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tierzero.errors import TierzeroError

HUGE_PAGES = "glibc.malloc.hugetlb=1"  # fio's buffers in transparent huge pages, as the engine's own are
_RW = {"read": ["--rw=read"], "write": ["--rw=write"], "mixed": ["--rw=rw", "--rwmixread=50"]}


@dataclass(frozen=True)
class Job:
    """How fio is to transfer. block: bytes. depth: requests in flight per file. extra: further options."""

    engine: str = "io_uring"
    block: int = 4 << 20
    depth: int = 8
    huge: bool = True
    direct: bool = True
    extra: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """How many transfer, each with its own requests in flight."""
        return next((int(word.split("=")[1]) for word in self.extra if word.startswith("--numjobs=")), 1)

    @property
    def memory(self) -> int:
        """Bytes of the buffers that it uses in turn."""
        return self.block * self.depth * self.threads

    @property
    def label(self) -> str:
        words = [self.engine, f"{self.block / (1 << 20):g} MiB x {self.depth}", *self.extra]
        return " ".join([*words, *(["huge pages"] if self.huge else [])])


@dataclass(frozen=True)
class Result:
    """nbytes: moved. seconds: fio's own wall clock. cpu: user and system seconds by fio's own count."""

    nbytes: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds

    @property
    def cpu_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu / self.nbytes * 1e9


def version() -> str | None:
    """fio's name and version; None where it is not installed."""
    program = shutil.which("fio")
    if program is None:
        return None
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() or "fio"


def command(job: Job, kind: str, files: Sequence[str], size: int, seconds: float | None) -> list[str]:
    """fio's arguments: one job per file, over its first `size` bytes; once, or for `seconds` round and round."""
    words = [
        "fio",
        "--output-format=json",
        f"--ioengine={job.engine}",
        f"--bs={job.block}",
        f"--iodepth={job.depth}",
        f"--size={size}",
        f"--direct={int(job.direct)}",
        *_RW[kind],
        "--thread",
        # the engine does not change its buffers between writes either
        "--scramble_buffers=0",
        *([] if seconds is None else ["--time_based", f"--runtime={max(1, round(seconds * 1000))}ms"]),
        *job.extra,
    ]
    for index, name in enumerate(files):
        words += [f"--name=drive{index}", f"--filename={name}"]
    return words


def run(job: Job, kind: str, files: Sequence[str], size: int, seconds: float | None = None) -> Result:
    """Runs fio to its end. TierzeroError with fio's own words when it fails."""
    environment = os.environ | ({"GLIBC_TUNABLES": HUGE_PAGES} if job.huge else {})
    words = command(job, kind, files, size, seconds)
    limit = 120 + (seconds or 0)
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=limit)
    try:
        jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        moved = sum(one["read"]["io_bytes"] + one["write"]["io_bytes"] for one in jobs)
        wall = max(1, *(one["job_runtime"] for one in jobs)) / 1000
        cpu = sum((one["usr_cpu"] + one["sys_cpu"]) / 100 * one["job_runtime"] / 1000 for one in jobs)
        if done.returncode or not moved or any(one["error"] for one in jobs):
            raise ValueError
    except (ValueError, KeyError):
        said = " ".join((done.stderr or done.stdout).split())[:300]
        raise TierzeroError(f"fio failed with exit code {done.returncode} ({job.label}, {kind}): {said}") from None
    return Result(moved, wall, cpu)
