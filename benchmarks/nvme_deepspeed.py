"""DeepSpeed's side of nvme.py, run by a Python that has deepspeed; imports nothing of tierzero.

A question is {"kind": "read" | "write", "passes": n, "handle": [block, depth, single_submit, overlap, threads],
"call": "read" | "pread", "anew": bool, "release": bool}. "read" is the handle's plain call on a tensor from torch's
allocator; "pread" its parallel one on page-locked memory of its own; "anew": in memory that is allocated for this
question; "release": which is given back after it. The first argument is the file, whose whole length every call
transfers.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

from nvme_worker import answers, serve


def main() -> None:
    """Serve."""
    out = answers()
    path = sys.argv[1]
    size = os.stat(path).st_size

    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    op = AsyncIOBuilder().load(verbose=False)
    buffers: dict[str, torch.Tensor] = {}
    owner = op.aio_handle()

    def give_back() -> None:
        for call in list(buffers):
            old = buffers.pop(call)
            if call == "pread":
                owner.free_cpu_locked_tensor(old)

    def buffer_for(call: str) -> torch.Tensor:
        if call not in buffers:
            if call == "pread":
                buffers[call] = owner.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
            else:
                buffers[call] = torch.empty(size, dtype=torch.uint8)
            noise = torch.randint(0, 256, (1 << 23,), dtype=torch.uint8)
            for start in range(0, size, noise.numel()):
                part = buffers[call][start : start + noise.numel()]
                part.copy_(noise[: part.numel()])
        return buffers[call]

    def huge_share(buffer: torch.Tensor) -> float:
        first, last, inside, total = buffer.data_ptr(), buffer.data_ptr() + size, False, 0
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                head = line.split(" ", 1)[0]
                if "-" in head and ":" not in head:
                    start, end = (int(word, 16) for word in head.split("-"))
                    inside = start < last and first < end
                elif inside and line.startswith("AnonHugePages:"):
                    total += int(line.split()[1]) * 1024
        return min(1.0, total / size)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question.get("anew"):
            give_back()
        buffer = buffer_for(question["call"])
        handle = op.aio_handle(*question["handle"])
        reading = question["kind"] == "read"
        if question["call"] == "pread":
            call = (handle.sync_pread if reading else handle.sync_pwrite, (buffer, path, 0))
        else:
            call = (handle.read if reading else handle.write, (buffer, path, False))
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        for _ in range(question["passes"]):
            if call[0](*call[1]) < 0:
                raise RuntimeError(f"the handle refused to {question['kind']} {path}")
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        huge = huge_share(buffer)
        del buffer, call
        if question.get("release"):
            give_back()
        return {"nbytes": question["passes"] * size, "seconds": seconds, "cpu": cpu, "huge": huge}

    serve(answer, out)


if __name__ == "__main__":
    main()
