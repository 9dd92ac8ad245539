"""The exceptions that tierzero raises; failures of the operating system are ``OSError(errno, sentence, path)``."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a drive, a quota or a file that can hold no more


class TierzeroError(RuntimeError):
    """The base of every error that tierzero itself raises."""


class BudgetError(TierzeroError):
    """A byte budget is too small for what was asked of it; the message names the bytes needed."""


class StoreError(TierzeroError):
    """A store directory cannot be used as asked; the message names the path and what to do."""


class StoreBusyError(StoreError):
    """The store is held by a living process; the message names its pid and command."""


class StoreCorruptError(StoreError):
    """A manifest or record on disk is not what was written; nothing was deleted."""


class PagedOutError(TierzeroError):
    """A parameter at rest was used outside its unit; the message names it and ``unsharded``."""


class ConfigError(TierzeroError, ValueError):
    """A setting is unknown, inapplicable or out of range; the message names it."""


class NonFiniteGradientError(TierzeroError):
    """Too many steps in a row were skipped because a gradient was infinite or not a number."""


def describe(error: Exception) -> str:
    """The error's sentence; an operating-system error names its path even where its text does not."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    path = f"{error.filename}: " if error.filename and str(error.filename) not in str(error.strerror) else ""
    return f"{path}{error.strerror} [errno {error.errno}]"


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """An OSError inside that names no file, as those of writing do not, names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
