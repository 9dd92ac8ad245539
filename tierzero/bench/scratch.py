"""The file that a drive is measured on: new, nameless as soon as it is open, and as large as the drive has room for."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tierzero.errors import ConfigError, TierzeroError
from tierzero.native import NATIVE
from tierzero.sizes import format_size
from tierzero.storage.stripes import STRIPE

UNIT = 1 << 21  # sizes are multiples of this
MINIMUM = 32 << 20  # bytes below which nothing useful is measured
_SHARE = 0.9  # of the free space, at most: others write there too


def native() -> Any:
    """The extension. TierzeroError without it."""
    if NATIVE is None:
        raise TierzeroError(
            "the native I/O engine was not built, and it is what is measured: reinstall tierzero with a C++ compiler"
        )
    return NATIVE


def check_directory(path: Path) -> None:
    """ConfigError unless `path` is a directory."""
    if not path.exists():
        raise ConfigError(
            f"there is no directory {path}: give the one that the model's store is to lie in, or make it (mkdir -p)"
        )
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory: give a directory on the drive, never a file or a device")


def answer(path: str) -> Iterator[dict[str, Any]]:
    """In a child: write a page on the drive and say so. Whatever else is wrong there shows when it is measured."""
    fd = nameless(Path(path))
    try:
        os.pwrite(fd, bytes(4096), 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    yield {"what": "answer"}


def fit(paths: Sequence[Path], size: int, weights: Sequence[int]) -> tuple[int, str]:
    """Bytes that fit over the directories of `paths`, shared out by `weights`, and a note if that is not `size`.

    OSError(ENOSPC) below the minimum.
    """
    devices = [os.stat(path).st_dev for path in paths]
    chosen, note = size, ""
    for path, device in zip(paths, devices, strict=True):
        here = sum(weight for weight, other in zip(weights, devices, strict=True) if other == device)
        free = shutil.disk_usage(path).free
        room = int(free * _SHARE * sum(weights) / here) // UNIT * UNIT
        if room < MINIMUM:
            least = int(MINIMUM / _SHARE * here / sum(weights)) + UNIT
            raise OSError(
                errno.ENOSPC,
                f"no room to measure: at least {format_size(least)} must be free and the drive has "
                f"{format_size(free)}. Free some space or give another directory",
                str(path),
            )
        if room < chosen:
            chosen = room
            note = f"{path}: measured with {format_size(room)}, as only {format_size(free)} are free"
    return chosen, note


class Scratch:
    """One file on each directory of `paths`, as one logical file of `size` bytes; a context manager.

    The files have no names (where a file system cannot make such, the names are gone at once), so that nothing is left
    behind however the process ends. `file` is the
    `_native.File`; `fd_paths` are names by which other processes can open the members while this one lives.
    """

    def __init__(self, paths: Sequence[Path], size: int, weights: Sequence[int] = (1,)) -> None:
        self.size = size
        self._fds: list[int] = []
        self.file: Any = None
        try:
            for path in paths:
                self._fds.append(nameless(path))
            striped = {} if len(paths) == 1 else {"weights": list(weights), "stripe": STRIPE}
            names = self.fd_paths
            self.file = native().File(names if striped else names[0], create=False, **striped)
            self.file.preallocate(size)
        except OSError as error:
            number = names.index(error.filename) if error.filename in (names := self.fd_paths) else 0
            self.close()
            raise OSError(error.errno, error.strerror, str(paths[number])) from error
        except BaseException:
            self.close()
            raise

    @property
    def fd_paths(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    def forget_cached(self) -> None:
        """Let the page cache go, so that reads come from the drive; nothing to do for direct I/O."""
        for fd in self._fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def nameless(directory: Path) -> int:
    """The descriptor of a new file without a name in `directory`."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    name = directory / f".tierzero-bench-{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)  # O_EXCL: what has this name already is somebody's
    os.unlink(name)
    return fd
