"""Where a checkpoint is written: beside its name first, under its name when it is whole; and what goes away then.

Note [names beside]
A checkpoint is written into `.NAME.tierzero-DIGITS` beside its target, and one that is deleted gets such a
name first, so that a directory without one is whole. Whoever has such a directory in use holds a lock (flock) on it,
which the system takes away with the process. The next save removes those that nobody holds and that contain nothing but
a checkpoint's files; everything else is left alone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from tierzero.checkpoint.index import INDEX, METADATA, OURS, read_head, read_index
from tierzero.errors import StoreError, TierzeroError, naming
from tierzero.sizes import format_size
from tierzero.storage.manifest import sync_directory

log = logging.getLogger("tierzero")

_BESIDE = re.compile(r"\.(.+)\.tierzero-[0-9a-f]{16}")
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD


class Place:
    """A new directory beside `target`, locked until `close`."""

    def __init__(self, target: Path, overwrite: bool) -> None:
        self.target = target
        self.overwrite = overwrite
        self.check()
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        self._published = False
        self.path, self._lock = _locked_beside(target)

    def check(self) -> None:
        """StoreError if the target may not be written."""
        target = self.target
        if not os.path.lexists(target) or (_is_directory(target) and not any(target.iterdir())):
            return
        if not _is_checkpoint(target):
            damaged = os.path.lexists(target / INDEX)
            what = f"its {INDEX} cannot be read" if damaged else "is no checkpoint of tierzero"
            do = "move it away, or save" if damaged else "save"
            raise StoreError(f"{target} is there and {what}, so it is not replaced: {do} to another path")
        if not self.overwrite:
            raise StoreError(
                f"there is a checkpoint in {target} already: save to another path, or give overwrite=True to replace it"
            )
        others = strange(target)
        if others:
            raise StoreError(
                f"the checkpoint in {target} is not replaced: its directory contains {others[0]}, which no save has "
                "written. Move that away, or save to another path"
            )

    def check_space(self, nbytes: int) -> None:
        """OSError(ENOSPC) if the drive has no room for `nbytes`."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise OSError(
                errno.ENOSPC,
                f"the checkpoint needs {format_size(nbytes)} and {format_size(free)} is free, "
                f"{format_size(nbytes - free)} too little: delete old checkpoints or save to another drive. Nothing "
                "was changed",
                str(self.target),
            )

    def publish(self) -> None:
        """Give the directory its name, which is durable then; a checkpoint of that name goes away."""
        sync_directory(str(self.path))
        self.check()
        old = None
        if _is_checkpoint(self.target):
            old = _swap(self.path, self.target)
        else:
            try:
                os.rename(self.path, self.target)
            except OSError:
                self.check()  # another save may have been faster
                raise
        self._published = True
        sync_directory(str(self.target.parent))
        if old is not None:
            try:
                remove(old)
            except OSError as error:  # the new one is there
                log.warning("%s could not be removed: %s", old, error)

    def close(self) -> None:
        """Give up the lock, and what was not published. Harmless when closed."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        try:
            if not self._published:
                remove(self.path)
        finally:
            os.close(lock)


def next_sequence(parent: Path) -> int:
    """One more than the last checkpoint in `parent` has."""
    return 1 + max((number for number, _ in checkpoints_in(parent)), default=0)


def checkpoints_in(parent: Path, run: str | None = None) -> list[tuple[int, Path]]:
    """(sequence, directory) of the checkpoints in `parent`, oldest first; with `run`, of that run's."""
    found = []
    for path in parent.iterdir():
        if not _BESIDE.fullmatch(path.name) and _is_directory(path):
            with suppress(OSError):  # one that goes away meanwhile, or is no business of ours
                head = read_head(path)
                if head is not None and run in (None, head.get("run")):
                    number = head.get("sequence")
                    found.append((number if type(number) is int else 0, path))
    return sorted(found)


def unreadable_in(parent: Path) -> list[Path]:
    """The directories in `parent` with a checkpoint's files and no index that can be read, so that it is not known
    whose they are.
    """
    found = []
    for path in sorted(parent.iterdir()):
        if not _BESIDE.fullmatch(path.name) and _is_directory(path):
            try:
                if read_head(path) is None and any(os.path.lexists(path / name) for name in OURS):
                    found.append(path)
            except FileNotFoundError:
                continue  # it goes away meanwhile
            except OSError:
                found.append(path)
    return found


def unfinished_in(parent: Path) -> list[Path]:
    """What saves into `parent` have left that were cut short, or write just now; see Note [names beside]."""
    return [path for path in sorted(parent.iterdir()) if _BESIDE.fullmatch(path.name) and _is_directory(path)]


