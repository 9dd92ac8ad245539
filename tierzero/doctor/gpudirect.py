"""GPUDirect Storage: what of it is installed and would answer. All of it happens in a child process, because these
libraries are known to abort where their driver is missing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierzero.doctor.child import Outcome
from tierzero.doctor.finding import Finding, Status, one_line
from tierzero.doctor.machine import read

SILENCE = 20.0  # seconds
_NAMES = ("libcufile.so.0", "libcufile.so")
_FOLDERS = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_WITHOUT = "data passes through pinned host memory instead, as it does wherever GPUDirect is not to be had"


class _CuFileError(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int), ("cuda", ctypes.c_int))


def candidates() -> list[str]:
    """Where the library is looked for: what the loader finds, then wheels, conda and the toolkit (I6)."""
    wheels = [os.path.join(entry, "nvidia", "cufile", "lib") for entry in sys.path if entry.endswith("-packages")]
    conda = [os.path.join(os.environ["CONDA_PREFIX"], "lib")] if os.environ.get("CONDA_PREFIX") else []
    return [*_NAMES, *(os.path.join(folder, _NAMES[0]) for folder in (*wheels, *conda, *_FOLDERS))]


def probe() -> Iterator[dict[str, Any]]:
    """In the child; each dangerous step is named before it is made."""
    library = None
    for name in candidates():
        try:
            library = ctypes.CDLL(name)
            yield {"what": "library", "path": name, "error": ""}
            break
        except OSError as error:
            yield {"what": "library", "path": name, "error": one_line(error)}
    if library is not None:
        yield {"what": "step", "doing": f"cuFileDriverOpen of {name}"}
        library.cuFileDriverOpen.restype = _CuFileError
        status = library.cuFileDriverOpen()
        yield {"what": "driver", "error": int(status.error), "cuda": int(status.cuda)}
    yield {"what": "step", "doing": "import kvikio"}
    try:
        import kvikio
    except Exception as error:  # whatever a foreign package raises at import
        yield {"what": "kvikio", "version": "", "error": f"{type(error).__name__}: {one_line(error)}"}
    else:
        yield {"what": "kvikio", "version": str(getattr(kvikio, "__version__", "unknown")), "error": ""}


def finding(outcome: Outcome, gpu: bool, root: Path = Path("/")) -> Finding:
    """What it comes to; without a GPU nothing of it is missed."""
    tried = [line for line in outcome.lines if line.get("what") == "library"]
    loaded = next((line["path"] for line in tried if not line["error"]), None)
    driver, kvikio, step = outcome.last("driver"), outcome.last("kvikio"), outcome.last("step")
    module = read(root, "proc/driver/nvidia-fs/version")
    facts = {"tried": tried, "driver": driver, "kvikio": kvikio, "nvidia_fs": module, "ended": outcome.ended}
    status: Status = "warn" if gpu else "note"
    if outcome.ended:
        during = f" during {step['doing']}" if step is not None else ""
        advice = f"the installed library is not fit for this machine, and was stopped there: {_WITHOUT}"
        return Finding("GPUDirect", f"its probe {outcome.ended}{during}", status, advice, facts=facts)
    if loaded is None:
        value = f"no libcufile ({len(tried)} places tried), {_kvikio(kvikio)}"
        advice = f"optional: {_WITHOUT}" if gpu else "optional, and of no use without an NVIDIA GPU"
        return Finding("GPUDirect", value, "note", advice, facts=facts)
    assert driver is not None
    if driver["error"]:
        value = f"{loaded}: cuFileDriverOpen gives error {driver['error']} (CUDA {driver['cuda']}), {_kvikio(kvikio)}"
        return Finding("GPUDirect", value, "note", f"optional: {_WITHOUT}", facts=facts)
    path = f"nvidia-fs {' '.join(module.split())}" if module else "no nvidia-fs module: compatibility mode or P2PDMA"
    value = f"{loaded} opens; {path}; {_kvikio(kvikio)}"
    if not module and gpu:
        advice = "without the nvidia-fs kernel module cuFile may copy through host memory: modprobe nvidia-fs"
        return Finding("GPUDirect", value, "note", advice, facts=facts)
    if kvikio is None or kvikio["error"]:
        return Finding(
            "GPUDirect", value, "note", "its Python side is missing: pip install 'tierzero[gds]'", facts=facts
        )
    return Finding("GPUDirect", value, facts=facts)


def _kvikio(line: dict[str, Any] | None) -> str:
    if line is None or line["error"].startswith("ModuleNotFoundError"):
        return "no kvikio"
    return f"kvikio {line['version']}" if not line["error"] else f"kvikio: {line['error']}"
