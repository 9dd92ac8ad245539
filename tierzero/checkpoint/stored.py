"""Tensors as files hold them: what every kind of checkpoint is to whoever loads one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from tierzero.tiers.base import aligned_empty
from tierzero.tiers.readonly import ReadOnlyFile
from tierzero.units.layout import PAGE


class Stored:
    """One tensor in a checkpoint. `file` is where it (or the first of it) lies, for errors.

    `whole` is (path, byte offset) where all its bytes lie in one run in the order of its elements, None elsewhere.
    `scattered`: its runs are too short to be written one by one.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    whole: tuple[Path, int] | None = None
    scattered = False

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def runs(self, files: OpenFiles) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, flat values on the CPU) that together are the tensor, each of bounded size. Values last until
        the next are taken.
        """
        raise AssertionError("each kind of checkpoint has its own")


class OpenFiles:
    """The file that is read at present, one at a time, and the memory for what is read at once."""

    def __init__(self) -> None:
        self._file: ReadOnlyFile | None = None
        self._scratch = aligned_empty(0)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Aligned memory for `nbytes` bytes from anywhere in a file; the same at every call."""
        if self._scratch.numel() < nbytes + 2 * PAGE:
            self._scratch = aligned_empty(nbytes + 2 * PAGE)
        return self._scratch

    def of(self, path: Path) -> ReadOnlyFile:
        """`path`, open for reading."""
        if self._file is None or self._file.path != str(path.absolute()):
            self.close()
            self._file = ReadOnlyFile(path)
        return self._file

    def close(self) -> None:
        """Close it."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
