"""The store: directories with locks, one data file of records, and snapshots of all of them that copy nothing.

Note [snapshot]
A snapshot pins the extents that are current (see Note [copy on write]) and writes the manifest, the only thing that
survives a crash: what is free in the data file is known from the manifest alone. Later versions go elsewhere, so it
stays readable until another snapshot takes its place.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any

from tierzero.errors import StoreCorruptError, StoreError
from tierzero.hardware.tuning import measured, weights_of
from tierzero.storage import manifest as manifests
from tierzero.storage import members
from tierzero.storage.checksum import Sums
from tierzero.storage.directory import (
    check_apart,
    check_data_files,
    check_length,
    listed,
    prepare_directory,
    reclaim_directories,
    remove_data,
    survey,
)
from tierzero.storage.extents import Extent as Extent
from tierzero.storage.lock import DirectoryLocks, Holder
from tierzero.storage.manifest import Manifest, Snapshot
from tierzero.storage.space import Space
from tierzero.storage.versions import Versions
from tierzero.tiers.base import BlockFile, open_block_file, settle

DATA = "data.bin"


class Store(Versions):
    """Records in `directory`, opened and locked; see Versions for reading and writing them. Several directories hold
    one data file, striped over them; see members' Note [members].

    `engine` is a NativeEngine or None for the portable tier. `resume` opens a snapshot (True: the latest) instead of
    starting empty. `overwrite` gives up the snapshots that are there. Without `reclaim`, a directory that a crashed
    run left is refused instead of its space being reused. `opener` makes the block file from a path and the engine, or
    from several paths, the engine, weights= and stripe=.

    Raises StoreError (unusable directory, or snapshots in the way), StoreBusyError (held by a living process) and
    StoreCorruptError (damaged manifest or data file; nothing is deleted).

    `resumed` is the snapshot that was opened, or None.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        engine: Any = None,
        resume: str | bool = False,
        reclaim: bool = True,
        overwrite: bool = False,
        opener: Callable[..., BlockFile] = open_block_file,
    ) -> None:
        wanted = listed(directory)
        check_apart(wanted)
        given = [prepare_directory(one) for one in wanted]
        self._lock = DirectoryLocks(given)
        try:
            if self.stale is not None and not reclaim:
                raise StoreError(
                    f"{given[0]} was left by a run that crashed ({self.stale}): "
                    "resume it, or allow its space to be reclaimed"
                )
            self.directories, known = survey(given, overwrite)
            self.directory = self.directories[0]
            manifest = known or Manifest(DATA, {}, members.new_layout(len(given), DATA, _weights(given)))
            self.layout = manifest.layout
            self.resumed = _choose(self.directory, manifest, resume)
            file = self._open(engine, opener, manifest, overwrite)
            try:
                super().__init__(file.path, file, _space(file, manifest))
            except BaseException:
                file.close()
                raise
        except BaseException:
            self._lock.give_back()
            raise
        self._snapshots = dict(manifest.snapshots)
        self._epoch = manifest.epoch
        self.latest = self.resumed  # the snapshot that was opened, then the last one made
        self._committing = False
        self._limbo: list[Extent] = []  # pinned by a manifest that was replaced, but perhaps not durably
        for name, (extent, sums) in self.resumed.records.items() if self.resumed is not None else ():
            self.current[name], self._sums[name] = extent, sums
            self.space.hold(extent)

    def _open(self, engine: Any, opener: Callable[..., BlockFile], manifest: Manifest, overwrite: bool) -> BlockFile:
        """The data file, with all that the snapshots need in it; without any, a new one."""
        layout = manifest.layout
        files = (manifest.data,) if layout is None else layout.files
        paths = [os.path.join(directory, name) for directory, name in zip(self.directories, files, strict=True)]
        if layout is None:
            fresh = not any(snapshot.records for snapshot in manifest.snapshots.values())
        else:  # while there is a manifest, every directory must say which member it is
            fresh = not manifest.snapshots
        if fresh:
            reclaim_directories(self.directories, manifest.data, crashed=self._lock.crashed, overwrite=overwrite)
        else:
            check_data_files(paths, manifest)
        made = fresh and layout is not None
        try:
            if made and layout is not None:
                members.write(self.directories, layout)
            try:
                if layout is None:
                    file = opener(paths[0], engine)
                else:
                    file = opener(paths, engine, weights=layout.weights, stripe=layout.stripe)
            except OSError as error:
                raise StoreError(
                    f"the data file {error.filename or paths[0]} cannot be opened: {error.strerror}. Check its "
                    "permissions, or give another directory"
                ) from error
            try:
                check_length(paths, file.size(), manifest)
            except BaseException:
                file.close()
                raise
            if made:
                for directory in self.directories[1:]:  # the manifest's own is synced with it
                    manifests.sync_directory(directory)
        except BaseException:
            if made:
                remove_data(self.directories, manifest.data)
            raise
        return file

    @property
    def stale(self) -> Holder | None:
        """Who held the store when it crashed, or None."""
        return self._lock.stale

    @property
    def snapshots(self) -> dict[str, Snapshot]:
        """The committed snapshots by name."""
        with self._mutex:
            return dict(self._snapshots)

    def recall(self, name: str, extent: Extent | None = None) -> bool:
        """Make the version of `name` that a snapshot holds in `extent` current again, without writing; if None, the
        one of the last snapshot that has any. False if there is none.
        """
        with self._mutex:
            self._check_open()
            for snapshot in sorted(self._snapshots.values(), key=lambda one: -one.epoch):
                there = snapshot.records.get(name)
                if there is not None and extent in (None, there[0]):
                    self.space.hold(there[0])
                    self.publish(name, *there)
                    return True
            return False

    async def snapshot(self, name: str, meta: dict[str, Any], keep: Collection[str] = ()) -> Snapshot:
        """Commit the current records as snapshot `name`, with `meta` (JSON values).

        Older snapshots but those in `keep` are dropped. Durable when it returns; on an OSError the snapshots before it
        still stand.
        """
        records: dict[str, tuple[Extent, Sums]] = {}
        placed = False

        def renamed() -> None:
            nonlocal placed
            placed = True

        captured = await self._capture(keep)
        try:
            for record, (extent, known) in captured.items():
                sums = known if known is not None else await self._sum_again(record, extent)
                records[record] = (extent, sums)
            await self.file.sync()
            new = Snapshot(name, self._epoch + 1, meta, records)
            kept = {other: old for other, old in self._snapshots.items() if other in keep and other != name}
            manifest = Manifest(os.path.basename(self.path), {**kept, name: new}, self.layout)
            await settle(asyncio.ensure_future(asyncio.to_thread(self._save, manifest, renamed)))
        except BaseException:
            with self._mutex:
                self._committing = False
                if placed:
                    self._limbo += self._replace(manifest)  # a power failure may still bring the old manifest back
                else:
                    self._release([extent for extent, _ in captured.values()])
            raise
        with self._mutex:
            self._committing = False
            self._release([*self._replace(manifest), *self._limbo])
            self._limbo = []
        return new

    def _save(self, manifest: Manifest, renamed: Callable[[], None]) -> None:
        if self.layout is not None and not self._snapshots:  # a manifest that goes missing later will be missed
            members.mark_committed(self.directories, self.layout)
        manifests.save(self.directory, manifest, renamed)

    async def _capture(self, keep: Collection[str]) -> dict[str, tuple[Extent, Sums | None]]:
        """Hold the current extents, at a moment when none is being changed in place."""
        with self._mutex:
            self._check_open()
            if self._committing:
                raise StoreError(f"a snapshot of {self.directory} is being written already: wait for it")
            missing = sorted(set(keep) - set(self._snapshots))
            if missing:
                raise StoreError(f"{self.directory} has no snapshot {missing[0]!r} to keep")
            self._committing = True
        try:
            async with AsyncExitStack() as stack:
                for _, lock in sorted(self._writing.items()):
                    await stack.enter_async_context(lock)
                with self._mutex:
                    captured = {name: (extent, self._sums[name]) for name, extent in self.current.items()}
                    for extent, _ in captured.values():
                        self.space.hold(extent)
                    return captured
        except BaseException:
            self._committing = False
            raise

    def _replace(self, manifest: Manifest) -> list[Extent]:
        """Make the manifest's snapshots the known ones; the extents of those that are gone."""
        gone = [old for name, old in self._snapshots.items() if manifest.snapshots.get(name) is not old]
        self._snapshots, self._epoch, self.latest = dict(manifest.snapshots), manifest.epoch, manifest.latest
        return [extent for old in gone for extent, _ in old.records.values()]

    def close(self, keep: bool = False) -> None:
        """Close the file and release the lock. Harmless when closed, and in a forked child.

        Snapshots stay, and the data file with them; without any it is deleted, unless `keep`: then the directory is
        left as a crash would leave it.
        """
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            try:
                if self._lock.held and self._snapshots:
                    self._release(list(self.current.values()))
                    self.space.trim()
            finally:
                self.file.close()
                if self._lock.held:
                    if not self._snapshots and not keep:
                        remove_data(self.directories, os.path.basename(self.path))
                    self._lock.release(remove=bool(self._snapshots) or not keep)


