"""The directories of a store: making them, judging what lies in them, and deleting only what a store wrote."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from tierzero.errors import ConfigError, StoreCorruptError, StoreError
from tierzero.storage import manifest as manifests
from tierzero.storage import members
from tierzero.storage.manifest import Manifest
from tierzero.storage.stripes import shortest


def listed(directories: object) -> list[str | os.PathLike[str]]:
    """The directories as they were given: one path, or a list or tuple of them.

    ConfigError for anything else, for a path without characters and for one with a NUL.
    """
    if isinstance(directories, str | os.PathLike):
        wanted: list[Any] = [directories]
    elif isinstance(directories, Sequence) and not isinstance(directories, bytes | bytearray | memoryview):
        wanted = list(directories)
    else:  # a set has no order, and an iterator is empty the second time
        raise ConfigError(
            f"nvme={repr(directories)[:80]} is neither a path nor a list of paths: give the store's directory, or a "
            "list with one on each drive"
        )
    for one in wanted:
        text = os.fspath(one) if isinstance(one, str | os.PathLike) else None
        if not isinstance(text, str):
            raise ConfigError(f"nvme: {repr(one)[:80]} is no path: give directories as strings or pathlib paths")
        if not text.strip() or "\0" in text:
            raise ConfigError(f"nvme: {text!r} cannot name a directory: give its path, '.' for the current one")
    return wanted


_ADVICE = "Nothing was deleted: put the file back, or give the snapshots up with overwrite=True"


def prepare_directory(directory: str | os.PathLike[str]) -> str:
    """Make `directory` and its parents; its absolute path.

    StoreError saying what to do if it is a file, read-only or cannot be made.
    """
    path = _whole(directory)
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        culprit = path
        while culprit != os.path.dirname(culprit) and not os.path.lexists(culprit):
            culprit = os.path.dirname(culprit)
        kind = "a dangling link" if os.path.islink(culprit) and not os.path.exists(culprit) else "a file"
        raise StoreError(
            f"the NVMe path {path} cannot be a directory because {culprit} is {kind}: give the path of a directory"
        ) from error
    except OSError as error:
        raise StoreError(
            f"the NVMe directory {path} cannot be made: {error.strerror}. "
            "Give a directory that you may write to, on a drive with space"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreError(
            f"the NVMe directory {path} is read-only here: give one that you may write to, or remount it read-write"
        )
    return path


def _whole(directory: str | os.PathLike[str]) -> str:
    """The absolute path. StoreError for a relative one in a working directory that was removed."""
    path = os.path.expanduser(os.fspath(directory))
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise StoreError(
            f"the NVMe path {path} starts at the working directory, which no longer exists: go to another one, or give "
            "the path from the root"
        ) from error


def check_apart(directories: Sequence[str | os.PathLike[str]]) -> None:
    """StoreError if there are none, two of the directories are the same, or one lies inside another."""
    if not directories:
        raise StoreError("the store was given no directory: give one on each drive")
    real = [os.path.realpath(_whole(directory)) for directory in directories]
    for index, one in enumerate(real):
        for other in real[:index]:
            if one == other or _is_same(one, other):
                raise StoreError(
                    f"the NVMe directory {one} is given twice: give one directory on each drive, each of them once"
                )
            inner, outer = sorted((one, other), key=len, reverse=True)
            if os.path.commonpath((inner, outer)) == outer:
                raise StoreError(
                    f"the NVMe directory {inner} lies inside {outer}: give one directory on each drive, side by side"
                )


def _is_same(one: str, other: str) -> bool:
    """Whether two names lead to one directory, as those of a bind mount do."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # it is yet to be made
        return False


def survey(directories: Sequence[str], overwrite: bool) -> tuple[list[str], Manifest | None]:
    """(the directories by member, the manifest) of the store there; as listed and None if it is to be overwritten.

    StoreError and StoreCorruptError as members' `arrange` says; with `overwrite` only for files that no store wrote.
    """
    if not overwrite:
        return members.arrange(directories)
    for directory in directories:
        try:
            manifests.load(directory)
        except StoreCorruptError:
            if manifests.is_foreign(directory):
                raise
        if members.is_foreign(directory):
            raise StoreCorruptError(
                f"{os.path.join(directory, members.NAME)} is not tierzero's. Nothing was deleted: give the store a "
                "directory of its own"
            )
    return list(directories), None


def check_data_files(paths: Sequence[str], manifest: Manifest) -> None:
    """StoreCorruptError unless the data file's members are there; opening would make them anew."""
    for path in paths:
        if not os.path.exists(path):
            raise StoreCorruptError(
                f"the data file {path} of snapshot {', '.join(map(repr, sorted(manifest.snapshots)))} is missing. "
                f"{_ADVICE}"
            )


def check_length(paths: Sequence[str], size: int, manifest: Manifest) -> None:
    """StoreCorruptError unless the data file of `size` bytes is long enough for all records of all snapshots."""
    for snapshot in manifest.snapshots.values():
        for name, (extent, _) in snapshot.records.items():
            if extent.offset + extent.nbytes > size:
                weights = (1,) if manifest.layout is None else manifest.layout.weights
                path = paths[shortest([os.stat(path).st_size for path in paths], weights)]
                raise StoreCorruptError(
                    f"the data file {path} ends at {size}{' of all members' if len(paths) > 1 else ''}, before the "
                    f"record {name!r} of snapshot {snapshot.name!r} ({extent.nbytes} bytes at offset {extent.offset}): "
                    f"it was truncated. {_ADVICE}"
                )


def reclaim_directories(directories: Sequence[str], file: str, *, crashed: Collection[str], overwrite: bool) -> None:
    """Delete what no snapshot needs, in all directories: with `overwrite` the manifests too. `crashed`: those of them
    in which a store's process left its lock.

    StoreError if a data file was written by no store; then nothing is deleted.
    """
    for directory in directories:
        ours = (manifests.NAME, members.NAME)
        known = directory in crashed or any(os.path.lexists(os.path.join(directory, name)) for name in ours)
        path = os.path.join(directory, file)
        if os.path.lexists(path) and not known:
            raise StoreError(
                f"{path} exists, but no store wrote it: give the store a directory of its own, or move the file away"
            )
    if overwrite:
        for directory in directories:
            manifests.remove(directory)  # before the data: a manifest never names bytes that are gone
    remove_data(directories, file)


def remove_data(directories: Sequence[str], file: str) -> None:
    """Delete the data file's members and what says that they are some; see members' Note [members] for the order."""
    for directory in reversed(directories):
        path = os.path.join(directory, file)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(
                f"the leftover {path} cannot be deleted: {error.strerror}. Move it away or give another directory"
            ) from error
        members.remove(directory)
