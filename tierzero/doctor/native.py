"""Findings about the native module: whether it is there, its io_uring, its AdamW kernel, its slabs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tierzero.doctor.finding import Finding
from tierzero.doctor.machine import huge_pages, read
from tierzero.native import NATIVE

_SLAB = 32 << 20
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "neon")


def module() -> Finding:
    """The extension, or what takes over."""
    if NATIVE is not None:
        return Finding("native module", "built", facts={"file": NATIVE.__file__})
    if os.environ.get("TIERZERO_NO_NATIVE", "") not in ("", "0"):
        advice = "slower portable parts (aiofiles, torch's AdamW) do the work: unset TIERZERO_NO_NATIVE"
        return Finding("native module", "turned off by TIERZERO_NO_NATIVE", "warn", advice)
    advice = (
        "slower portable parts (aiofiles, torch's AdamW) do the work: reinstall with a C++20 compiler (pip install .)"
    )
    return Finding("native module", "not built", "warn", advice)


def adam() -> Finding:
    """The kernel chosen for this processor."""
    if NATIVE is None:
        return Finding("AdamW kernel", "torch's own", "note", "the streamed native step is missing: see native module")
    features: dict[str, bool] = NATIVE.cpu_features()
    isa = str(NATIVE.adam_isa())
    has = " ".join(name for name in _FEATURES if features.get(name))
    value = f"{isa} (processor: {has or 'none of the known features'})"
    facts = {"isa": isa, "features": features}
    if isa != "scalar":
        return Finding("AdamW kernel", value, facts=facts)
    if os.environ.get("TIERZERO_ISA") == "scalar":
        return Finding("AdamW kernel", value, "warn", "several times slower: unset TIERZERO_ISA", facts=facts)
    advice = "several times slower, and not bit-equal to torch: a processor with AVX2, FMA and F16C has a faster one"
    return Finding("AdamW kernel", value, "note", advice, facts=facts)


def io_uring() -> Finding:
    """A real round trip, and the engine's own description."""
    if NATIVE is None:
        return io_uring_of(None, {})
    reason = str(NATIVE.probe_uring())
    described: dict[str, Any] = {}
    if not reason:
        try:
            engine = NATIVE.Engine(kind="uring")
            try:
                described = dict(engine.describe())
            finally:
                engine.close()
        except OSError as error:
            reason = str(error)
    return io_uring_of(reason, described)


def io_uring_of(reason: str | None, described: dict[str, Any], root: Path = Path("/")) -> Finding:
    """`reason`: why it does not work, "" if it does, None if there is nothing to try it with. N20: what forbids it is
    named, and its mere presence says nothing.
    """
    disabled = read(root, "proc/sys/kernel/io_uring_disabled")
    seccomp = any(
        line.split()[1:] == ["2"] for line in read(root, "proc/self/status").splitlines() if line.startswith("Seccomp:")
    )
    facts = {"reason": reason, "disabled": disabled, "seccomp": seccomp, "engine": described}
    if reason is None:
        advice = "not tried, since the native module is missing: aiofiles does the I/O"
        return Finding("io_uring", "unused", "note", advice, facts=facts)
    if not reason:
        details = [str(flag) for flag in described.get("flags", [])]
        details += [name.replace("_", " ") for name in ("fixed_files", "fixed_buffers") if described.get(name)]
        value = "works (real round trip)" + (f": {', '.join(details)}" if details else "")
        return Finding("io_uring", value, facts=facts)
    if disabled == "2":
        cause = "sysctl kernel.io_uring_disabled=0 allows it"
    elif disabled == "1":
        cause = "it is for CAP_SYS_ADMIN or the group kernel.io_uring_group: sysctl kernel.io_uring_disabled=0"
    elif seccomp:
        cause = "a seccomp filter may forbid it (docker: --security-opt seccomp=PROFILE with io_uring_*)"
    elif "not implemented" in reason:
        cause = "this kernel does not offer it"
    elif "allocate memory" in reason:
        cause = "raise the limit of locked memory: ulimit -l unlimited (docker --ulimit memlock=-1)"
    else:
        cause = "the container or a security module may forbid it"
    return Finding("io_uring", reason, "warn", f"threads with pread and pwrite do the I/O; {cause}", facts=facts)


def slabs() -> Finding:
    """Huge pages, really tried: what a slab got after every page was touched."""
    if NATIVE is None:
        return huge_pages(None, _SLAB)
    try:
        slab = NATIVE.Slab(_SLAB)
        slab.array()[::4096] = 1
        return huge_pages(int(slab.huge_bytes()), _SLAB)
    except (OSError, MemoryError):
        return huge_pages(0, _SLAB)


def findings() -> list[Finding]:
    """All of them."""
    return [module(), io_uring(), adam(), slabs()]
