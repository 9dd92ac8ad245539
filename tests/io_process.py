"""Run Python code in a process of its own, under limits, filters and a shim that its tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 54321  # a user who runs nothing else here, so that limits per user count this process alone
PRELUDE = (
    f"NOBODY = {NOBODY}"
    """
import ctypes, errno, gc, os, resource, signal, sys, time
import numpy as np
from tierzero import _native as n

def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)

def round_trip(engine, file, nbytes=300_000, seed=1, offset=8192):
    data, back = noise(nbytes, seed), np.zeros(nbytes, np.uint8)
    assert engine.write(file, offset, data).result() == nbytes
    assert engine.read(file, offset, back).result() == nbytes
    assert np.array_equal(back, data)

noise(1)  # imports what it needs

def become_nobody():
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

def deny(number, code):
    # a real seccomp filter: system call `number` of this process fails with errno `code`
    def line(op, jt, jf, k):
        return op.to_bytes(2, "little") + bytes([jt, jf]) + k.to_bytes(4, "little")
    refuse, allow = line(0x06, 0, 0, 0x50000 | code), line(0x06, 0, 0, 0x7FFF0000)
    lines = [line(0x20, 0, 0, 0), line(0x15, 0, 1, number), refuse, allow]
    text = ctypes.create_string_buffer(b"".join(lines))
    program = Program(len(lines), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, ctypes.byref(program), 0, 0) != 0:
        print("SKIP: no seccomp:", os.strerror(ctypes.get_errno()))
        sys.exit(0)
"""
)


def run(code: str, *args: object, env: dict[str, str] | None = None) -> str:
    """What the code prints. It must end well and say nothing on stderr; "SKIP: why" skips the test."""
    done = subprocess.run(
        [sys.executable, "-P", "-X", "faulthandler", "-c", PRELUDE + code, *map(str, args)],
        timeout=120,
        text=True,
        capture_output=True,
        env={**os.environ, **(env or {})},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    if done.stdout.startswith("SKIP: "):
        pytest.skip(done.stdout[6:].strip())
    return done.stdout


def build_shim(directory: Path) -> Path:
    """The library of io_shim.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = directory / "shim.so"
    source = Path(__file__).with_name("io_shim.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
