"""Findings about Python, torch, CUDA and the other packages; torch and CUDA are tried in a child process."""

from __future__ import annotations

import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tierzero.doctor.child import Outcome
from tierzero.doctor.finding import Finding, one_line
from tierzero.doctor.machine import read
from tierzero.sizes import format_size

NEEDED = ("numpy", "aiofiles", "safetensors", "typer", "rich", "pydantic", "psutil", "tensorboardX")
_OLDEST_TORCH = (2, 8)
SILENCE = 90.0  # seconds; a cold torch from a network drive takes its time
_PINNED = 256 << 20


def versions() -> dict[str, str]:
    """What a bug report needs first."""
    import tierzero

    found = {"tierzero": tierzero.__version__, "python": platform.python_version()}
    for name in ("torch", *NEEDED):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    try:
        found["libc"] = os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (ValueError, OSError):
        found["libc"] = "not glibc"
    found["kernel"] = os.uname().release
    found["machine"] = os.uname().machine
    found["executable"] = sys.executable
    return found


def packages(found: dict[str, str]) -> Finding:
    """The packages that training needs beside torch."""
    missing = [name for name in NEEDED if found[name] == "missing"]
    value = ", ".join(f"{name} {found[name]}" for name in NEEDED if name not in missing)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        return Finding("packages", f"missing: {', '.join(missing)}", "fail", advice)
    return Finding("packages", value)


def torch_probe() -> Iterator[dict[str, Any]]:
    """In the child: torch, then CUDA, then pinned memory, so that a death shows how far it came."""
    import torch

    yield {
        "what": "torch",
        "version": torch.__version__,
        "file": torch.__file__,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    yield cuda_state()
    if not torch.cuda.is_available():
        return
    yield {"what": "pinning"}
    start = time.monotonic()
    try:
        torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True)
        yield {"what": "pinned", "bytes": _PINNED, "seconds": time.monotonic() - start, "error": ""}
    except RuntimeError as error:
        yield {"what": "pinned", "bytes": 0, "seconds": time.monotonic() - start, "error": one_line(error)}


def cuda_state() -> dict[str, Any]:
    """The devices that torch sees, or why it sees none."""
    import torch

    error = ""
    devices = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(index)
                devices.append(
                    {
                        "name": properties.name,
                        "bytes": properties.total_memory,
                        "capability": f"{properties.major}.{properties.minor}",
                    }
                )
            torch.zeros(1, device="cuda").add_(1).item()  # a build without kernels for this GPU fails here
        elif torch.version.cuda is not None:
            try:
                torch.cuda.init()
            except (RuntimeError, AssertionError) as failure:
                error = one_line(failure)
    return {"what": "cuda", "devices": devices, "error": error or "; ".join(one_line(w.message) for w in warned)}


def torch_findings(outcome: Outcome, root: Path = Path("/")) -> list[Finding]:
    """torch, CUDA and pinned memory, from what the child said."""
    torch = outcome.last("torch")
    if torch is None:
        advice = "pip install torch; training cannot work without it"
        return [Finding("torch", f"cannot be imported: the import {outcome.end}", "fail", advice)]
    value = f"{torch['version']}, {torch['threads']} threads, kernels for {torch['capability']}"
    numbers = [int(part) if part.isdigit() else 0 for part in str(torch["version"]).split("+")[0].split(".")[:2]]
    if tuple(numbers) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        found = [Finding("torch", value, "fail", f"too old: pip install 'torch>={oldest}'", facts=torch)]
    else:
        found = [Finding("torch", value, facts=torch)]
    return [*found, *cuda_findings(outcome, torch, root)]


def driver_version(root: Path) -> str:
    """The kernel driver's version, "" where none is loaded."""
    for line in read(root, "proc/driver/nvidia/version").splitlines():
        if line.startswith("NVRM"):
            return next((word for word in line.split() if word[0].isdigit() and "." in word), "unknown version")
    return ""


def cuda_findings(outcome: Outcome, torch: dict[str, Any], root: Path) -> list[Finding]:
    """CUDA, and what can be pinned if there is any."""
    driver = driver_version(root)
    state = outcome.last("cuda")
    facts = {"driver": driver, "build": torch["cuda"], **(state or {})}
    behind = f"driver {driver}" if driver else "no NVIDIA driver"
    if state is None:
        advice = "PyTorch itself cannot use this GPU: check nvidia-smi and dmesg, or set CUDA_VISIBLE_DEVICES=''"
        return [Finding("CUDA", f"trying it {outcome.end} ({behind})", "warn", advice, facts=facts)]
    if not state["devices"]:
        if torch["cuda"] is None and not driver:
            advice = "the CPU computes; for a GPU install its driver and a CUDA build of torch"
            return [Finding("CUDA", "none: torch was built without, no driver", "note", advice, facts=facts)]
        if torch["cuda"] is None:
            advice = "a driver is there, but this torch is built for the CPU only: install a CUDA build of it"
            return [Finding("CUDA", f"unused, {behind}", "warn", advice, facts=facts)]
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
            return [Finding("CUDA", "hidden", "note", "unset CUDA_VISIBLE_DEVICES to use the GPUs", facts=facts)]
        advice = "the CPU computes; for a GPU: install or update its driver, or pass it in (docker --gpus all)"
        status = "warn" if driver else "note"
        value = f"none, {behind}" + (f": {state['error']}" if state["error"] else "")
        return [Finding("CUDA", value, status, advice, facts=facts)]  # type: ignore[arg-type]
    names = ", ".join(f"{device['name']} {format_size(device['bytes'])}" for device in state["devices"])
    found = [Finding("CUDA", f"{names}; torch for {torch['cuda']}, {behind}", facts=facts)]
    pinned = outcome.last("pinned")
    if pinned is None:
        advice = "page-locked host memory kills the process: update the driver; see dmesg"
        found.append(Finding("pinned memory", f"trying it {outcome.end}", "warn", advice))
    elif pinned["error"]:
        advice = "copies to the GPU will not overlap: free memory, raise memlock (and the memory of the VM or WSL)"
        found.append(Finding("pinned memory", pinned["error"], "warn", advice, facts=pinned))
    else:
        value = f"{format_size(pinned['bytes'])} pinned in {pinned['seconds']:.2f} s"
        found.append(Finding("pinned memory", value, facts=pinned))
    return found
