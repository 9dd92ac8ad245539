"""One file written from beginning to end in large aligned blocks, past the page cache where that is possible."""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from tierzero.errors import naming
from tierzero.paging.malloc import mapped
from tierzero.tiers.base import aligned_empty, memory_of
from tierzero.units.layout import PAGE

BLOCK = 4 << 20  # bytes of one write; there are two of them


class SequentialFile:
    """A new file at `path`. Write, then `finish`; without that nothing of it is kept.

    One block is filled while the one before it is written. OSError names the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self._direct = self._open_direct()
        with mapped():
            self._blocks = [aligned_empty(BLOCK), aligned_empty(BLOCK)]
        self._filled = 0
        self._at = 0  # where the block that is being filled goes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierzero-export")
        self._writing: Future[None] | None = None
        self._finished = False

    def _open_direct(self) -> int:
        try:
            return os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (OSError, AttributeError):
            return -1

    def write(self, data: torch.Tensor) -> None:
        """Append uint8[n]."""
        at = 0
        while at < data.numel():
            count = min(BLOCK - self._filled, data.numel() - at)
            self._blocks[0][self._filled : self._filled + count].copy_(data[at : at + count])
            self._filled, at = self._filled + count, at + count
            if self._filled == BLOCK:
                self._turn()

    def _turn(self) -> None:
        """Begin to write what is filled, once the block before it is done."""
        self._settle()
        block, count, at = self._blocks[0], self._filled, self._at
        self._blocks.reverse()
        self._filled, self._at = 0, at + count
        self._writing = self._thread.submit(self._put, block, count, at)

    def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            with naming(self.path):
                writing.result()

    def _put(self, block: torch.Tensor, count: int, at: int) -> None:
        memory = memory_of(block)[:count]
        while memory:
            fd, part = self._fd, memory
            if self._direct >= 0 and at % PAGE == 0 and len(memory) >= PAGE:
                fd, part = self._direct, memory[: len(memory) // PAGE * PAGE]
            try:
                put = os.pwrite(fd, part, at)
            except OSError as error:
                if fd != self._direct or error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)  # this file system takes the flag and refuses the write
                self._direct = -1
                continue
            memory, at = memory[put:], at + put

    def finish(self) -> None:
        """Write the rest; durable when it returns."""
        if self._filled:
            self._turn()
        self._settle()
        with naming(self.path):
            os.fsync(self._fd)
        if self._direct < 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._finished = True

    def __enter__(self) -> SequentialFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown()
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        if not self._finished:
            self.path.unlink(missing_ok=True)
