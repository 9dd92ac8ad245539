"""A block file on any operating system: buffered I/O through aiofiles, on the event loop's thread pool."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import aiofiles
import torch

from tierzero.monitoring.clock import Busy
from tierzero.pace import Pacer
from tierzero.sizes import format_size
from tierzero.tiers.base import memory_of, settle

_IDLE = 8  # handles kept open between operations


class PortableFile:
    """See BlockFile. Every operation has a handle of its own, because a handle has one position; idle ones are kept.

    limit: bytes per second, reads and writes together; 0: none.
    """

    alignment = 1

    def __init__(self, path: str, limit: int = 0) -> None:
        self.path = path
        self.paths = [path]
        self.bytes_read = 0
        self.bytes_written = 0
        self._reading, self._writing = Busy(), Busy()
        self._idle: list[Any] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that the idle handles belong to
        self._closed = False
        self._pacer = Pacer(limit) if limit else None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @property
    def busy_ns(self) -> tuple[int, int]:
        return self._reading.total, self._writing.total

    async def read(self, offset: int, out: torch.Tensor) -> None:
        memory = memory_of(out)
        with self._reading:
            await self._pace(len(memory))
            await settle(asyncio.ensure_future(self._read(offset, memory)))
        self.bytes_read += len(memory)

    async def write(self, offset: int, data: torch.Tensor) -> None:
        memory = memory_of(data)
        with self._writing:
            await self._pace(len(memory))
            await settle(asyncio.ensure_future(self._write(offset, memory)))
        self.bytes_written += len(memory)

    async def _pace(self, nbytes: int) -> None:
        if self._pacer is not None and nbytes:
            await self._pacer.pace(nbytes)

    async def _read(self, offset: int, memory: memoryview) -> None:
        at = offset

        async def step(handle: Any) -> None:
            nonlocal at
            await handle.seek(offset)
            while at < offset + len(memory):
                count = await handle.readinto(memory[at - offset :])
                if not count:
                    raise OSError(errno.EIO, f"the file ends at {at}")
                at += count

        await self._with_handle("read", offset, len(memory), step)

    async def _write(self, offset: int, memory: memoryview) -> None:
        at = offset

        async def step(handle: Any) -> None:
            nonlocal at
            await handle.seek(offset)
            while at < offset + len(memory):
                count = await handle.write(memory[at - offset :])
                if not count:
                    raise OSError(errno.EIO, f"nothing was written at {at}")
                at += count

        await self._with_handle("write", offset, len(memory), step)

    async def _with_handle(self, what: str, offset: int, nbytes: int, step: Any) -> None:
        if offset < 0:
            raise ValueError(f"cannot {what} at the negative offset {offset} of {self.path}")
        if self._closed:
            raise OSError(
                errno.EBADF, f"cannot {what} {nbytes} bytes at offset {offset}: the file was closed", self.path
            )
        handle = None
        try:
            handle = self._take() or await aiofiles.open(self.path, "r+b", buffering=0)
            await step(handle)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot {what} {nbytes} bytes at offset {offset}: {error.strerror}", self.path
            ) from error
        finally:
            if handle is not None:
                if self._closed or len(self._idle) >= _IDLE or self._loop is not asyncio.get_running_loop():
                    await handle.close()
                else:
                    self._idle.append(handle)

    def _take(self) -> Any:
        """An idle handle of this loop, or None; aiofiles binds each handle to the loop that opened it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._drop_idle()
            self._loop = loop
        return self._idle.pop() if self._idle else None

    def _drop_idle(self) -> None:
        for handle in self._idle:
            handle._file.close()  # the plain file below: this must work without a loop
        self._idle.clear()

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)

    def preallocate(self, nbytes: int) -> None:
        before = os.fstat(self._fd).st_size
        if nbytes <= before:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(self._fd, before, nbytes - before)
                    return
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                        raise
            os.ftruncate(self._fd, nbytes)
        except OSError as error:
            os.ftruncate(self._fd, before)
            raise OSError(
                error.errno,
                f"cannot grow the file from {format_size(before)} to {format_size(nbytes)}: {error.strerror}",
                self.path,
            ) from error

    async def sync(self) -> None:
        try:
            await settle(asyncio.ensure_future(asyncio.to_thread(os.fdatasync, self._fd)))
        except OSError as error:
            raise OSError(error.errno, f"cannot make the file durable: {error.strerror}", self.path) from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._drop_idle()
        os.close(self._fd)
