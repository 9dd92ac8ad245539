"""The manifest of a store: which snapshots exist, and where each of their records lies. Written whole or not at all.

Note [manifest]
One JSON object {format, sha256, payload}; `sha256` is over the payload's canonical text. It is written to a temporary
file in the same directory, which is synced, renamed over the old one, and made durable by syncing the directory. So a
crash at any moment leaves the old or the new one whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tierzero.errors import StoreCorruptError, StoreError
from tierzero.storage.checksum import KIND, Sums, from_hex, to_hex
from tierzero.storage.extents import Extent
from tierzero.storage.stripes import Layout
from tierzero.units.layout import PAGE

FORMAT = 2  # 1 is a data file in one directory, and is still written for it
NAME = "manifest.json"
TEMPORARY = "manifest.json.new"
_REPAIR = "put a copy of the file in its place, or give the store another directory"


@dataclass(frozen=True)
class Snapshot:
    """One committed state: the caller's `meta` and every record's extent and checksum.

    Later snapshots have greater epochs.
    """

    name: str
    epoch: int
    meta: dict[str, Any]
    records: dict[str, tuple[Extent, Sums]] = field(repr=False)


@dataclass(frozen=True)
class Manifest:
    """What the file says: the data file's name, the snapshots by name, and how the file is striped, if it is."""

    data: str
    snapshots: dict[str, Snapshot]
    layout: Layout | None = None

    @property
    def epoch(self) -> int:
        return max((snapshot.epoch for snapshot in self.snapshots.values()), default=0)

    @property
    def latest(self) -> Snapshot | None:
        """The snapshot with the greatest epoch."""
        return max(self.snapshots.values(), key=lambda snapshot: snapshot.epoch, default=None)


def _canonical(payload: object) -> str:
    return json.dumps(payload, sort_keys=True, separators=(",", ":"))


def to_text(manifest: Manifest) -> str:
    """The file's text. TypeError if a snapshot's meta is not made of JSON values."""
    snapshots = {
        name: {
            "epoch": snapshot.epoch,
            "meta": snapshot.meta,
            "records": {
                record: [extent.offset, extent.nbytes, to_hex(sums)]
                for record, (extent, sums) in snapshot.records.items()
            },
        }
        for name, snapshot in manifest.snapshots.items()
    }
    payload = {"epoch": manifest.epoch, "data": manifest.data, "checksum": KIND, "snapshots": snapshots}
    if manifest.layout is not None:
        payload["layout"] = asdict(manifest.layout)
    # once through JSON, so that keys are strings before they are sorted: the reader can only sort strings
    text = _canonical(json.loads(json.dumps(payload)))
    version = 1 if manifest.layout is None else FORMAT
    return f'{{"format":{version},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","payload":{text}}}\n'


def from_text(text: bytes, path: str) -> Manifest:
    """The manifest that `text`, read from `path`, holds. StoreCorruptError says what is wrong and what to do."""
    keep = "Nothing was deleted: put back a copy of the file, or give up what it described with overwrite=True"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(f"the manifest {path} is truncated or damaged ({error}). {keep}") from None
    if not _is_ours(value):
        raise StoreCorruptError(
            f"{path} is not a tierzero manifest. Nothing was deleted: give the store a directory of its own"
        )
    if value["format"] > FORMAT:
        raise StoreCorruptError(
            f"the manifest {path} has format {value['format']}; this tierzero reads up to format {FORMAT}. "
            "Nothing was deleted: use the version that wrote it, or a newer one"
        )
    payload = value["payload"]
    if hashlib.sha256(_canonical(payload).encode()).hexdigest() != value.get("sha256"):
        raise StoreCorruptError(f"the manifest {path} does not match its own sha256: it was damaged or edited. {keep}")
    try:
        if payload["checksum"] != KIND:
            raise StoreCorruptError(
                f"the manifest {path} uses checksums of kind {payload['checksum']!r}, not {KIND!r}. {keep}"
            )
        snapshots = {name: _snapshot(name, entry) for name, entry in payload["snapshots"].items()}
        data = payload["data"]
        if os.path.basename(data) != data or not data:
            raise ValueError(f"data file name {data!r}")
        return Manifest(data, snapshots, layout_of(payload["layout"]) if "layout" in payload else None)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise StoreCorruptError(
            f"the manifest {path} lacks something or holds something odd ({error!r}). {keep}"
        ) from None


