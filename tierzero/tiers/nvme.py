"""Block files through the native I/O engine, and the glue that makes its tickets awaitable."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tierzero.errors import StoreError
from tierzero.native import NATIVE
from tierzero.tiers.base import aligned_empty, check_buffer, settle
from tierzero.units.layout import PAGE, round_up


def _module() -> Any:
    if NATIVE is None:
        raise StoreError("the native I/O engine was not built: use the portable tier, or reinstall with a compiler")
    return NATIVE


class NativeEngine:
    """One `_native.Engine` with one asyncio loop.

    Note [tickets and futures]
    Completions wake the loop through the engine's eventfd; only the loop's thread reaps, so a ticket is registered
    before it can be reaped. A ticket that completed before anybody waited for it is found done by `wait`. The engine
    is attached to the loop of the first `wait`, and again when that loop was closed.
    """

    def __init__(
        self,
        kind: str = "auto",
        block: int = 4 << 20,
        depth: int = 32,
        deadline: float = 60.0,
        threads: int = 0,
        limit: int = 0,
    ) -> None:
        """kind: "uring", "pool" (threads doing pread and pwrite), or "auto": io_uring where it works, else the pool.
        block: bytes of one piece of a request. depth: pieces in flight per drive. deadline: seconds for one piece, then
        its request fails with ETIMEDOUT. threads: of the pool per drive, 0 for as many as `depth`, 16 at most. limit:
        bytes per second of each drive, reads and writes together; 0: none.
        """
        self.native = _module().Engine(
            kind=kind, block=block, depth=depth, threads=threads, deadline=deadline, limit=limit
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._waiting: dict[Any, asyncio.Future[Any]] = {}
        self._closed = False

    @property
    def name(self) -> str:
        """Which native engine it is."""
        return str(self.native.name)

    def attach(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Serve `loop` (the running one by default); from its own thread, or before it runs."""
        loop = loop or asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError(
                "this I/O engine already serves another event loop: detach() it there first, or use one engine per loop"
            )
        self._waiting.clear()  # their loop is gone, and nobody waits any more
        self._loop, self._thread = loop, threading.get_ident()
        loop.add_reader(self.native.eventfd, self._reap)

    def detach(self) -> None:
        """Stop serving the loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.native.eventfd)
        self._loop = None

    async def wait(self, ticket: Any) -> Any:
        """The result of any ticket of this engine (files' or Steppers'), or its OSError.

        Cancelling waits for the ticket first.
        """
        self.attach()
        self._thread = threading.get_ident()
        if ticket.done():
            return ticket.result()
        future = self._waiting.get(ticket)
        if future is None:
            future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        return await settle(future)

    def _reap(self) -> None:
        for ticket in self.native.reap():
            future = self._waiting.pop(ticket, None)
            if future is None or future.done():
                continue
            try:
                future.set_result(ticket.result())
            except Exception as error:
                future.set_exception(error)

    def register(self, buffer: torch.Tensor) -> bool:
        """Make uint8[n] known to the kernel, for cheaper requests in it; it must live until the engine is closed.

        False where that cannot be, which costs speed only.
        """
        return bool(self.native.register(buffer))

    def counters(self) -> dict[str, Any]:
        """Bytes and requests really transferred since the engine was made, padding included."""
        return dict(self.native.counters())

    def close(self) -> None:
        """Wait for what is under way, hand out the results, and stop. Harmless when closed."""
        if self._closed:
            return
        self._closed = True
        loop = self._loop
        if loop is not None and loop.is_running() and threading.get_ident() != self._thread:
            done = threading.Event()

            def stop() -> None:
                try:
                    self._close()
                finally:
                    done.set()

            loop.call_soon_threadsafe(stop)
            done.wait()
        else:
            self._close()

    def _close(self) -> None:
        loop = self._loop
        self.detach()
        pending = dict(self._waiting)
        self._waiting.clear()
        for ticket in pending:
            try:
                ticket.wait()
            except OSError:
                continue  # its result is handed out below
        self.native.close()
        if loop is None or loop.is_closed():
            return
        for ticket, future in pending.items():
            if not future.done():
                try:
                    future.set_result(ticket.result())
                except Exception as error:
                    future.set_exception(error)


class NativeFile:
    """See BlockFile.

    `native` is the `_native.File`, which Steppers take. Counts whole blocks, as they are transferred. Several paths are
    one file: member i has `weights[i]` of every sum(weights) stripes of `stripe` bytes.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        engine: NativeEngine,
        *,
        direct: bool = True,
        weights: Sequence[int] | None = None,
        stripe: int = 0,
    ) -> None:
        self.paths = [path] if isinstance(path, str) else list(path)
        self.path = self.paths[0]
        self.engine = engine
        if len(self.paths) == 1:
            self.native = _module().File(self.path, create=True, direct=direct)
        else:
            chosen = None if weights is None else list(weights)
            self.native = _module().File(self.paths, create=True, direct=direct, weights=chosen, stripe=stripe)
        self.alignment = int(self.native.alignment)
        self.direct = bool(self.native.direct)
        self.bytes_read = 0
        self.bytes_written = 0

    @property
    def busy_ns(self) -> tuple[int, int]:
        found = self.engine.counters()  # of all its files
        return int(found["read_ns"]), int(found["write_ns"])

    async def read(self, offset: int, out: torch.Tensor) -> None:
        nbytes = check_buffer(out)
        if nbytes == 0:
            return
        head = offset % self.alignment
        if head:
            # only pieces of a record start inside a block: read that block aside, the rest in place
            aside = aligned_empty(PAGE)
            await self._read(offset - head, aside[: min(head + nbytes, self.alignment)])
            count = min(nbytes, self.alignment - head)
            out[:count].copy_(aside[head : head + count])
            offset, out = offset + count, out[count:]
            if not out.numel():
                return
        await self._read(offset, out)

    async def _read(self, offset: int, out: torch.Tensor) -> None:
        await self.engine.wait(self.engine.native.read(self.native, offset, out.detach()))
        self.bytes_read += round_up(out.numel(), self.alignment)

    async def write(self, offset: int, data: torch.Tensor) -> None:
        if check_buffer(data) == 0:
            return
        await self.engine.wait(self.engine.native.write(self.native, offset, data.detach()))
        self.bytes_written += round_up(data.numel(), self.alignment)

    def size(self) -> int:
        return int(self.native.size())

    def truncate(self, nbytes: int) -> None:
        self.native.truncate(nbytes)

    def preallocate(self, nbytes: int) -> None:
        if nbytes > self.native.size():
            self.native.preallocate(nbytes)

    async def sync(self) -> None:
        # the native call releases the interpreter lock while it waits
        await settle(asyncio.ensure_future(asyncio.to_thread(self.native.sync)))

    def close(self) -> None:
        self.native.close()
