"""Processes that save at the same time, each into a place of its own; one place for two is refused by its lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from models import Net
from oracle import make, same, tiers_for

import tierzero as tz

SAVES = 20
CODE = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
from models import Net
from oracle import batches, loss_of, make
import tierzero as tz

torch.set_num_threads(1)
directory, rank, host, device = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
model = make(Net, seed=rank)
tz.offload(model, tz.Tiers(nvme=directory, host=host, device=device, compute="cpu"))
print("open", flush=True)
sys.stdin.readline()
opt = tz.AdamW(model.parameters(), lr=1e-2)
for step, ids in enumerate(batches(int(sys.argv[6]))):
    loss_of(model, ids).backward()
    opt.step()
    opt.zero_grad()
    tz.snapshot(model, opt, f"step-{step}", {"step": step})
torch.save(model.state_dict(), sys.argv[7])
tz.close(model)
"""


def saver(directory: Path, rank: int, result: Path) -> subprocess.Popen[str]:
    tiers = tiers_for(make(Net), "mixed", directory)
    sizes = [str(tiers.host_bytes()), str(tiers.device_bytes()), str(SAVES), str(result)]
    return subprocess.Popen(
        [sys.executable, "-c", CODE, os.path.dirname(__file__), str(directory), str(rank), *sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_that_save(tmp_path: Path) -> None:
    """Two processes make the same parents and save 20 times each, all at the same time: everything is there (S2)."""
    places = [tmp_path / "new" / "run" / f"rank{rank}" for rank in (0, 1)]
    results = [tmp_path / f"{rank}.pt" for rank in (0, 1)]
    processes = [saver(places[rank], rank, results[rank]) for rank in (0, 1)]
    try:
        assert [process.stdout.readline() for process in processes if process.stdout is not None] == ["open\n"] * 2
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for rank in (0, 1):
        again = make(Net, seed=5)
        tz.offload(again, tz.Tiers(nvme=places[rank], host="64MiB", device="64MiB", compute="cpu"), resume=True)
        try:
            assert tz.restore(again, tz.AdamW(again.parameters()))["step"] == SAVES - 1
            for name, value in torch.load(results[rank]).items():
                assert same(again.state_dict()[name].read(), value), name  # type: ignore[attr-defined]
        finally:
            tz.close(again)
