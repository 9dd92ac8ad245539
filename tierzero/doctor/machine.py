"""Findings about the machine: kernel, processor, NUMA nodes, memory, swap, huge pages.

Read from /proc and /sys below `root`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tierzero.doctor.finding import Finding, one_line
from tierzero.hardware import cgroup
from tierzero.hardware.drives import Drive
from tierzero.sizes import format_size

_MIB = 1 << 20
_GIB = 1 << 30
_LITTLE_MEMORY = 2 * _GIB  # torch alone takes half a GiB
_SWAPPED = 64 * _MIB  # idle pages of other processes that cost nothing


def read(root: Path, path: str) -> str:
    """The text of a file below `root`, "" where there is none."""
    with suppress(OSError):
        return (root / path).read_text(errors="replace").strip()
    return ""


def meminfo(root: Path) -> dict[str, int]:
    """Bytes by the kernel's names."""
    found = {}
    for line in read(root, "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def kernel(root: Path = Path("/")) -> Finding:
    """io_uring that is good for anything came with 5.6; O_DIRECT alignment is told since 6.1."""
    release = read(root, "proc/sys/kernel/osrelease") or os.uname().release
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if version < (5, 6):
        advice = "this kernel has no usable io_uring, so threads do the I/O; 5.15 or newer is better"
        return Finding("kernel", release, "note", advice)
    if "microsoft" in release.lower():
        advice = "WSL: keep the store on its own ext4 disk, never below /mnt/c, and expect little pinned memory"
        return Finding("kernel", release, "note", advice)
    return Finding("kernel", release)


def processor(root: Path = Path("/"), cores: int | None = None) -> Finding:
    """Model and cores this process may use (affinity or cpuset, and the control groups' quota)."""
    model = architecture = os.uname().machine
    total = 0
    for line in read(root, "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        total += key.strip() == "processor"
        if key.strip() == "model name":
            model = one_line(value)
    usable = len(os.sched_getaffinity(0)) if cores is None else cores
    quota = cgroup.cpu_quota(root)
    facts = {"model": model, "architecture": architecture, "cores": total, "usable": usable, "quota": quota}
    value = f"{model}, {usable} of {max(total, usable)} cores usable"
    if quota is not None and quota < usable:
        value += f", quota of {quota:.2f} cores"
        threads = max(1, int(quota))
        advice = f"more threads than the quota only wait for each other: export OMP_NUM_THREADS={threads}"
        return Finding("processor", value, "warn", advice, facts=facts)
    if usable == 1:
        return Finding("processor", value, "note", "I/O, AdamW and the model share one core: allow more", facts=facts)
    return Finding("processor", value, facts=facts)


def cpu_list(text: str) -> set[int]:
    """The kernel's "0-3,8" as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found


def numa(drives: Sequence[Drive] = (), root: Path = Path("/"), cores: set[int] | None = None) -> Finding:
    """Nodes of the processors in use, of GPUs and of drives; they should be one (D5)."""
    allowed = os.sched_getaffinity(0) if cores is None else cores
    nodes = {}
    for directory in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        nodes[int(directory.name[4:])] = cpu_list(read(directory, "cpulist"))
    if len(nodes) < 2:
        return Finding("NUMA", "one node", facts={"nodes": len(nodes)})
    ours = sorted(node for node, cpus in nodes.items() if cpus & allowed)
    disks = {disk.name: disk.numa_node for drive in drives for disk in drive.disks if disk.numa_node >= 0}
    gpus = {}
    for gpu in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        text = read(root, f"sys/bus/pci/devices/{gpu.name.lower()}/numa_node")
        if text.isdigit():
            gpus[f"GPU {gpu.name}"] = int(text)
    facts = {"nodes": len(nodes), "ours": ours, "disks": disks, "gpus": gpus}
    placed = {**gpus, **disks}
    value = f"{len(nodes)} nodes, running on {', '.join(map(str, ours))}"
    value += "".join(f"; {name} on {node}" for name, node in placed.items())
    wanted = set(gpus.values()) or set(disks.values())
    if wanted and not set(ours) <= wanted:
        node = ",".join(map(str, sorted(wanted)))
        advice = f"keep the process beside them: numactl --cpunodebind={node} --preferred={min(wanted)} tierzero ..."
        return Finding("NUMA", value, "note", advice, facts=facts)
    return Finding("NUMA", value, facts=facts)


def memory(root: Path = Path("/")) -> Finding:
    """Memory of the machine against what the control groups allow (R17)."""
    info = meminfo(root)
    total, available = info.get("MemTotal", 0), info.get("MemAvailable", 0)
    limit = cgroup.memory_limit(root)
    allowed = total if limit is None or not total else min(total, limit)
    facts = {"total": total, "available": available, "cgroup_limit": limit, "allowed": allowed}
    value = f"{format_size(total)}, {format_size(available)} available"
    if limit is not None and limit < total:
        value += f"; the control group allows {format_size(limit)}"
    if allowed < _LITTLE_MEMORY:
        advice = "little for PyTorch and its buffers: raise the limit (docker run --memory, systemd MemoryMax)"
        return Finding("memory", value, "warn", advice, facts=facts)
    if allowed < total:
        advice = f"percentages such as host='60%' are of the {format_size(allowed)} that this process is allowed"
        return Finding("memory", value, "note", advice, facts=facts)
    return Finding("memory", value, facts=facts)


def swap(root: Path = Path("/")) -> Finding:
    """Memory swapped out now (R19)."""
    info = meminfo(root)
    total = info.get("SwapTotal", 0)
    used = total - info.get("SwapFree", total)
    facts = {"total": total, "used": used}
    if not total:
        return Finding("swap", "none", facts=facts)
    value = f"{format_size(used)} of {format_size(total)} in use"
    if used > _SWAPPED:
        advice = "memory is or was short: lower the host budget, so that the drive serves tierzero and not swap"
        return Finding("swap", value, "warn", advice, facts=facts)
    return Finding("swap", value, facts=facts)


def overcommit(root: Path = Path("/")) -> Finding:
    """Strict accounting makes every untouched page of a budget count."""
    mode = read(root, "proc/sys/vm/overcommit_memory")
    info = meminfo(root)
    facts = {"mode": mode, "limit": info.get("CommitLimit"), "committed": info.get("Committed_AS")}
    if mode == "2":
        left = max(0, info.get("CommitLimit", 0) - info.get("Committed_AS", 0))
        value = f"strict, {format_size(left)} left to promise"
        advice = "budgets are reserved whole, used or not: sysctl vm.overcommit_memory=0, or keep budgets below that"
        return Finding("overcommit", value, "warn", advice, facts=facts)
    return Finding("overcommit", {"0": "heuristic", "1": "always"}.get(mode, "unknown"), facts=facts)


def huge_pages(got: int | None, asked: int, root: Path = Path("/")) -> Finding:
    """The setting, and what a slab really got after its pages were touched; `got` None where there are no slabs."""
    text = read(root, "sys/kernel/mm/transparent_hugepage/enabled")
    mode = text.partition("[")[2].partition("]")[0] or "not in this kernel"
    defrag = read(root, "sys/kernel/mm/transparent_hugepage/defrag").partition("[")[2].partition("]")[0]
    facts = {"enabled": mode, "defrag": defrag, "asked": asked, "got": got}
    if got is None:
        advice = "not tried, since the native module that makes slabs is missing"
        return Finding("huge pages", mode, "note", advice, facts=facts)
    value = f"{mode}; {format_size(got)} of {format_size(asked)} came"
    if got * 2 >= asked:
        return Finding("huge pages", value, facts=facts)
    if mode == "never":
        advice = "large reads into small pages are slower: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    elif mode == "not in this kernel":
        advice = "large reads into small pages are slower: use a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
    else:
        advice = "memory is too fragmented for them: echo 1 > /proc/sys/vm/compact_memory, or start before it fills up"
    return Finding("huge pages", value, "warn", advice, facts=facts)
