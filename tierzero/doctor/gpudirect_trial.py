"""GPUDirect Storage in the self-test: device memory to the drive and back, and which way the driver says it went."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tierzero.doctor.backends import Absent
from tierzero.doctor.exercise import WrongBytes, drop_cache

_BYTES = 64 << 20
_STATS = Path("/proc/driver/nvidia-fs/stats")


def _served() -> str:
    """The driver's own counts, as text: they change exactly when the driver moves data."""
    with suppress(OSError):
        lines = _STATS.read_text().splitlines()
        return "\n".join(line for line in lines if line.startswith(("Reads", "Writes", "Ops")))
    return ""


def trial(path: str) -> dict[str, Any]:
    """Write, read, compare through kvikio. Absent without CUDA or kvikio; notes say which way the data went (N15)."""
    if not torch.cuda.is_available():
        raise Absent("no CUDA device")
    try:
        import kvikio
    except ImportError:
        raise Absent("kvikio is not installed: pip install 'tierzero[gds]'") from None
    source = torch.randint(0, 256, (_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    before = _served()
    try:
        start = time.monotonic()
        with kvikio.CuFile(path, "w") as file:
            written = file.write(source)
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        middle = time.monotonic()
        drop_cache(path)
        opened = time.monotonic()
        with kvikio.CuFile(path, "r") as file:
            read = file.read(target)
        torch.cuda.synchronize()
        end = time.monotonic()
    finally:
        with suppress(OSError):
            os.unlink(path)
    if written != _BYTES or read != _BYTES or not torch.equal(source, target):
        raise WrongBytes(f"{path}: {written} bytes written, {read} read, of {_BYTES}, or different ones came back")
    way = "through nvidia-fs" if _served() != before else "not through nvidia-fs: by P2PDMA or through host memory"
    rates = {"write": _BYTES / (middle - start), "read": _BYTES / (end - opened)}
    return {"notes": [way], "verified": _BYTES, "requests": 2, **rates}
