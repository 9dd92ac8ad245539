"""Whether host memory came in huge pages is told, and its absence is said once."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from oracle import make, tiered, tiers_for

import tierzero as tz
from tierzero.hardware.hugepages import advice, resident
from tierzero.native import NATIVE
from tierzero.tiers.host import HostArena

SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0 
Size:               4096 kB
Rss:                3072 kB
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me ac sd hg 
7f0000400000-7f0000600000 rw-p 00000000 00:00 0                          [anon: x]
Rss:                2048 kB
AnonHugePages:         0 kB
7fffe0000000-7fffe0021000 rw-p 00000000 00:00 0                          [stack]
Rss:                  64 kB
AnonHugePages:         0 kB
""".splitlines(keepends=True)  # noqa: W291, as the kernel prints it


@pytest.mark.parametrize(
    ("first", "nbytes", "found"),
    [
        (0x7F0000000000, 4 << 20, (3 << 20, 2 << 20)),
        (0x7F0000000000, 6 << 20, (5 << 20, 2 << 20)),
        (0x7F0000400000, 2 << 20, (2 << 20, 0)),
        (0x7F0000000000, 4096, (4096, 4096)),  # no more than was asked about
        (0x7F0000600000, 4096, (0, 0)),
        (0x7EFFFFFFF000, 4096, (0, 0)),
    ],
)
def test_the_kernels_account(first: int, nbytes: int, found: tuple[int, int]) -> None:
    assert resident(first, nbytes, SMAPS) == found


def test_memory_counts_once_it_is_touched() -> None:
    arena = HostArena(64 << 20, pin=False)
    assert arena.pages(settled=False)[0] < 8 << 20
    arena.allocate(32 << 20, "test").tensor.fill_(1)
    touched, huge = arena.pages(settled=True)
    assert 32 << 20 <= touched <= 64 << 20
    assert 0 <= huge <= touched
    if NATIVE is not None and "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert 2 * huge >= touched or "memory is in pieces" in advice()


@pytest.mark.usefixtures("one_thread", "no_leaks")
def test_stats_tell_it(tmp_path: Path) -> None:
    model = make(models.Net)
    with tiered(model, tiers_for(model, "mixed", tmp_path)):
        stats = tz.stats(model)
        assert 0 <= stats["host_huge_bytes"] <= stats["host_touched_bytes"] <= stats["host_slab_bytes"]
        assert stats["host_slab_bytes"] <= stats["host_budget"]


CHILD = """
import ctypes, logging, sys, torch
assert ctypes.CDLL(None, use_errno=True).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
import tierzero as tz
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
tz.offload(model, tz.Tiers(host="1GiB", device="1GiB", compute="cpu"))
optimizer = tz.AdamW(model.parameters())
for step in range(4):
    print("step", step, flush=True)
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    tz.synchronize(model)
    stats = tz.stats(model)
assert stats["host_huge_bytes"] == 0, stats
assert stats["host_touched_bytes"] > 8 << 20, stats
tz.close(model)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel for small pages")
def test_small_pages_are_said_once() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", CHILD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = [line for line in lines if "lie in huge pages" in line]
    assert len(said) == 1
    assert said[0].startswith("only 0 of the ")
    assert lines.index(said[0]) > lines.index("step 1")


def test_nothing_is_said_of_little_memory(caplog: pytest.LogCaptureFixture) -> None:
    arena = HostArena(1 << 20, pin=False)
    arena.allocate(1 << 20, "test").tensor.fill_(1)
    with caplog.at_level(logging.WARNING):
        arena.pages()
    assert not caplog.records
    assert torch.equal(arena.allocate(0, "nothing").tensor, torch.empty(0, dtype=torch.uint8))
