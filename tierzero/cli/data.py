"""Training text as windows of tokens: which files, read lazily, and which window belongs to which step."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tierzero.errors import ConfigError


class Corpus(Protocol):
    """A long sequence of tokens on disk."""

    name: str
    vocab: int

    def __len__(self) -> int: ...

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens [length] from `start`, any integer dtype."""
        ...

    def fingerprint(self) -> str:
        """Changes when the sequence changes; kept in checkpoints."""
        ...


class ByteCorpus:
    """The bytes of `files`, one after the other; only the windows asked for are read."""

    vocab = 256

    def __init__(self, files: list[Path], name: str) -> None:
        self.name = name
        sized = [(path, path.stat().st_size) for path in files]
        self.files = [path for path, size in sized if size]
        self.ends = list(accumulate(size for _, size in sized if size))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def window(self, start: int, length: int) -> np.ndarray:
        pieces = []
        index = bisect_right(self.ends, start)
        while length > 0:
            offset = start - (self.ends[index - 1] if index else 0)
            want = min(length, self.ends[index] - start)
            with self.files[index].open("rb") as file:
                file.seek(offset)
                piece = file.read(want)
            if len(piece) != want:
                raise OSError(f"{self.files[index]} became shorter while it was being read: start the run again")
            pieces.append(piece)
            start, length, index = start + want, length - want, index + 1
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for path, end in zip(self.files, self.ends, strict=True):
            digest.update(f"{path.name}\0{end}\n".encode())
        return digest.hexdigest()


class TokenCorpus:
    """A memory-mapped array of token ids."""

    def __init__(self, tokens: np.ndarray, name: str, vocab: int) -> None:
        self.tokens = tokens
        self.name = name
        self.vocab = vocab

    def __len__(self) -> int:
        return len(self.tokens)

    def window(self, start: int, length: int) -> np.ndarray:
        return np.asarray(self.tokens[start : start + length])

    def fingerprint(self) -> str:
        ends = np.asarray(self.tokens[:512]).tobytes() + np.asarray(self.tokens[-512:]).tobytes()
        return hashlib.blake2b(ends + str(len(self.tokens)).encode(), digest_size=16).hexdigest()


class Sampler:
    """The batch of a step as a pure function of (seed, step, micro-batch): resuming needs no position."""

    def __init__(self, corpus: Corpus, sequence: int, batch: int, seed: int) -> None:
        if len(corpus) < sequence + 1:
            raise ConfigError(
                f"the text in {corpus.name} has {len(corpus)} tokens, fewer than data.sequence + 1 = {sequence + 1}: "
                "give more text or a smaller data.sequence"
            )
        self.corpus = corpus
        self.length = sequence + 1
        self.batch = batch
        self.seed = seed

    def __call__(self, step: int, micro: int = 0) -> Tensor:
        """Tokens int64 [batch, sequence + 1] on the CPU."""
        out = torch.empty(self.batch, self.length, dtype=torch.int64)
        rows = out.numpy()
        for row in range(self.batch):
            rows[row] = self.corpus.window(self.start(step, micro, row), self.length)
        return out

    def start(self, step: int, micro: int, row: int) -> int:
        # a hash rather than a generator: the same on every platform and in every version of numpy and torch
        key = f"{self.seed}/{step}/{micro}/{row}".encode()
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return draw % (len(self.corpus) - self.length + 1)


def standard_library() -> list[Path]:
    """The sources of Python's standard library in a fixed order, without its tests and the tables of its encodings."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
    return sorted(path for path in walk(root, skipped) if path.suffix == ".py")


def text_files(path: Path) -> list[Path]:
    """`path` itself, or all text files below it in a fixed order: not hidden, no NUL byte in the first 4 KiB."""
    if path.is_file():
        return [path]
    return sorted(found for found in walk(path, {"__pycache__"}) if is_text(found))


def walk(root: Path, skipped: set[str]) -> list[Path]:
    """Regular files below `root`, not looking into hidden directories or those named in `skipped`."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return [path for path in found if path.is_file()]


def is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(4096)


def open_text(path: Path | None) -> ByteCorpus:
    """The byte-level corpus of a file or directory; None: the standard library's sources."""
    if path is None:
        return ByteCorpus(standard_library(), "the Python standard library")
    if not path.exists():
        raise ConfigError(f"data.path {path} does not exist: name a text file or a directory of text files")
    return ByteCorpus(text_files(path), str(path))


def open_tokens(path: Path, vocab: int) -> TokenCorpus:
    """A 1-D integer .npy file of token ids below `vocab`, memory-mapped."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ConfigError(f"data.path {path} does not exist: name a .npy file of token ids") from None
    except (ValueError, EOFError) as error:
        raise ConfigError(f"data.path {path} is not a readable .npy file: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"data.path {path} holds {tokens.dtype} {list(tokens.shape)}: token ids are a 1-D array of integers"
        )
    for start in range(0, len(tokens), 1 << 22):  # in pieces: the file may be larger than RAM
        piece = tokens[start : start + (1 << 22)]
        if int(piece.max()) >= vocab or int(piece.min()) < 0:
            raise ConfigError(f"data.path {path} holds token ids outside 0..{vocab - 1}: set model.vocab higher")
    return TokenCorpus(tokens, str(path), vocab)
