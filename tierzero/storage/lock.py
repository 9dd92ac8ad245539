"""The lock of a store directory: who holds it, and what a crashed run left.

Note [lock]
`flock` on the file `lock` says whether the holder lives: the kernel drops it however a process ends. The file's text,
one JSON object, says who that is. The file is removed when a store is closed, so a file that is present but not
locked was left by a crash. A forked child (a data loader's worker, say) shares the parent's lock and would keep it
after the parent's death, so children close it at once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from tierzero.errors import StoreBusyError, StoreError

_LATEST = 1e11  # seconds since the epoch; a later start is no date that can be printed


@dataclass(frozen=True)
class Holder:
    """The process that holds or held a store; `started` is seconds since the epoch.

    A pid of 0 means that the lock file did not say.
    """

    pid: int
    host: str
    started: float
    argv: tuple[str, ...]

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), time.time(), tuple(sys.orig_argv or sys.argv))

    @classmethod
    def parse(cls, text: bytes) -> Holder:
        """What the text of a lock file says; an unreadable one gives pid 0."""
        try:
            value = json.loads(text)
            holder = cls(
                int(value["pid"]),
                str(value["host"]),
                float(value["started"]),
                tuple(str(word) for word in value["argv"]),
            )
            if holder.pid > 0 and 0 <= holder.started < _LATEST:
                return holder
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            pass
        return cls(0, "", 0.0, ())

    def __str__(self) -> str:
        if not self.pid:
            return "an unknown process"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        command = " ".join(" ".join(self.argv).split())
        return f"pid {self.pid} on {self.host}, started {when}: {command[:200]}{'...' if len(command) > 200 else ''}"


class DirectoryLock:
    """Holds `directory`/lock. `stale` is the Holder that a crash left, or None. See Note [lock].

    Raises StoreBusyError naming the living holder, and StoreError if the file cannot be created or if no store wrote
    it; such a file is left as it is.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "lock")
        self.stale: Holder | None = None
        self._before = b""
        self._fd = self._acquire()
        self._owner = os.getpid()
        _held.add(self)

    def _acquire(self) -> int:
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                created = True
            except FileExistsError:
                created = False
                self._check_regular()
                try:
                    fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                except FileNotFoundError:
                    continue  # its holder closed the store in between
                except OSError as error:
                    raise self._refused(error) from error
            except OSError as error:
                raise self._refused(error) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._is_current(fd):
                    os.close(fd)
                    continue  # removed by its holder between open and flock
                self._before = os.pread(fd, 1 << 20, 0)
                if not created:
                    self.stale = self._left_by()
                self._write(fd, json.dumps(asdict(Holder.here())).encode())
                return fd
            except StoreError:
                os.close(fd)
                raise
            except OSError as error:
                try:
                    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                        holder = Holder.parse(os.pread(fd, 1 << 20, 0))
                        where = os.path.dirname(self.path)
                        if holder == replace(Holder.here(), started=holder.started):
                            raise StoreBusyError(
                                f"the store {where} is held by another model of this process: tierzero.close() that "
                                "one, or give this one a directory of its own"
                            ) from None
                        raise StoreBusyError(
                            f"the store {where} is held by a living process ({holder}): "
                            "stop that run, close its store, or give this one a directory of its own"
                        ) from None
                    raise self._refused(error) from error
                finally:
                    os.close(fd)

    def _refused(self, error: OSError) -> StoreError:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "Use a directory in which you may create files"
        else:
            advice = "Use a directory on a file system that supports flock and has space"
        return StoreError(f"cannot lock {self.path}: {error.strerror}. {advice}")

    def _left_by(self) -> Holder:
        """Who wrote the text that was there. StoreError if no store did."""
        holder = Holder.parse(self._before)
        # a crash may come before the text is written, and after a power failure it can be zeros
        if not holder.pid and self._before.strip(b"\0"):
            raise StoreError(
                f"{self.path} is a file that no store wrote, so it was left alone: move it away, or use another "
                "directory"
            )
        return holder

    def _check_regular(self) -> None:
        """StoreError for a lock that no store made: a link, a directory, a pipe."""
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode):
            raise StoreError(
                f"{self.path} is not a regular file, so no store made it: remove it, or use another directory"
            )

    def _is_current(self, fd: int) -> bool:
        try:
            there, here = os.stat(self.path), os.fstat(fd)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    @staticmethod
    def _write(fd: int, text: bytes) -> None:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text, 0)

    @property
    def held(self) -> bool:
        """Whether this process still holds the lock."""
        return self._fd >= 0 and self._owner == os.getpid()

    def release(self, *, remove: bool = True) -> None:
        """Give the lock up and remove its file; without `remove` the file stays, as a crash would leave it.

        Harmless when not held.
        """
        if not self.held:
            return
        _held.discard(self)
        fd, self._fd = self._fd, -1
        try:
            if remove and self._is_current(fd):
                os.unlink(self.path)  # while still locked, so that nobody can have opened it as theirs
        finally:
            os.close(fd)

    def give_back(self) -> None:
        """Undo the acquisition: what a crash had left is left again."""
        if self.held and self.stale is not None:
            self._write(self._fd, self._before)
            self.release(remove=False)
        else:
            self.release()


def living_holder(directory: str) -> Holder | None:
    """Who holds the store in `directory` now, None if nobody does. Changes nothing."""
    try:
        fd = os.open(os.path.join(directory, "lock"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given up at once
    except BlockingIOError:
        return Holder.parse(os.pread(fd, 1 << 20, 0))
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


class DirectoryLocks:
    """The locks of several directories as one: all of them are held, or none. See DirectoryLock."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._locks: list[DirectoryLock] = []
        try:
            for directory in directories:
                self._locks.append(DirectoryLock(directory))
        except BaseException:
            self.give_back()
            raise

    @property
    def stale(self) -> Holder | None:
        """Who held one of them when it crashed, or None."""
        return next((lock.stale for lock in self._locks if lock.stale is not None), None)

    @property
    def crashed(self) -> list[str]:
        """The directories whose lock says which store's process crashed there: what lies in them is a store's."""
        return [os.path.dirname(lock.path) for lock in self._locks if lock.stale is not None and lock.stale.pid]

    @property
    def held(self) -> bool:
        """Whether this process still holds them."""
        return all(lock.held for lock in self._locks)

    def release(self, *, remove: bool = True) -> None:
        """As DirectoryLock's, last first."""
        for lock in reversed(self._locks):
            lock.release(remove=remove)

    def give_back(self) -> None:
        """As DirectoryLock's, last first."""
        for lock in reversed(self._locks):
            lock.give_back()


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_held):
        if lock._fd >= 0:
            os.close(lock._fd)
            lock._fd = -1
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
