"""Files of others that are only read: bytes in place of pages in the page cache, and word when they change under us."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierzero.errors import StoreCorruptError
from tierzero.paging.malloc import mapped
from tierzero.tiers.base import aligned_empty, check_buffer, memory_of, settle
from tierzero.units.layout import PAGE, round_up

BLOCK = 2 << 20  # bytes of one request that goes through a bounce buffer
_SPARE = 4  # bounce buffers that are kept


@dataclass(frozen=True)
class Identity:
    """What a file was when it was opened; `path` is absolute, sizes are bytes."""

    path: str
    size: int
    mtime_ns: int
    device: int
    inode: int

    @classmethod
    def of(cls, path: str, found: os.stat_result) -> Identity:
        return cls(path, found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)

    def to_json(self) -> list[Any]:
        """For a manifest: without device and inode, which a copy with its times kept does not share."""
        return [self.path, self.size, self.mtime_ns]

    def same_contents(self, saved: list[Any]) -> bool:
        """Whether a file that was described as `saved` is, by all that is known, this one."""
        return [self.size, self.mtime_ns] == list(saved[1:])


class ReadOnlyFile:
    """`path` for reading, past the page cache where that is possible (`direct`); else its pages are given back at once.

    OSError naming the path if it cannot be opened, IsADirectoryError and OSError(EINVAL) for what is no regular file.
    Reads may run in several threads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct = -1
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", self.path)
            self.identity = Identity.of(self.path, found)
            self._direct = self._open_direct()
        except BaseException:
            os.close(self._fd)
            raise
        self.bytes_read = 0
        self._spare: list[torch.Tensor] = []  # bounce buffers that no read uses: fresh memory costs as much as a copy

    @property
    def direct(self) -> bool:
        return self._direct >= 0

    def _open_direct(self) -> int:
        if not hasattr(os, "O_DIRECT") or not self.identity.size:
            return -1
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return -1
        try:
            same = os.fstat(fd).st_ino == self.identity.inode
            if same and os.preadv(fd, [memory_of(aligned_empty(PAGE))], 0) > 0:
                return fd
        except OSError:
            pass  # some file systems take the flag and refuse the reads
        os.close(fd)
        return -1

    def check(self) -> None:
        """StoreCorruptError, naming the file, if it was written to since it was opened."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self.identity.size, self.identity.mtime_ns):
            raise StoreCorruptError(
                f"{self.path} was changed while it is in use ({now.st_size} bytes now, {self.identity.size} before): "
                "what was read from it cannot be trusted any more. Put the file back as it was and start again from "
                "the last checkpoint"
            )

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return Identity.of(self.path, found) == self.identity

    def read(self, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8[n], host) from byte `offset` on. EIO if the file ends before."""
        nbytes, at = check_buffer(out), 0
        memory = memory_of(out)
        if self.direct and offset % PAGE == 0 and out.data_ptr() % PAGE == 0:
            while nbytes - at >= PAGE and at % PAGE == 0:
                got = os.preadv(self._direct, [memory[at : nbytes // PAGE * PAGE]], offset + at)
                self.bytes_read += got
                if not got:
                    break
                at += got
        bounce = self._bounce() if self.direct and at < nbytes else None
        while at < nbytes:
            at += self._some(offset + at, memory[at:], bounce)
        if bounce is not None and len(self._spare) < _SPARE:
            self._spare.append(bounce)

    def _bounce(self) -> torch.Tensor:
        try:
            return self._spare.pop()
        except IndexError:
            with mapped():
                return aligned_empty(BLOCK + PAGE)

    def _some(self, offset: int, memory: memoryview, bounce: torch.Tensor | None) -> int:
        if bounce is None:
            got = os.preadv(self._fd, [memory[:BLOCK]], offset)
            if got and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, offset, got, os.POSIX_FADV_DONTNEED)
            done = got
        else:
            head = offset % PAGE
            wanted = min(round_up(head + len(memory), PAGE), bounce.numel())
            got = os.preadv(self._direct, [memory_of(bounce)[:wanted]], offset - head)
            done = max(0, min(got - head, len(memory)))
            memory[:done] = memory_of(bounce)[head : head + done]
        self.bytes_read += got
        if not done:
            raise OSError(errno.EIO, f"cannot read at offset {offset}: the file ends before", self.path)
        return done

    def view(self, offset: int, nbytes: int, scratch: torch.Tensor) -> torch.Tensor:
        """The bytes [offset, offset + nbytes) as a part of `scratch`, an aligned uint8 of two pages more; EIO if the
        file ends before.
        """
        head = offset % PAGE if self.direct else 0
        fd, at = (self._direct if self.direct else self._fd), 0
        wanted = round_up(head + nbytes, PAGE) if self.direct else nbytes
        memory = memory_of(scratch)
        while at < head + nbytes:
            got = os.preadv(fd, [memory[at:wanted]], offset - head + at)
            self.bytes_read += got
            at += got if got >= head + nbytes - at else got // PAGE * PAGE if self.direct else got
            if not got or (at < head + nbytes and self.direct and got % PAGE):
                raise OSError(errno.EIO, f"cannot read at offset {offset}: the file ends before", self.path)
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        return scratch[head : head + nbytes]

    async def read_async(self, offset: int, out: torch.Tensor) -> None:
        """`read` in a thread."""
        await settle(asyncio.ensure_future(asyncio.to_thread(self.read, offset, out)))

    def close(self) -> None:
        """Give up the file; harmless when closed."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1
        self._spare.clear()

    def __enter__(self) -> ReadOnlyFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def open_same(saved: list[Any]) -> ReadOnlyFile:
    """The file that `Identity.to_json` described; StoreCorruptError naming it if it is gone or another one."""
    path = saved[0]
    advice = "put it back as it was (with its time of change), or start again with tierzero.load()"
    try:
        file = ReadOnlyFile(path)
    except OSError as error:
        raise StoreCorruptError(
            f"{path}, from which the snapshot reads frozen parameters, cannot be opened ({error.strerror}): {advice}"
        ) from error
    if not file.identity.same_contents(saved):
        file.close()
        raise StoreCorruptError(
            f"{Path(path)}, from which the snapshot reads frozen parameters, was changed since: {advice}"
        )
    return file
