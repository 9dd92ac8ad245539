"""Tiers: the whole configuration of an offloaded model, and what its budgets come to on this machine."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import psutil
import torch

from tierzero.errors import ConfigError
from tierzero.hardware import cgroup
from tierzero.sizes import parse_rate, parse_size
from tierzero.storage.directory import check_apart, listed
from tierzero.units.layout import PAGE

MOST_THREADS = 8  # of the streamed step: so many take all that a memory controller gives
AUTO_DEVICE_SHARE = 0.5  # of what is free: activations need the rest


@dataclass(frozen=True)
class Tiers:
    """Budgets and places.

    nvme: directory for parameters and optimizer states that host memory does not hold, or several, one per drive, over
    which they are striped; None keeps everything in host memory.
    nvme_tbw: bytes that all those drives together are rated to write ("1.2PB"), for `stats` and `plan`; None: unknown.
    host: bytes the engine may use in host memory: gradients, buffers and cached records ("48GiB", 5e9, or "60%" of the
    memory there is).
    device: bytes for resident parameters and gradients on their way out on the compute device; "auto" takes half of
    what is free there.
    activations: bytes of the host budget set aside for tensors that forward saves for backward ("8GiB", or "25%" of the
    host budget): they leave the device, and what exceeds these bytes goes on to NVMe, or stays on the device where
    there is none. 0: all stay on the device.
    prefetch: how many units to fetch ahead, or "auto": as far as the device budget reaches.
    gds: GPUDirect Storage, "auto" or "off".
    compute: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1"...
    nvme_limit: bytes per second that each drive is held below, reads and writes together ("1GB/s", 5e8): for a drive
    that others use too, or to see how a run would fare on a slower one; None: none.
    link_limit: the same for parameters on their way to the compute device; None: none.
    nvme_block: bytes of one piece of I/O, a multiple of 4096 up to 1 GiB; None: what `tierzero bench nvme` found best
    on the drive, or 4 MiB.
    update_threads: threads that compute the streamed optimizer step, or "auto": as many as there are cores, 8 at most.
    No bit depends on it.
    update_cores: numbers of the cores that they run on, to keep them away from others; () for any.
    """

    nvme: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    host: int | float | str = "60%"
    device: int | float | str = "auto"
    prefetch: int | str = "auto"
    gds: str = "auto"
    compute: str = "auto"
    nvme_tbw: int | float | str | None = None
    nvme_limit: int | float | str | None = None
    link_limit: int | float | str | None = None
    nvme_block: int | str | None = None
    activations: int | float | str = 0
    update_threads: int | str = "auto"
    update_cores: Sequence[int] = ()

    def directories(self) -> list[Path]:
        """The store's directories, one per drive; none without NVMe.

        ConfigError for an empty list and for what is no path, StoreError for directories that are the same or inside
        each other.
        """
        if self.nvme is None:
            return []
        paths = [Path(path) for path in listed(self.nvme)]
        if not paths:
            raise ConfigError(
                "nvme=[] names no directory: give at least one, or None to keep everything in host memory"
            )
        if len(paths) > 1:
            check_apart(paths)
        return paths

    def rated_bytes(self) -> int | None:
        """The drives' rating in bytes written, all together; None if unknown."""
        if self.nvme_tbw is None:
            return None
        try:
            rating = parse_size(self.nvme_tbw, what="nvme_tbw")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not rating:
            raise ConfigError(f"nvme_tbw={self.nvme_tbw!r}: a rating is more than zero bytes; None if it is unknown")
        return rating

    def drive_limit(self) -> int:
        """Bytes per second of each drive, 0 without a limit."""
        return _rate(self.nvme_limit, "nvme_limit")

    def device_limit(self) -> int:
        """Bytes per second to the compute device, 0 without a limit."""
        return _rate(self.link_limit, "link_limit")

    def block_bytes(self) -> int | None:
        """Bytes of one piece of I/O, None for the drive's own."""
        if self.nvme_block is None:
            return None
        block = _size(self.nvme_block, 0, "nvme_block")
        if not 0 < block <= 1 << 30 or block % PAGE:
            raise ConfigError(f"nvme_block={self.nvme_block!r}: a block is a multiple of 4096 bytes up to 1 GiB")
        return block

    def crew(self) -> tuple[int, tuple[int, ...]]:
        """(how many threads compute the streamed step, the cores that they are kept to: none for any)."""
        try:
            cores = tuple(dict.fromkeys(operator.index(core) for core in self.update_cores))
        except TypeError as error:
            raise ConfigError(
                f"update_cores={self.update_cores!r}: give the numbers of cores, such as (8, 9)"
            ) from error
        allowed = os.sched_getaffinity(0)
        if missing := [core for core in cores if core not in allowed]:
            raise ConfigError(
                f"update_cores={self.update_cores!r}: this process may not use {_named(missing)}, but "
                f"{_named(sorted(allowed))}"
            )
        if self.update_threads == "auto":
            return min(MOST_THREADS, len(cores) or cgroup.usable_cores()), cores
        threads: Any = self.update_threads
        whole = isinstance(threads, Integral) and not isinstance(threads, bool)
        if not whole or not 1 <= int(threads) <= 256:
            raise ConfigError(f'update_threads={repr(threads)[:80]}: use 1 to 256 threads, or "auto"')
        return int(threads), cores

    def compute_device(self) -> torch.device:
        """Where forward and backward run. ConfigError for CUDA without one."""
        if self.compute == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.compute)
        except RuntimeError as error:
            raise ConfigError(
                f"compute={self.compute!r} is not a device; use 'auto', 'cpu', 'cuda' or 'cuda:N'"
            ) from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"compute={self.compute!r}, but torch sees no CUDA device; use compute='cpu' or a torch build for CUDA"
            )
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"compute={self.compute!r}: tierzero computes on cpu or cuda devices")
        return device

    def host_bytes(self) -> int:
        """The host budget in bytes; percentages are of the memory this process may use."""
        return _size(self.host, memory_limit(), "host")

    def activation_bytes(self) -> int:
        """What of the host budget is for activations, in bytes. ConfigError if that is more than all of it."""
        host = self.host_bytes()
        nbytes = _size(self.activations, host, "activations")
        if nbytes > host:
            raise ConfigError(
                f"activations={self.activations!r} is more than the host budget of {host} bytes that it is a part of: "
                "give a larger host= or less for activations"
            )
        return nbytes

    def device_bytes(self) -> int:
        """The device budget in bytes."""
        device = self.compute_device()
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
        else:
            free, total = _memory().available, memory_limit()
        if self.device == "auto":
            return int(min(free, total) * AUTO_DEVICE_SHARE)
        return _size(self.device, total, "device")

    def depth(self) -> int | None:
        """The prefetch depth, None for "auto"."""
        if self.prefetch == "auto":
            return None
        try:
            depth = int(self.prefetch)
        except (TypeError, ValueError, OverflowError):
            depth = -1
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, Integral | str) or depth < 0:
            raise ConfigError(
                f'prefetch={repr(self.prefetch)[:80]} is not a depth; use "auto" or how many units to fetch ahead, '
                "0 or more"
            )
        return depth

    def check(self) -> None:
        """Raise ConfigError for a value that cannot be."""
        self.directories()
        self.rated_bytes()
        self.compute_device()
        self.activation_bytes()
        self.device_bytes()
        self.depth()
        self.drive_limit()
        self.device_limit()
        self.block_bytes()
        self.crew()
        if self.gds not in ("auto", "off"):
            raise ConfigError(f'gds={self.gds!r}: use "auto" or "off"; this version has no GPUDirect path to force')


def _size(value: int | float | str, of: int, what: str) -> int:
    try:
        return parse_size(value, of=of, what=what)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _rate(value: int | float | str | None, what: str) -> int:
    try:
        return 0 if value is None else parse_rate(value, what=what)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _memory() -> Any:
    try:
        return psutil.virtual_memory()
    except OSError as error:
        raise ConfigError(
            f"how much memory there is cannot be told ({error.filename or '/proc/meminfo'}: {error.strerror}): "
            "mount /proc"
        ) from error


def memory_limit() -> int:
    """Bytes of memory this process may use: the machine's, or its control groups' limit where that is lower."""
    total = int(_memory().total)
    limit = cgroup.memory_limit()
    return total if limit is None else min(total, limit)


def _named(cores: Sequence[int]) -> str:
    """Core numbers in words."""
    return ("core " if len(cores) == 1 else "cores ") + ", ".join(map(str, cores))
