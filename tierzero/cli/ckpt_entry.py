"""What `tierzero ckpt` knows of one checkpoint, whether a directory of its own or a snapshot in a store."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tierzero.errors import ConfigError, StoreBusyError, StoreCorruptError

COMPLETE, DAMAGED, PARTIAL, BEING_WRITTEN = "complete", "damaged", "partial", "being written"


@dataclass(frozen=True)
class StoredTensor:
    """A line of the tensor table: `nbytes` bytes in `file`. `dtype` as torch names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass
class Entry(ABC):
    """One checkpoint. `kind`: "checkpoint" or "snapshot". `created`: seconds since the epoch. `problem`: what is wrong
    with one that is not complete. `meta`: the user's values; `facts`: what else there is to say.
    """

    kind: str
    name: str
    path: Path
    state: str = COMPLETE
    created: float = 0.0
    nbytes: int = 0
    count: int = 0  # of its tensors
    problem: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The `step` of the user's meta values, if it has one."""
        step = self.meta.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None

    @abstractmethod
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, without their parameters."""

    @abstractmethod
    def tensors(self) -> Iterator[StoredTensor]:
        """All tensors, in the order of the file."""

    @abstractmethod
    def verify(self) -> Iterator[tuple[str, int]]:
        """Compare everything with its checksum; gives (name, bytes) of what is right. StoreCorruptError names the file
        and the tensor that is not.
        """

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's state dict with tensors that are read when they are used; tied names share one."""

    @abstractmethod
    def user(self) -> str:
        """Who has it in use; empty if nobody has."""

    @abstractmethod
    def remove(self) -> None:
        """Delete it. StoreBusyError if it is in use."""

    def check_whole(self) -> None:
        """ConfigError saying why its contents cannot be used."""
        if self.state != COMPLETE:
            raise ConfigError(f"{self.path} is {self.state}: {self.problem}")

    def check_unused(self) -> None:
        """StoreBusyError naming who has it in use."""
        user = self.user()
        if user:
            raise StoreBusyError(f"{self.name} in {self.path} is in use by {user}: stop that run first")


class Unreadable(Entry):
    """A directory that says that it is a checkpoint and cannot be read as one; `problem` says why."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__("unknown", path.name, path, DAMAGED, os.stat(path).st_mtime, problem=problem)

    def groups(self) -> list[dict[str, Any]]:
        """See Entry."""
        return []

    def tensors(self) -> Iterator[StoredTensor]:
        """See Entry."""
        yield from ()

    def verify(self) -> Iterator[tuple[str, int]]:
        """See Entry."""
        raise StoreCorruptError(self.problem)

    def weights(self) -> dict[str, torch.Tensor]:
        """See Entry."""
        raise StoreCorruptError(self.problem)

    def user(self) -> str:
        """See Entry."""
        return ""

    def remove(self) -> None:
        """See Entry. It is not known whose it is."""
        raise ConfigError(f"{self.path} is not removed: {self.problem}")
