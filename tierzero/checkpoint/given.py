"""Paths as callers give them."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def path_of(path: str | os.PathLike[str], what: str) -> Path:
    """Where `what` is or goes, as it was given. ValueError for what names nothing: Path("") would be the current
    directory. FileNotFoundError for a relative path where there is no current directory any more.
    """
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise ValueError(f"{text!r} cannot name {what}: give its path, '.' for the current directory")
    if not os.path.isabs(text):
        try:
            os.getcwd()
        except FileNotFoundError:
            raise FileNotFoundError(
                errno.ENOENT,
                f"the current directory was removed: give an absolute path of {what}, or go to another",
                text,
            ) from None
    return Path(text)
