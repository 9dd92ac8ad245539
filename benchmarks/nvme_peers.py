"""What nvme.py holds the engine against: fio and DeepSpeed's aio handle, over sweeps of their settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvme_worker import Worker

from tierzero.bench import fio

MIB = 1 << 20
FIXED = ("--fixedbufs", "--registerfiles")
HERE = Path(__file__).parent
# block MiB, depth
_ALL = [(block, depth) for block in (1, 2, 4, 8) for depth in (4, 8, 16, 32)]
_USUAL = [(1, 32), (2, 16), (4, 4), (4, 8), (4, 16), (8, 4), (8, 8)]


def fio_jobs(size: int) -> list[fio.Job]:
    """The settings of the sweep."""
    jobs = [fio.Job("io_uring", block * MIB, depth) for block, depth in _ALL]
    jobs += [fio.Job("io_uring", block * MIB, depth, extra=FIXED) for block, depth in _USUAL]
    jobs += [fio.Job("libaio", block * MIB, depth) for block, depth in _USUAL]
    # the same in 4 KiB pages
    jobs += [
        fio.Job("io_uring", 4 * MIB, 8, huge=False, extra=extra) for extra in ((), FIXED, ("--iomem=mmap", *FIXED))
    ]
    for block, threads in ((4, 8), (4, 16), (8, 8)):
        part = size // threads
        words = (f"--numjobs={threads}", f"--offset_increment={part}", f"--size={part}")
        jobs.append(fio.Job("psync", block * MIB, 1, extra=words))
    return jobs


def best_fio(
    kind: str, file: str, size: int, seconds: float, say: Callable[[str], None]
) -> tuple[fio.Job, fio.Job, list[dict[str, Any]]]:
    """(the fastest setting, the fastest of io_uring, all that was measured): a sweep, then its best again in turns."""
    jobs = fio_jobs(size)
    rates: dict[fio.Job, list[float]] = {}
    for job in jobs:
        rates[job] = [fio.run(job, kind, [file], size, seconds).rate]
        say(f"fio {kind}: {job.label}: {rates[job][0] / 1e9:.2f} GB/s")
    order = sorted(jobs, key=lambda job: rates[job][0], reverse=True)
    finalists = dict.fromkeys([*order[:5], *[job for job in order if job.engine == "io_uring"][:3]])
    again: dict[fio.Job, list[float]] = {job: [] for job in finalists}
    for _ in range(3):
        for job in finalists:
            again[job].append(fio.run(job, kind, [file], size, 2 * seconds).rate)
            rates[job].append(again[job][-1])

    def median(job: fio.Job) -> float:
        return sorted(again[job])[1]

    best = max(finalists, key=median)
    ring = max((job for job in finalists if job.engine == "io_uring"), key=median)
    return best, ring, [{"setting": job.label, "GBps": [rate / 1e9 for rate in rates[job]]} for job in jobs]


HANDLE_DEFAULTS = {"handle": [MIB, 128, False, False, 1], "call": "pread"}


def deepspeed_worker(python: str, file: str, *, huge: bool) -> Worker:
    """DeepSpeed's handle on `file`, in huge pages or as it comes."""
    environment = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": fio.HUGE_PAGES} if huge else {}
    return Worker([python, str(HERE / "nvme_deepspeed.py"), file], environment)


def handle_settings() -> list[dict[str, Any]]:
    """The settings of DeepSpeed's sweep: one buffer after the other, as making one takes a while."""
    return [
        {"handle": [block * MIB, depth, single, overlap, threads], "call": call}
        for call in ("read", "pread")
        for block, depth in ((1, 32), (1, 128), (2, 16), (4, 8), (4, 16), (8, 4), (8, 8))
        for single in (False, True)
        for overlap in (False, True)
        for threads in ((1,) if call == "read" else (1, 2))
        if not (single and not overlap)
    ]


def best_handle(kind: str, worker: Worker, say: Callable[[str], None]) -> dict[str, Any]:
    """The fastest setting of DeepSpeed's handle in huge pages."""
    settings = handle_settings()
    rates = []
    for setting in settings:
        answer = worker.ask(kind=kind, passes=1, **setting)
        rates.append(answer["nbytes"] / answer["seconds"])
        say(f"deepspeed {kind}: {setting}: {rates[-1] / 1e9:.2f} GB/s")
    order = sorted(range(len(settings)), key=rates.__getitem__, reverse=True)[:4]
    again: dict[int, list[float]] = {index: [] for index in order}
    for _ in range(3):
        for index in order:
            answer = worker.ask(kind=kind, passes=1, anew=True, release=True, **settings[index])
            again[index].append(answer["nbytes"] / answer["seconds"])
    return settings[max(order, key=lambda index: sorted(again[index])[1])]
