"""A block file that fails on purpose, for tests: any failure of a drive, at a chosen operation."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from dataclasses import dataclass, field
from typing import Literal

import torch

from tierzero.tiers.base import BlockFile


@dataclass
class Fault:
    """What happens at the `nth` operation (from 1) of kind `op`, and with `persistent` at every later one.

    - "error": nothing is transferred, and OSError with `code` is raised
    - "short": only the first half is transferred, and OSError with `code` is raised
    - "hold": the operation waits until `gate` is set; `reached` is set when it begins to wait
    - "corrupt": the byte at `at` (modulo the length) is flipped on its way, without an error
    """

    op: Literal["read", "write", "sync", "preallocate"]
    nth: int = 1
    kind: Literal["error", "short", "hold", "corrupt"] = "error"
    code: int = errno.EIO
    persistent: bool = False
    at: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)


class FaultyFile:
    """Passes everything on to `inner`, except what `plan` says.

    The plan may change at any time. `counts` has the operations so far by kind.
    """

    def __init__(self, inner: BlockFile, plan: list[Fault] | None = None) -> None:
        self.inner = inner
        self.plan = [] if plan is None else plan
        self.counts = {"read": 0, "write": 0, "sync": 0, "preallocate": 0}

    @property
    def path(self) -> str:
        """The path of the file below."""
        return self.inner.path

    @property
    def paths(self) -> list[str]:
        """The paths of the file below."""
        return self.inner.paths

    @property
    def busy_ns(self) -> tuple[int, int]:
        """That of the file below."""
        return self.inner.busy_ns

    @property
    def alignment(self) -> int:
        """The alignment of the file below."""
        return self.inner.alignment

    @property
    def bytes_read(self) -> int:
        """Bytes that the file below has read."""
        return self.inner.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes that the file below has written."""
        return self.inner.bytes_written

    def _next(self, op: str) -> list[Fault]:
        self.counts[op] += 1
        count = self.counts[op]
        return [
            fault
            for fault in self.plan
            if fault.op == op and (fault.nth == count or (fault.persistent and fault.nth < count))
        ]

    def _fail(self, fault: Fault, what: str) -> OSError:
        return OSError(fault.code, f"cannot {what}: {os.strerror(fault.code)} (injected)", self.path)

    async def _before(self, faults: list[Fault], what: str) -> None:
        for fault in faults:
            if fault.kind == "hold":
                fault.reached.set()
                await asyncio.to_thread(fault.gate.wait)
            elif fault.kind == "error":
                raise self._fail(fault, what)

    async def read(self, offset: int, out: torch.Tensor) -> None:
        """As the file below, with the planned faults."""
        faults = self._next("read")
        what = f"read {out.numel()} bytes at offset {offset}"
        await self._before(faults, what)
        for fault in faults:
            if fault.kind == "short":
                await self.inner.read(offset, out[: out.numel() // 2])
                raise self._fail(fault, what)
        await self.inner.read(offset, out)
        for fault in faults:
            if fault.kind == "corrupt" and out.numel():
                out[fault.at % out.numel()] ^= 0xFF

    async def write(self, offset: int, data: torch.Tensor) -> None:
        """As the file below, with the planned faults."""
        faults = self._next("write")
        what = f"write {data.numel()} bytes at offset {offset}"
        await self._before(faults, what)
        for fault in faults:
            if fault.kind == "short":
                await self.inner.write(offset, data[: data.numel() // 2])
                raise self._fail(fault, what)
            if fault.kind == "corrupt" and data.numel():
                data = data.clone()
                data[fault.at % data.numel()] ^= 0xFF
        await self.inner.write(offset, data)

    def size(self) -> int:
        """The size of the file below."""
        return self.inner.size()

    def truncate(self, nbytes: int) -> None:
        """Cut the file below."""
        self.inner.truncate(nbytes)

    def preallocate(self, nbytes: int) -> None:
        """As the file below, with the planned errors."""
        for fault in self._next("preallocate"):
            raise self._fail(fault, f"grow to {nbytes} bytes")
        self.inner.preallocate(nbytes)

    async def sync(self) -> None:
        """As the file below, with the planned faults."""
        await self._before(self._next("sync"), "make the file durable")
        await self.inner.sync()

    def close(self) -> None:
        """Close the file below."""
        self.inner.close()
