"""Findings about limits of this process: locked memory, open files."""

from __future__ import annotations

import resource
from pathlib import Path

from tierzero.doctor.finding import Finding
from tierzero.doctor.machine import read
from tierzero.sizes import format_size

_CAP_IPC_LOCK = 14
_ENOUGH_LOCKED = 256 << 20  # rings, and the buffers that one drive keeps in flight
_ENOUGH_FILES = 256
_UNLIMITED = resource.RLIM_INFINITY


def may_lock(root: Path = Path("/")) -> bool:
    """Whether this process is exempt from the limit."""
    for line in read(root, "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def locked_memory(soft: int, hard: int, exempt: bool) -> Finding:
    """What fixed I/O buffers count against. Bytes, RLIM_INFINITY for no limit."""
    facts = {"soft": soft, "hard": hard, "exempt": exempt}
    value = "unlimited" if soft == _UNLIMITED else format_size(soft)
    if exempt and soft != _UNLIMITED:
        value += ", but this process is exempt"
    if exempt or soft == _UNLIMITED or soft >= _ENOUGH_LOCKED:
        return Finding("locked memory", value, facts=facts)
    own = hard == _UNLIMITED or hard >= _ENOUGH_LOCKED
    how = "ulimit -l " + ("unlimited" if hard == _UNLIMITED else str(hard >> 10)) if own else "raise memlock"
    advice = f"I/O buffers cannot be registered (fixed), nor much memory pinned: {how} (docker --ulimit memlock=-1)"
    return Finding("locked memory", value, "warn", advice, facts=facts)


def open_files(soft: int, hard: int) -> Finding:
    """Descriptors: a few per store and ring, some hundreds with data loaders."""
    facts = {"soft": soft, "hard": hard}
    value = "unlimited" if soft == _UNLIMITED else str(soft)
    if soft != _UNLIMITED and soft < _ENOUGH_FILES:
        advice = f"data loaders and drives need more: ulimit -n {_ENOUGH_FILES * 4} (docker --ulimit nofile=1024)"
        return Finding("open files", value, "warn", advice, facts=facts)
    return Finding("open files", value, facts=facts)


def findings() -> list[Finding]:
    """Those of this process."""
    return [
        locked_memory(*resource.getrlimit(resource.RLIMIT_MEMLOCK), may_lock()),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]
