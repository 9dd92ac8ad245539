"""The host tier: one arena of the whole host budget, from which every other part takes its blocks."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from contextlib import suppress
from typing import Any

import torch

from tierzero.errors import BudgetError
from tierzero.hardware.hugepages import advice, resident
from tierzero.native import NATIVE
from tierzero.storage.extents import FreeList
from tierzero.tiers.base import aligned_empty
from tierzero.units.layout import PAGE, round_up

log = logging.getLogger("tierzero")
_PAGES_AGE = 10.0  # seconds that an account of pages is good for: the kernel walks all page tables for it
_PAGES_LEAST = 8 << 20  # touched bytes below which page sizes make no difference
PIECE = 64 << 30  # bytes pinned at a time: one registration of 512 GiB or more fails whatever is free


class Block:
    """A run of the arena: `tensor` is uint8[nbytes], its address a multiple of 4096. `free` gives it back, once."""

    def __init__(self, arena: HostArena, tensor: torch.Tensor, offset: int) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self._arena = arena
        self._offset = offset

    def free(self) -> None:
        """Give the bytes back; nothing may use the tensor afterwards. Harmless when done already."""
        arena, offset = self._arena, self._offset
        self._offset = -1
        if offset >= 0:
            arena._give(offset, self.nbytes)


class HostArena:
    """`budget` bytes of host memory, handed out in runs of whole 4 KiB pages, first fit. Thread-safe.

    Pages that were never used cost nothing, unless the arena is pinned for a GPU: `pin` None pins where CUDA is
    available. Pinning that fails is a warning, and the arena works unpinned. `node`: the NUMA node that pages come from
    while it has room, -1 for any.
    """

    def __init__(self, budget: int, *, pin: bool | None = None, node: int = -1) -> None:
        if budget < 0:
            raise ValueError(f"a host budget of {budget} bytes makes no sense: give zero or more")
        self.budget = budget // PAGE * PAGE
        self.used = 0
        self.peak = 0
        self.pinned = False
        self._lock = threading.Lock()
        self._free = FreeList(self.budget)
        self._registered: list[int] = []
        self._tensor = _memory(self.budget, node)
        self._pages: tuple[bool, float, tuple[int, int]] | None = None
        self._told = False
        if self.budget and (torch.cuda.is_available() if pin is None else pin):
            self._pin(torch.cuda.cudart())

    def allocate(self, nbytes: int, what: str) -> Block:
        """A block of `nbytes` for `what`, which the error names. BudgetError if the budget cannot hold it."""
        if nbytes < 0:
            raise ValueError(f"a block for {what} cannot have {nbytes} bytes")
        size = round_up(nbytes, PAGE)
        with self._lock:
            offset = self._free.take(size, first=True)
            if offset is None:
                largest = self._free.largest
                apart = f", the largest run of them {largest}" if self._free.free_bytes >= size else ""
                raise BudgetError(
                    f"the host budget of {self.budget} bytes cannot hold {nbytes} more for {what}: {self.used} are in "
                    f"use and {self._free.free_bytes} free{apart}. "
                    f"Give a host budget of at least {self.used + size} bytes"
                )
            self.used += size
            self.peak = max(self.peak, self.used)
        # with a version counter of its own, as a slice has not: a change of one block is none of the others
        tensor = torch.empty(0, dtype=torch.uint8).set_(
            self._tensor.untyped_storage(), self._tensor.storage_offset() + offset, (nbytes,), (1,)
        )
        return Block(self, tensor, offset)

    def _give(self, offset: int, nbytes: int) -> None:
        size = round_up(nbytes, PAGE)
        with self._lock:
            self._free.give(offset, size)
            self.used -= size

    def pages(self, settled: bool = True) -> tuple[int, int]:
        """(bytes of the arena in memory, bytes of them in huge pages), at most ten seconds old.

        `settled`: most of what will be used has been; if less than half of it is in huge pages, that is logged once.
        """
        if self._pages is None or self._pages[0] != settled or time.monotonic() > self._pages[1] + _PAGES_AGE:
            found = resident(self._tensor.data_ptr(), self.budget) if self.budget else (0, 0)
            self._pages = settled, time.monotonic(), found
        touched, huge = self._pages[2]
        if settled and touched >= _PAGES_LEAST and 2 * huge < touched and not self._told:
            self._told = True
            log.warning(
                "only %d of the %d MiB of host memory in use lie in huge pages, which makes I/O slower: %s",
                huge >> 20,
                touched >> 20,
                advice(),
            )
        return touched, huge

    def _pin(self, runtime: Any) -> None:
        """Register the arena with the CUDA runtime, piece by piece; all or nothing."""
        address = self._tensor.data_ptr()
        for start in range(0, self.budget, PIECE):
            size = min(PIECE, self.budget - start)
            code = int(runtime.cudaHostRegister(address + start, size, 0))
            if code:
                self._unpin(runtime)
                _forget_cuda_error()
                warnings.warn(
                    f"pinning {size} bytes of the host budget failed with CUDA error {code}; tierzero goes on "
                    "with pageable memory, which makes copies to the GPU slower. "
                    "Give a smaller host budget to have it pinned",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return
            self._registered.append(address + start)
        self.pinned = True

    def _unpin(self, runtime: Any) -> None:
        while self._registered:
            runtime.cudaHostUnregister(self._registered.pop())
        self.pinned = False

    def close(self) -> None:
        """Unpin. The memory itself goes when the last tensor over it does."""
        if self._registered:
            self._unpin(torch.cuda.cudart())


def _forget_cuda_error() -> None:
    """The runtime reports a failed registration once more at the next kernel launch: let that be this one."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(0)


def _memory(nbytes: int, node: int) -> torch.Tensor:
    """Page-aligned uint8[nbytes] whose untouched pages cost nothing."""
    if NATIVE is None or nbytes == 0:
        return aligned_empty(nbytes)
    return torch.from_numpy(NATIVE.Slab(nbytes, node).array())
