"""Checkpoints that tierzero.save wrote, as `tierzero ckpt` sees them."""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tierzero.checkpoint import place
from tierzero.checkpoint.index import DATA, INDEX, Index, read_head, read_index
from tierzero.checkpoint.reader import Reader
from tierzero.cli.ckpt_entry import BEING_WRITTEN, DAMAGED, PARTIAL, Entry, StoredTensor
from tierzero.errors import ConfigError, TierzeroError
from tierzero.optim.resting import Resting

_MODEL = "model."


class Portable(Entry):
    """The checkpoint in the directory `path`, whole or not."""

    def __init__(self, path: Path) -> None:
        super().__init__("checkpoint", path.name, path)
        self._index: Index | None = None
        self.created = os.stat(path).st_mtime
        beside = place.written_beside(path)
        if beside is not None:
            self.name = beside
            self.state = BEING_WRITTEN if self.user() else PARTIAL
            self.problem = "a save goes on" if self.user() else "its save was cut short; the next one clears it away"
            self.nbytes = sum(one.stat().st_size for one in path.iterdir() if one.is_file())
            return
        try:
            self._index = read_index(path)
        except TierzeroError as error:
            self.state, self.problem = DAMAGED, str(error)
            self.nbytes = sum(one.stat().st_size for one in path.iterdir() if one.is_file())
        head = read_head(path) or {}
        self.facts = {key: head[key] for key in ("tierzero", "torch", "created", "sequence") if key in head}
        if type(head.get("sequence")) is not int:
            self.facts.pop("sequence", None)
        with suppress(KeyError, TypeError, ValueError):
            self.created = datetime.datetime.fromisoformat(head["created"]).timestamp()
        if self._index is not None:
            self.nbytes = sum(self._index.files.values()) + os.stat(path / INDEX).st_size
            self.count = len(self._index.tensors)
            self.meta = self._index.meta

    @property
    def index(self) -> Index:
        """The index of a whole one; ConfigError if it is not."""
        self.check_whole()
        assert self._index is not None
        return self._index

    def groups(self) -> list[dict[str, Any]]:
        """See Entry."""
        found: dict[int, dict[str, Any]] = {}
        with Reader(self.path) as reader:
            for key, path in self.index.paths.items():
                if path[:2] == ["optimizer", "param_groups"]:
                    value: Any = reader.object(key) if key in self.index.objects else reader.tensor(key).tolist()
                    if path[3] == "params":
                        value = len(value)
                    found.setdefault(int(path[2]), {})[str(path[3])] = value
        return [found[number] for number in sorted(found)]

    def tensors(self) -> Iterator[StoredTensor]:
        """See Entry."""
        where = str(self.path / DATA)
        for key, one in self.index.tensors.items():
            yield StoredTensor(key, str(one.dtype).removeprefix("torch."), one.shape, one.nbytes, where)

    def verify(self) -> Iterator[tuple[str, int]]:
        """See Entry."""
        if self.state == DAMAGED:
            read_index(self.path)  # says what is wrong
        self.check_whole()
        with Reader(self.path) as reader:
            yield from reader.verify()

    def weights(self) -> dict[str, torch.Tensor]:
        """See Entry."""
        index, reader = self.index, Reader(self.path)
        found: dict[str, torch.Tensor] = {}
        for key, one in index.tensors.items():
            if key.startswith(_MODEL):
                found[key.removeprefix(_MODEL)] = Resting(_Stored(reader, key), one.shape, one.dtype)
        for other, key in index.aliases.items():
            if other.startswith(_MODEL):
                found[other.removeprefix(_MODEL)] = found[key.removeprefix(_MODEL)]
        extra = [key for key in index.objects if key.startswith(_MODEL)]
        if extra:
            raise ConfigError(f"{self.path} holds {extra[0]}, which is no tensor: load it with tierzero.load instead")
        return found

    def user(self) -> str:
        """See Entry. A save holds a lock on what it writes; whoever loads reads from open files."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "a save that goes on"
        finally:
            os.close(fd)
        return ""

    def remove(self) -> None:
        """See Entry."""
        self.check_unused()
        strange = place.strange(self.path)
        if strange:
            raise ConfigError(
                f"{self.path} contains {strange[0]}, which no save has written: move it away, and remove it then"
            )
        if place.written_beside(self.path) is None:
            place.discard(self.path)
        else:
            place.remove(self.path)


class _Stored:
    """A tensor of a checkpoint, as Paged reads it."""

    def __init__(self, reader: Reader, key: str) -> None:
        self.reader = reader
        self.name = key

    def read(self) -> torch.Tensor:
        return self.reader.tensor(self.name)

    def write(self, value: torch.Tensor) -> None:
        raise TierzeroError(f"{self.name} lies in {self.reader.path}, which is only read")
