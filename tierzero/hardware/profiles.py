"""Measured drive profiles: what `tierzero bench nvme` found for a drive, kept for `offload` and `plan`.

One JSON file per file system, in a directory of the user's cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import tempfile
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tierzero.hardware.drives import existing_parent, mount_of

FORMAT = 1  # of the files; another number is another program's
_PAGE = 4096
_MOST: dict[str, float] = {"block": 1 << 30, "depth": 256}  # the engine's own limits
_MOST_RATE = 1e15  # bytes/s; no drive does a petabyte
_LONGEST = 1 << 16  # bytes of a file; a profile has less than one thousand


@dataclass(frozen=True)
class Profile:
    """The winning setting on a drive and its rates.

    device: the `drive_key`. path: the directory that was measured. when: ISO 8601, UTC. kernel: its release.
    engine: "uring" or "pool". block: bytes of a piece. depth: pieces in flight. read, write, mixed, sustained_write:
    bytes/s; mixed counts reads and writes going on at the same time, together.
    """

    device: str
    path: str
    when: str
    kernel: str
    engine: str
    block: int
    depth: int
    read: float
    write: float
    mixed: float
    sustained_write: float


def directory() -> Path:
    """Where profiles lie: $TIERZERO_PROFILES, or tierzero/nvme in $XDG_CACHE_HOME or in ~/.cache.

    FileNotFoundError where none is set and this user has no home directory, as in a container with a bare user id.
    """
    chosen = os.environ.get("TIERZERO_PROFILES", "")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG rules: a relative path there is to be ignored
    try:
        return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "tierzero" / "nvme"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home directory for drive profiles", "~") from None


def drive_key(path: str | os.PathLike[str]) -> str:
    """What identifies the file system of `path`, or of its nearest existing parent: "source type major:minor"."""
    device = os.stat(existing_parent(path)).st_dev
    mount = mount_of(path)
    source, kind = ("unknown", "unknown") if mount is None else (mount.source, mount.fs_type)
    return f"{source} {kind} {os.major(device)}:{os.minor(device)}"


def file_of(key: str) -> Path:
    """The file of the drive with that key."""
    return directory() / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:24]}.json"


def load(path: str | os.PathLike[str]) -> Profile | None:
    """The profile of the drive under `path`; None, with one warning, where the file of it is damaged or foreign.

    None without a warning where there is no such file, nor a place for one.
    """
    try:
        key = drive_key(path)
        file = file_of(key)
    except OSError:
        return None
    try:
        text = _read(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        _ignore(file, error.strerror or str(error))
        return None
    try:
        profile = _parse(json.loads(text))
    except RecursionError:
        _ignore(file, "not a drive profile")
        return None
    except ValueError as error:
        _ignore(file, str(error))
        return None
    if profile.device != key:
        _ignore(file, f"it is of the drive {profile.device}")
        return None
    return profile


def _read(file: Path) -> bytes:
    """What is in it. OSError for what is no file, too."""
    handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not make it wait
    try:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        return os.read(handle, _LONGEST)
    finally:
        os.close(handle)


def _ignore(file: Path, why: str) -> None:
    warnings.warn(
        f"the drive profile {file} is ignored ({why}): measure again with `tierzero bench nvme`, or delete it",
        RuntimeWarning,
        stacklevel=3,
    )


def _parse(data: Any) -> Profile:
    """ValueError with a clause for anything that is not a profile."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("not a drive profile of this version")
    values: dict[str, Any] = {}
    for field in fields(Profile):
        value: Any = data.get(field.name)
        if field.type == "str":
            good = isinstance(value, str)
        else:
            number = isinstance(value, int if field.type == "int" else int | float) and not isinstance(value, bool)
            good = number and 0 < value <= _MOST.get(field.name, _MOST_RATE)
        if not good:
            raise ValueError(f"{field.name} is {repr(value)[:80]}")
        values[field.name] = float(value) if field.type == "float" else value
    if values["engine"] not in ("uring", "pool"):
        raise ValueError(f"engine is {values['engine']!r}")
    if values["block"] % _PAGE:
        raise ValueError(f"block is {values['block']}")
    return Profile(**values)


def save(profile: Profile) -> Path:
    """Write it over the drive's former one, whole or not at all; returns the file. OSError names the path."""
    file = file_of(profile.device)
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".profile-")
    try:
        with os.fdopen(handle, "w") as out:
            json.dump({"format": FORMAT, **asdict(profile)}, out, indent=1)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, file)
    except BaseException as error:
        with suppress(FileNotFoundError):  # interrupted behind the replacing
            os.unlink(name)
        if isinstance(error, OSError) and error.filename is None:  # a write tells only its descriptor
            error.filename = str(file)
        raise
    return file
