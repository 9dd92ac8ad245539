"""O_DIRECT on a path: really tried, with the alignment that it takes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from tierzero.bench.scratch import nameless
from tierzero.doctor.finding import Finding

_AT_FDCWD, _STATX_DIOALIGN = -100, 0x2000
_STATX_BYTES, _MASK_AT, _MEMORY_AT, _OFFSET_AT = 256, 0, 152, 156  # struct statx
_PAGE = 4096
_TRIED = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Direct:
    """`error`: why O_DIRECT does not work, None if it does. `unwritable`: not even a plain file could be written.
    Alignments in bytes, 0 where unknown; `told` by the kernel or found by trying. `ignored`: the kernel says that the
    flag is accepted without effect.
    """

    error: OSError | None
    unwritable: bool = False
    memory: int = 0
    offset: int = 0
    told: bool = False
    ignored: bool = False


def try_direct(folder: Path) -> Direct:
    """Write and read a file of 8 KiB in `folder` that has no name, so that nothing is left however this ends."""
    try:
        handle = nameless(folder)
    except OSError as error:
        return Direct(error, unwritable=True)
    try:
        try:
            os.posix_fallocate(handle, 0, 2 * _PAGE)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return Direct(error, unwritable=True)
        name = f"/proc/self/fd/{handle}"
        told = dio_align(name)
        offset = _round_trips(name)
        if told is None:
            return Direct(None, offset=offset)
        return Direct(None, False, told[0], told[1] or offset, told=True, ignored=told[1] == 0)
    except OSError as error:
        return Direct(error)
    finally:
        os.close(handle)


def _round_trips(name: str) -> int:
    """The smallest block that is written and read back right; OSError if not even a page is."""
    smallest = 0
    handle = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _PAGE) as out, mmap.mmap(-1, _PAGE) as back:
            for nbytes in reversed(_TRIED):
                pattern = os.urandom(nbytes)
                out[:nbytes] = pattern
                try:
                    with memoryview(out)[:nbytes] as source, memoryview(back)[:nbytes] as target:
                        written = os.pwrite(handle, source, nbytes)
                        got = os.preadv(handle, [target], nbytes)
                except OSError:
                    if nbytes == _PAGE:
                        raise
                    break
                if written != nbytes or got != nbytes or back[:nbytes] != pattern:
                    if nbytes == _PAGE:
                        raise OSError(errno.EIO, "what was written with O_DIRECT came back wrong", name)
                    break
                smallest = nbytes
    finally:
        os.close(handle)
    return smallest


def dio_align(name: str) -> tuple[int, int] | None:
    """(memory, offset) alignment in bytes as statx tells them, (0, 0) for a file that is always cached; None where
    kernel, file system or C library do not tell.
    """
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        status = ctypes.CDLL(None, use_errno=True).statx(
            _AT_FDCWD, os.fsencode(name), 0, ctypes.c_uint(_STATX_DIOALIGN), buffer
        )
    except AttributeError:
        return None

    def number(at: int) -> int:
        return ctypes.c_uint32.from_buffer(buffer, at).value

    if status != 0 or not number(_MASK_AT) & _STATX_DIOALIGN:
        return None
    return number(_MEMORY_AT), number(_OFFSET_AT)


def finding(direct: Direct, path: str) -> Finding:
    """What it means."""
    facts = {
        "works": direct.error is None,
        "memory_alignment": direct.memory,
        "offset_alignment": direct.offset,
        "told_by_statx": direct.told,
        "ignored": direct.ignored,
        "error": None if direct.error is None else str(direct.error),
    }
    if direct.error is None and direct.ignored:
        advice = "the file system caches these files all the same (data=journal, encryption, ...): use another mount"
        return Finding("O_DIRECT", "accepted, but not used (statx)", "warn", advice, path, facts)
    if direct.error is None:
        memory = f", memory {direct.memory}" if direct.memory else ""
        source = "statx" if direct.told else "tried"
        value = f"works; offsets to {direct.offset} bytes{memory} ({source})"
        if direct.offset > _PAGE or direct.memory > _PAGE:
            advice = "it wants more than the 4096 bytes that tierzero aligns to, so I/O falls back to the page cache"
            return Finding("O_DIRECT", value, "warn", advice, path, facts)
        return Finding("O_DIRECT", value, path=path, facts=facts)
    reason = direct.error.strerror or str(direct.error)
    if direct.unwritable:
        return Finding("O_DIRECT", f"not tried: {reason}", "note", "see writable", path, facts)
    advice = "I/O goes through the page cache, which copies and takes memory: use ext4 or xfs on a local drive"
    return Finding("O_DIRECT", f"refused: {reason}", "warn", advice, path, facts)
