"""Snapshots of a store, as `tierzero ckpt` sees them: read from the manifest and the data file, without a model.

Note [while a run goes on]
A snapshot is not changed while it is in the manifest, so reading takes no lock. When a run commits the next one, the
bytes of this one are free; so whoever has read looks into the manifest once more before it trusts what it saw.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_buffers

from tierzero.checkpoint.snapshot import BUFFERS, OWN
from tierzero.cli.ckpt_data import DataFile
from tierzero.cli.ckpt_entry import DAMAGED, Entry, StoredTensor
from tierzero.errors import StoreBusyError, StoreCorruptError, StoreError, TierzeroError
from tierzero.optim.resting import Resting
from tierzero.storage import manifest as manifests
from tierzero.storage import members
from tierzero.storage.directory import check_data_files, check_length, remove_data
from tierzero.storage.lock import DirectoryLocks, living_holder
from tierzero.storage.manifest import Manifest, Snapshot
from tierzero.tiers.base import memory_of
from tierzero.units.borrowed import BorrowedFiles
from tierzero.units.layout import ParamSpec, Place, UnitLayout, state_pieces, unit_layout
from tierzero.units.state_format import StateFormat

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Stored(Entry):
    """The snapshot `name` of the store in `directories`, by member."""

    def __init__(self, directories: Sequence[str], manifest: Manifest, name: str) -> None:
        home = Path(directories[0])
        super().__init__("snapshot", name, home)
        self.directories = list(directories)
        self.manifest = manifest
        self.snapshot: Snapshot = manifest.snapshots[name]
        files = (manifest.data,) if manifest.layout is None else manifest.layout.files
        self.files = [os.path.join(one, file) for one, file in zip(directories, files, strict=True)]
        self.created = os.stat(home / manifests.NAME).st_mtime
        self.nbytes = sum(extent.nbytes for extent, _ in self.snapshot.records.values())
        self.meta = {key: value for key, value in self.snapshot.meta.items() if key != OWN}
        self.engine: dict[str, Any] = self.snapshot.meta.get(OWN, {})
        self.facts = {"epoch": self.snapshot.epoch, "directories": self.directories}
        self.layouts: dict[str, UnitLayout] = {}
        try:
            self.layouts = {unit: unit_layout([_spec(*one) for one in specs]) for unit, specs in self.engine["units"]}
            self.count = sum(1 for _ in self.tensors())
            check_data_files(self.files, manifest)
            with DataFile(self.files, manifest.layout) as data:
                check_length(self.files, data.size(), manifest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.state, self.problem = DAMAGED, f"the manifest does not describe a model ({error!r})"
        except StoreError as error:
            self.state, self.problem = DAMAGED, str(error)

    def groups(self) -> list[dict[str, Any]]:
        """See Entry."""
        return list(self.engine.get("groups", []))

    def tensors(self) -> Iterator[StoredTensor]:
        """See Entry. States are a line for each unit: its parameters' lie interleaved."""
        where = self.files[0]
        for unit, layout in self.layouts.items():
            for place in layout.places:
                spec = place.spec
                dtype = str(_DTYPES.get(spec.dtype, spec.dtype)).removeprefix("torch.")
                yield StoredTensor(f"model.{spec.name}", dtype, spec.shape, spec.nbytes, self._file(unit, place))
            for kind in ("state", "optim"):
                record = self.snapshot.records.get(f"{unit}/{kind}")
                if record is not None:
                    size = record[0].nbytes
                    yield StoredTensor(f"optimizer.state of {unit}", "uint8", (size,), size, where)
        if BUFFERS in self.snapshot.records:
            size = self.snapshot.records[BUFFERS][0].nbytes
            yield StoredTensor("buffers", "uint8", (size,), size, where)

    def _file(self, unit: str, place: Place) -> str:
        borrowed = self.engine.get("borrowed", {}).get(f"{unit}/{place.region}")
        return str(borrowed["files"][0][0]) if borrowed else self.files[0]

    def verify(self) -> Iterator[tuple[str, int]]:
        """See Entry."""
        if self.state == DAMAGED:
            raise StoreCorruptError(self.problem)
        with DataFile(self.files, self.manifest.layout) as data:
            for name, (extent, expected) in self.snapshot.records.items():
                if data.sums(extent.offset, extent.nbytes) != expected:
                    self._check_still_there()
                    raise StoreCorruptError(
                        f"{self._holds(name)} (the record {name!r}, {extent.nbytes} bytes at {extent.offset} of "
                        f"{self.files[0]}) does not match its checksum: the file is not what was written. Put a copy "
                        "back, or go on from another checkpoint"
                    )
                yield name, extent.nbytes
        files = BorrowedFiles()
        try:
            for name, described in self.engine.get("borrowed", {}).items():
                files.reopened(described)
                yield name, sum(span[1] for span in described["spans"])
        finally:
            files.close()

    def _holds(self, record: str) -> str:
        """The tensors of a record in words."""
        unit, _, kind = record.rpartition("/")
        if unit not in self.layouts:
            return record
        names = [
            place.spec.name
            for place in self.layouts[unit].places
            if place.region == kind or (kind in ("state", "optim") and place.elem >= 0)
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = "optimizer states of " if kind in ("state", "optim") else ""
        return what + ", ".join(names[:3]) + more

    def _check_still_there(self) -> None:
        now = manifests.load(str(self.path))
        if now is None or self.name not in now.snapshots or now.snapshots[self.name].epoch != self.snapshot.epoch:
            raise StoreBusyError(
                f"{self.path} was committed to while the snapshot {self.name!r} was read: run the command again, or "
                "when training has ended"
            )

    def weights(self) -> dict[str, torch.Tensor]:
        """See Entry."""
        self.check_whole()
        found: dict[str, torch.Tensor] = {}
        for unit, layout in self.layouts.items():
            for place in layout.places:
                dtype = _DTYPES.get(place.spec.dtype) or getattr(torch, place.spec.dtype)
                found[place.spec.name] = Resting(_Value(self, unit, place, dtype), place.spec.shape, dtype)
        for other, name in self.engine.get("tied", {}).items():
            found[other] = found[name]
        if BUFFERS in self.snapshot.records:
            extent, _ = self.snapshot.records[BUFFERS]
            with DataFile(self.files, self.manifest.layout) as data:
                found.update(load_buffers(bytes(memory_of(data.read(extent.offset, extent.nbytes)))))
        return found

    def value(self, unit: str, place: Place, dtype: torch.dtype) -> torch.Tensor:
        """One parameter."""
        raw = torch.zeros(place.spec.nbytes, dtype=torch.uint8)
        if raw.numel():
            self._fill(unit, place, raw)
            self._check_still_there()
        return raw.view(dtype).view(place.spec.shape)

    def _fill(self, unit: str, place: Place, out: torch.Tensor) -> None:
        record = f"{unit}/{place.region}"
        if record in self.engine.get("borrowed", {}):
            files = BorrowedFiles()
            try:
                asyncio.run(files.reopened(self.engine["borrowed"][record]).read(place.offset, out))
            finally:
                files.close()
            return
        with DataFile(self.files, self.manifest.layout) as data:
            if record in self.snapshot.records:
                extent, _ = self.snapshot.records[record]
                out.copy_(data.read(extent.offset + place.offset, out.numel()))
                return
            # a float32 parameter is its master: see layout's Note [unit layout]
            extent, _ = self.snapshot.records[f"{unit}/state"]
            chunk, form = int(self.engine["chunk"]), StateFormat(**self.engine["state"]["format"])
            last = place.elem + place.spec.numel
            for piece in state_pieces(self.layouts[unit].elements, chunk, 0, place.elem, last, form.chunk_bytes(chunk)):
                at = 4 * (piece.elem - place.elem)
                out[at : at + 4 * piece.count].copy_(data.read(extent.offset + piece.offset, 4 * piece.count))

    def user(self) -> str:
        """See Entry."""
        holder = next((one for one in map(living_holder, self.directories) if one is not None), None)
        return "" if holder is None else str(holder)

    def remove(self) -> None:
        """See Entry. The other snapshots of the store stay; with the last one the store goes."""
        locks = DirectoryLocks(self.directories)
        try:
            self._check_still_there()
            rest = {name: one for name, one in self.manifest.snapshots.items() if name != self.name}
            if rest:
                manifests.save(str(self.path), Manifest(self.manifest.data, rest, self.manifest.layout))
            else:
                manifests.remove(str(self.path))
                remove_data(self.directories, self.manifest.data)
        finally:
            locks.release()


class _Value:
    """A parameter of a snapshot, as Paged reads it."""

    def __init__(self, stored: Stored, unit: str, place: Place, dtype: torch.dtype) -> None:
        self.stored = stored
        self.unit = unit
        self.place = place
        self.dtype = dtype
        self.name = place.spec.name

    def read(self) -> torch.Tensor:
        return self.stored.value(self.unit, self.place, self.dtype)

    def write(self, value: torch.Tensor) -> None:
        raise TierzeroError(f"{self.name} lies in a snapshot, which is only read")


def _spec(name: str, shape: Sequence[int], dtype: str, trainable: bool) -> ParamSpec:
    kind = _DTYPES.get(dtype) or getattr(torch, dtype)
    return ParamSpec(name, tuple(shape), dtype, kind.itemsize, trainable)


def snapshots_in(directory: Path) -> list[Stored]:
    """The snapshots of the store that `directory` is, or is a member of, oldest first; none without a manifest.

    StoreError for a member that is missing, StoreCorruptError for a damaged manifest.
    """
    own = members.read(str(directory))
    if own is None and manifests.load(str(directory)) is None:
        return []
    others = [] if own is None else [one for index, one in enumerate(own.directories) if index != own.index]
    directories, manifest = members.arrange([os.path.abspath(directory), *others])
    if manifest is None:
        return []
    ordered = sorted(manifest.snapshots.values(), key=lambda one: one.epoch)
    return [Stored(directories, manifest, one.name) for one in ordered]
