"""Units' bytes go back to the system when they are freed; what else is freed stays for the next that asks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tierzero.paging import malloc

pytestmark = pytest.mark.skipif(malloc._LIBC is None, reason="not glibc, or tuned by the environment")

COMMON = """
import ctypes
import torch
from tierzero.paging.malloc import advise_huge, keep_freed, mapped

def is_mapped(address):
    with open("/proc/self/maps") as maps:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(first <= address < last for first, last in spans)

def block(nbytes):
    storage = torch.empty(0, dtype=torch.uint8).untyped_storage()
    storage.resize_(nbytes)
    return storage

def fill(storage):
    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).fill_(1)

ctypes.CDLL(None).mallopt(-1, 128 << 10)  # glibc's own beginning, whatever importing torch has made of it
keep_freed()
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMON + code],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_unit_leaves_and_the_rest_stays() -> None:
    run("""
with mapped():
    unit = block(8 << 20)
advise_huge(unit.data_ptr(), unit.nbytes())
fill(unit)
other = block(8 << 20)
fill(other)
inside_unit, inside_other = unit.data_ptr() + (4 << 20), other.data_ptr() + (4 << 20)
assert is_mapped(inside_unit) and is_mapped(inside_other)
unit.resize_(0)
other.resize_(0)
assert not is_mapped(inside_unit)
assert is_mapped(inside_other)
""")


def test_memory_that_comes_and_goes_keeps_its_pages() -> None:
    run("""
import resource
with mapped():
    block(4 << 20)  # from here on glibc adjusts nothing by itself
def once():
    for storage in [block(2 << 20) for _ in range(24)]:  # more than there are holes for
        fill(storage)
for _ in range(4):  # until the heap has found its shape
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    once()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert faults < 8 * 24 * 512 / 8, faults  # an eighth of all pages anew each time
""")


def test_the_environment_wins() -> None:
    run("from tierzero.paging import malloc; assert malloc._LIBC is None", MALLOC_TRIM_THRESHOLD_="131072")


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (2 << 20) - 1, 2 << 20, 5 << 20])
def test_any_span_may_be_advised(nbytes: int) -> None:
    import torch

    memory = torch.empty(8 << 20, dtype=torch.uint8)
    for offset in (0, 1, 4095, 4096, 2 << 20):
        malloc.advise_huge(memory.data_ptr() + offset, nbytes)
    memory.fill_(1)
    assert int(memory.sum()) == memory.numel()