def _choose(directory: str, manifest: Manifest, resume: str | bool) -> Snapshot | None:
    """The snapshot to open, or None to start empty; StoreError if there is none to resume or one in the way."""
    latest = manifest.latest
    if latest is None:
        if resume:
            raise StoreError(
                f"there is nothing to resume in {directory}: no snapshot was committed there. "
                "Start without resume, or check the path"
            )
        return None
    if not resume:
        step = f" of step {latest.meta['step']}" if "step" in latest.meta else ""
        raise StoreError(
            f"{directory} holds the snapshot {latest.name!r}{step}: resume it (resume={latest.name!r}), "
            "pass overwrite=True to give it up, or use another directory"
        )
    if resume is True:
        return latest
    if resume not in manifest.snapshots:
        there = ", ".join(map(repr, sorted(manifest.snapshots)))
        raise StoreError(f"{directory} has no snapshot {resume!r} to resume; it has {there}")
    return manifest.snapshots[resume]


def _weights(directories: Sequence[str]) -> list[int]:
    """Stripe weights for a new store."""
    return weights_of(measured(directories)) if len(directories) > 1 else [1]


def _space(file: BlockFile, manifest: Manifest) -> Space:
    """The space of the data file with everything pinned that the manifest names, and the free tail cut off."""
    space = Space(file, (1,) if manifest.layout is None else manifest.layout.weights)
    for snapshot in manifest.snapshots.values():
        for name, (extent, _) in snapshot.records.items():
            if not space.adopt(extent):
                raise StoreCorruptError(
                    f"the record {name!r} of snapshot {snapshot.name!r} lies over another one at offset "
                    f"{extent.offset} of {file.path}. Nothing was deleted: give the snapshots up with overwrite=True"
                )
    space.trim()
    return space
