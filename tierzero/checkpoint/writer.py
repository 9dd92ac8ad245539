"""One new file in large aligned blocks, past the page cache where that is possible: some are filled, others written."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from tierzero.errors import naming
from tierzero.paging.malloc import mapped
from tierzero.storage.blocks import WINDOW, in_window
from tierzero.tiers.base import aligned_empty, memory_of, settle
from tierzero.units.layout import PAGE

BLOCK = 4 << 20  # bytes of one write; there are WINDOW of them
Fill = Callable[[int, torch.Tensor], Awaitable[None]]  # uint8[n] with the file's bytes from a multiple of BLOCK on


async def write_file(path: Path, nbytes: int, fill: Fill) -> None:
    """A new file of `nbytes` at `path`, durable when it returns; after an error nothing of it is kept. OSError of
    writing names the path. FileExistsError if there is one.
    """
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        file = _File(path, fd)
        try:
            with ThreadPoolExecutor(WINDOW, thread_name_prefix="tierzero-export") as pool:
                await _write(file, pool, nbytes, fill)
        finally:
            file.close()
    except BaseException:
        path.unlink(missing_ok=True)
        raise


async def _write(file: _File, pool: ThreadPoolExecutor, nbytes: int, fill: Fill) -> None:
    loop, starts = asyncio.get_running_loop(), range(0, nbytes, BLOCK)
    with mapped():
        blocks = [aligned_empty(min(BLOCK, nbytes)) for _ in starts[:WINDOW]]

    async def one(number: int) -> None:
        at = starts[number]
        block = blocks[number % WINDOW][: min(BLOCK, nbytes - at)]
        await fill(at, block)
        await settle(loop.run_in_executor(pool, file.put, memory_of(block), at))

    with naming(file.path):
        await settle(loop.run_in_executor(pool, file.preallocate, nbytes))
        await in_window(len(starts), one)
        await settle(loop.run_in_executor(pool, file.finish))


class _File:
    """`fd` for what direct I/O does not take, and the same file for the rest. Several threads may put."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._direct = -1
        self._refused = False
        with suppress(OSError, AttributeError):
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)

    def preallocate(self, nbytes: int) -> None:
        """Have room for all of it: blocks that lengthen a file are written one by one."""
        if nbytes > BLOCK and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
                    raise

    def put(self, memory: memoryview, at: int) -> None:
        """Write all of it from byte `at` on."""
        while memory:
            fd, part = self._fd, memory
            if self._direct >= 0 and not self._refused and at % PAGE == 0 and len(memory) >= PAGE:
                fd, part = self._direct, memory[: len(memory) // PAGE * PAGE]
            try:
                put = os.pwrite(fd, part, at)
            except OSError as error:
                if fd != self._direct or error.errno != errno.EINVAL:
                    raise
                self._refused = True  # this file system takes the flag and refuses the write
                continue
            memory, at = memory[put:], at + put

    def finish(self) -> None:
        """Make it durable."""
        os.fsync(self._fd)
        if (self._direct < 0 or self._refused) and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
