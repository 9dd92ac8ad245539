"""Findings about the native module: whether it is there, its io_uring, its AdamW kernel, its slabs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from tierzero.bench.scratch import nameless
from tierzero.doctor.finding import Finding, one_line
from tierzero.doctor.machine import huge_pages, read
from tierzero.hardware.tuning import engine_options, measured
from tierzero.native import NATIVE
from tierzero.sizes import format_size

_SLAB = 32 << 20
_BLOCK = 1 << 20
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
    """A real round trip."""
    return io_uring_of(None if NATIVE is None else str(NATIVE.probe_uring()))


def io_uring_of(reason: str | None, root: Path = Path("/")) -> Finding:
    """`reason`: why it does not work, "" if it does, None if there is nothing to try it with. N20: what forbids it is
    named, and its mere presence says nothing.
    """
    disabled = read(root, "proc/sys/kernel/io_uring_disabled")
    seccomp = any(
        line.split()[1:] == ["2"] for line in read(root, "proc/self/status").splitlines() if line.startswith("Seccomp:")
    )
    facts = {"reason": reason, "disabled": disabled, "seccomp": seccomp}
    if reason is None:
        advice = "not tried, since the native module is missing: aiofiles does the I/O"
        return Finding("io_uring", "unused", "note", advice, facts=facts)
    if not reason:
        return Finding("io_uring", "works (real round trip)", facts=facts)
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


def engine_on(path: str) -> Finding:
    """What the engine would use on the drive under the directory `path`: one file is really written and read."""
    if NATIVE is None:
        return Finding("I/O engine", "aiofiles", "note", "the native module is missing", path)
    try:
        handle = nameless(Path(path))  # nothing is left however this ends
        try:
            return engine_of(*_round_trip(f"/proc/self/fd/{handle}", path), path)
        finally:
            os.close(handle)
    except OSError as error:
        text = one_line(f"{error.strerror or error} [errno {error.errno}]")
        return Finding("I/O engine", text, "warn", "run tierzero doctor --selftest here, which says more", path)


def _round_trip(name: str, folder: str) -> tuple[dict[str, Any], bool]:
    """The engine's description after one block went out to the file `name` in `folder` and came back, and whether the
    block could be registered.
    """
    assert NATIVE is not None
    slab = NATIVE.Slab(_SLAB)
    block = slab.array()
    block[:_BLOCK] = 0xA5
    engine = NATIVE.Engine(**engine_options(measured([folder])))  # as the profile says, if there is one
    file = NATIVE.File(name, create=False)
    try:
        registered = bool(engine.register(block))
        engine.write(file, 0, block[:_BLOCK]).result()
        engine.read(file, 0, block[_BLOCK : 2 * _BLOCK]).result()
        if block[_BLOCK : 2 * _BLOCK].tobytes() != b"\xa5" * _BLOCK:
            raise OSError(errno.EIO, "what was written came back different", name)
        return dict(engine.describe()), registered
    finally:
        file.close()
        engine.close()


def engine_of(described: dict[str, Any], registered: bool, path: str) -> Finding:
    """What `Engine.describe` says of its only drive."""
    drive: dict[str, Any] = described["drives"][0] if described["drives"] else described
    kept = [str(flag) for flag in drive.get("flags", [])]
    kept += [name.replace("_", " ") for name in ("fixed_files", "fixed_buffers") if drive.get(name)]
    value = f"{drive['engine']}, block {format_size(described['block'])}, depth {described['depth']}"
    value += f": {', '.join(kept)}" if kept else ""
    facts = {**described, "registered": registered}
    if drive["engine"] != "uring":
        return Finding("I/O engine", value, "note", drive["reason"] or "threads do the I/O: see io_uring", path, facts)
    if not registered:
        advice = "buffers cannot be registered, so each request maps its pages anew: see locked memory"
        return Finding("I/O engine", value, "note", advice, path, facts)
    return Finding("I/O engine", value, path=path, facts=facts)


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
