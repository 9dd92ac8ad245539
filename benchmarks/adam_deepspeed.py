"""DeepSpeedCPUAdam on one parameter, timed on request: run by benchmarks/adam.py with DeepSpeed's own interpreter.

    python benchmarks/adam_deepspeed.py ELEMENTS THREADS

Prints "ready <version>" once its arrays are there, then for every line "fp32" or "bf16" on standard input the seconds
of one update.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

KEEP: list[mmap.mmap] = []


def main(elements: int, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed and its compiler print to standard output
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    torch.set_num_threads(threads)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def array(dtype: torch.dtype) -> torch.Tensor:
        """Zeros in huge pages, as the others have."""
        nbytes = elements * torch.empty(0, dtype=dtype).element_size()
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        KEEP.append(memory)
        return torch.frombuffer(memory, dtype=dtype).zero_()

    master, grad = array(torch.float32).uniform_(-1, 1), array(torch.float32).uniform_(-1, 1)
    small_grad, copy = array(torch.bfloat16).copy_(grad), array(torch.bfloat16)
    param = torch.nn.Parameter(master)
    param.grad = grad
    optimizer = DeepSpeedCPUAdam([param], lr=1e-3, weight_decay=0.01, adamw_mode=True)
    moments = {"exp_avg": array(torch.float32), "exp_avg_sq": array(torch.float32)}
    optimizer.state[param] = {"step": 0, **moments}
    print(f"ready {deepspeed.__version__}", file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        if line.strip() == "bf16":
            grad.copy_(small_grad)
        optimizer.step()
        if line.strip() == "bf16":
            copy.copy_(master)
        print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