def layout_of(value: dict[str, Any]) -> Layout:
    """The layout that a JSON object names. KeyError, TypeError or ValueError if it cannot be one."""
    layout = Layout(value["store"], tuple(value["files"]), tuple(value["weights"]), value["stripe"])
    names = [layout.store, *layout.files]
    if not all(isinstance(name, str) and name and os.path.basename(name) == name for name in names):
        raise ValueError(f"names {names!r}")
    if len(layout.files) < 2 or len(layout.weights) != len(layout.files):
        raise ValueError(f"{len(layout.files)} files with {len(layout.weights)} weights")
    if not all(isinstance(weight, int) and weight > 0 for weight in layout.weights):
        raise ValueError(f"weights {layout.weights!r}")
    if not isinstance(layout.stripe, int) or layout.stripe <= 0 or layout.stripe % PAGE:
        raise ValueError(f"stripes of {layout.stripe!r} bytes")
    return layout


def _snapshot(name: str, entry: dict[str, Any]) -> Snapshot:
    records: dict[str, tuple[Extent, Sums]] = {}
    for record, (offset, nbytes, sums) in entry["records"].items():
        if not isinstance(offset, int) or not isinstance(nbytes, int) or offset < 0 or nbytes < 0 or offset % PAGE:
            raise ValueError(f"record {record!r} at offset {offset!r} with {nbytes!r} bytes")
        records[record] = (Extent(offset, nbytes), from_hex(sums))
    return Snapshot(name, int(entry["epoch"]), dict(entry["meta"]), records)


def load(directory: str) -> Manifest | None:
    """The manifest in `directory`, or None where there is none.

    StoreCorruptError as in :func:`from_text` and, like StoreError, as in :func:`read_file`.
    """
    path = os.path.join(directory, NAME)
    text = read_file(path)
    return None if text is None else from_text(text, path)


def read_file(path: str) -> bytes | None:
    """What is in the file; None where there is none.

    StoreCorruptError for a link that leads nowhere and for what is no file, StoreError if it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not make it wait
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.islink(path):
            return None
        raise StoreCorruptError(
            f"{path} is a link that leads nowhere. Nothing was deleted: mount the drive that it leads to, put a copy "
            "of the file in its place, or give up what it described with overwrite=True"
        ) from None
    except OSError as error:
        odd = StoreCorruptError if error.errno in (errno.ELOOP, errno.ENXIO) else StoreError
        raise odd(f"{path} cannot be read: {error.strerror}. Nothing was deleted: {_REPAIR}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreCorruptError(f"{path} is not a regular file. Nothing was deleted: {_REPAIR}")
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}. Nothing was deleted: {_REPAIR}") from error
    finally:
        os.close(fd)


def is_foreign(directory: str) -> bool:
    """Whether something that no store wrote has the manifest's name, and so must never be deleted."""
    return foreign(os.path.join(directory, NAME), _is_ours)


def foreign(path: str, ours: Callable[[object], bool]) -> bool:
    """Whether the file is whole JSON that is not `ours`, or is no file or link at all."""
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            return not stat.S_ISLNK(mode)
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return False
    return not ours(value)


def _is_ours(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("format"), int) and "payload" in value and "sha256" in value


def save(directory: str, manifest: Manifest, renamed: Callable[[], None] | None = None) -> None:
    """Write the manifest durably; see Note [manifest].

    `renamed` is called once the new one is in place but perhaps not durable yet.

    OSError(errno, sentence, path) on failure. Before `renamed` was called the old manifest is untouched and the
    temporary file is removed.
    """
    temporary, path = os.path.join(directory, TEMPORARY), os.path.join(directory, NAME)
    text = to_text(manifest).encode()
    try:
        try:
            with open(temporary, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
        if renamed is not None:
            renamed()
        sync_directory(directory)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write the manifest ({error.strerror}); the snapshot before it still stands. "
            "Free some space or check the drive",
            path,
        ) from error


def remove(directory: str) -> None:
    """Delete the manifest and a temporary one, durably."""
    for name in (NAME, TEMPORARY):
        try:
            os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            continue
    sync_directory(directory)


def sync_directory(directory: str) -> None:
    """Make renames and removals in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
