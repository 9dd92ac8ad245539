"""The directory of a store: making it, judging what lies in it, and deleting only what a store wrote."""

from __future__ import annotations

import os

from tierzero import manifest as manifests
from tierzero.errors import StoreCorruptError, StoreError
from tierzero.manifest import Manifest


def prepare_directory(directory: str | os.PathLike[str]) -> str:
    """Make `directory` and its parents; its absolute path.

    StoreError saying what to do if it is a file, read-only or cannot be made.
    """
    path = os.path.abspath(os.path.expanduser(os.fspath(directory)))
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


def read_manifest(directory: str, overwrite: bool) -> Manifest | None:
    """The manifest, or None where there is none or it is to be overwritten.

    StoreCorruptError if it is damaged and not to be overwritten, or foreign.
    """
    if not overwrite:
        return manifests.load(directory)
    try:
        manifests.load(directory)
    except StoreCorruptError:
        if manifests.is_foreign(directory):
            raise
    return None


def check_data_file(path: str, manifest: Manifest) -> None:
    """StoreCorruptError unless the data file is there and long enough for all records of all snapshots."""
    advice = "Nothing was deleted: put the file back, or give the snapshots up with overwrite=True"
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise StoreCorruptError(
            f"the data file {path} of snapshot {', '.join(map(repr, sorted(manifest.snapshots)))} is missing. {advice}"
        ) from None
    for snapshot in manifest.snapshots.values():
        for name, (extent, _) in snapshot.records.items():
            if extent.offset + extent.nbytes > size:
                raise StoreCorruptError(
                    f"the data file {path} ends at {size}, before the record {name!r} of snapshot {snapshot.name!r} "
                    f"({extent.nbytes} bytes at offset {extent.offset}): it was truncated. {advice}"
                )


def reclaim_directory(directory: str, path: str, *, stale: bool, overwrite: bool) -> None:
    """Delete what no snapshot needs: with `overwrite` the manifest too.

    StoreError if the data file was written by no store.
    """
    known = stale or os.path.exists(os.path.join(directory, manifests.NAME))
    if os.path.lexists(path) and not known:
        raise StoreError(
            f"{path} exists, but no store wrote it: give the store a directory of its own, or move the file away"
        )
    if overwrite:
        manifests.remove(directory)  # before the data: a manifest never names bytes that are gone
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(
            f"the leftover {path} cannot be deleted: {error.strerror}. Move it away or give another directory"
        ) from error
