"""What a single value of the configuration may be: each returns it, or raises ValueError with the rest of a sentence
that begins with the key.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from tierzero.sizes import parse_rate, parse_size


def path(value: Any) -> Any:
    if not isinstance(value, str | Path):
        raise ValueError(f"must be a path, got {value!r}")
    if not str(value).strip():
        raise ValueError("must not be empty")
    if "\0" in str(value):
        raise ValueError(f"must be a path, and none has a NUL in it, got {value!r}")
    try:
        found = Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"{str(value)!r} starts at a home directory that cannot be told: write it out") from None
    try:
        os.stat(found)
    except OSError as error:  # most are met where the path is used
        if error.errno == errno.ELOOP:
            raise ValueError(f"{str(value)!r} leads around in symbolic links: name another path") from None
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"{str(value)[:80]!r}... is too long for a path") from None
    return found


def size(value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else value
    parse_size(text, of=1 << 40)  # only the form is checked here: what a share is of comes later
    return text


def size_or_auto(value: Any) -> Any:
    return "auto" if value == "auto" else size(value)


def depth(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f'must be "auto" or a whole number >= 0, got {value!r}')
    return value


def threads(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 256):
        raise ValueError(f'must be "auto" or a whole number from 1 to 256, got {value!r}')
    return value


def paths(value: Any) -> Any:
    if not isinstance(value, list):
        return [path(value)]
    if not value:
        raise ValueError("must name at least one directory, got []")
    return [path(one) for one in value]


def rating(value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else value
    if not parse_size(text):
        raise ValueError(f"must be more than zero bytes, got {value!r}")
    return text


def limit(value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else value
    parse_rate(text)
    return text


def block(value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else value
    nbytes = parse_size(text)
    if not 0 < nbytes <= 1 << 30 or nbytes % 4096:
        raise ValueError(f"must be a multiple of 4096 bytes up to 1 GiB, got {value!r}")
    return text