def check_not_above(directory: Path) -> None:
    """TierzeroError naming the checkpoints in `directory`, if it holds some, which one of them was meant by."""
    inside = [path.name for _, path in checkpoints_in(directory)] if directory.is_dir() else []
    if inside:
        raise TierzeroError(
            f"{directory} is no checkpoint, but contains some: name one of {', '.join(inside[-4:])} (the last is the "
            "youngest)"
        )


def prune(parent: Path, keep: int, run: str) -> None:
    """Delete all but the last `keep` checkpoints of `run` in `parent`. One with files of somebody else is kept, and
    said so.
    """
    for _, path in checkpoints_in(parent, run)[:-keep]:
        try:
            others = strange(path)
            if not others:
                discard(path)
        except FileNotFoundError:
            continue  # another process has deleted it
        except OSError as error:  # what was saved is there all the same
            log.warning("%s could not be deleted: %s", path, error)
            continue
        if others:
            log.warning("%s is not deleted: it contains %s, which no save has written", path, others[0])


def sweep(parent: Path) -> None:
    """Remove what saves have left in `parent` that were cut short; see Note [names beside]. A whole one whose name is
    free gets its name: it was about to.
    """
    for path in sorted(parent.iterdir()):
        match = _BESIDE.fullmatch(path.name)
        if match is None or not _is_directory(path):
            continue
        try:
            _sweep_one(path, parent / match[1])
        except (BlockingIOError, FileNotFoundError):
            continue  # a save that goes on, or somebody else was faster
        except OSError as error:
            log.warning("%s, which a save has left, could not be removed: %s", path, error)


def _sweep_one(path: Path, named: Path) -> None:
    if strange(path):
        return
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _leads_to(path, lock):
            return  # published, or swept by another process, since it was listed
        if _is_whole(path) and not os.path.lexists(named):
            os.rename(path, named)
        else:
            remove(path)
    finally:
        os.close(lock)


def _leads_to(path: Path, fd: int) -> bool:
    """Whether the directory that is open as `fd` is still at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _locked_beside(target: Path) -> tuple[Path, int]:
    """A new directory beside `target`, and the lock on it."""
    while True:
        path = _beside(target)
        try:
            path.mkdir()
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise OSError(
                    error.errno,
                    "the name is too long: while it is written, a checkpoint's is 27 bytes longer. Use a shorter one",
                    str(target),
                ) from None
            raise
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # a sweep has taken it for one that was left
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _leads_to(path, lock):
                return path, lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def written_beside(path: Path) -> str | None:
    """The name that a directory is to get, or had; None if it is no such one. See Note [names beside]."""
    match = _BESIDE.fullmatch(path.name)
    return match[1] if match is not None else None


def discard(path: Path) -> None:
    """Delete a whole checkpoint so that whatever happens it is there or not."""
    gone = _beside(path)
    os.rename(path, gone)
    remove(gone)


def remove(path: Path) -> None:
    """Delete a checkpoint's directory, its index first, so that no part of it is ever taken for a whole one."""
    for name in (INDEX, *sorted(OURS - {INDEX})):
        with suppress(FileNotFoundError):
            (path / name).unlink()
    with suppress(FileNotFoundError):  # another process does the same
        path.rmdir()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tierzero-{secrets.token_hex(8)}")


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_checkpoint(path: Path) -> bool:
    return _is_directory(path) and read_head(path) is not None


def _is_whole(path: Path) -> bool:
    try:
        read_index(path)
    except (OSError, TierzeroError):
        return False
    return (path / METADATA).is_file()


def strange(path: Path) -> list[str]:
    """The names in a directory that no checkpoint has."""
    return sorted(one.name for one in path.iterdir() if one.name not in OURS or one.is_symlink() or not one.is_file())


def _swap(new: Path, target: Path) -> Path:
    """Put `new` in the place of `target`; where that one is now."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        one, other = os.fsencode(new), os.fsencode(target)
        if libc.renameat2(_HERE, one, _HERE, other, ctypes.c_uint(_EXCHANGE)) == 0:
            return new
    old = _beside(target)  # `sweep` puts it back if this is cut short
    os.rename(target, old)
    os.rename(new, target)
    return old


def write_durably(path: Path, data: bytes) -> None:
    """A new file with these bytes, on the drive when it returns."""
    with naming(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def named_full(error: BaseException, path: Path) -> BaseException:
    """`error`, or for a full disk one that says which checkpoint was not written."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename != str(path):
        return OSError(
            error.errno,
            f"the drive is full, so the checkpoint was not written ({error.strerror}); earlier ones are as they were. "
            "Delete old ones or save to another drive",
            str(path),
        )
    return error
