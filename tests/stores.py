"""What the tests of the store share."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forked
import torch

from tierzero.storage.store import Store
from tierzero.tiers.base import BlockFile, open_block_file
from tierzero.tiers.faulty import Fault, FaultyFile


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(store: Store, name: str) -> torch.Tensor:
    out = torch.empty(store.current[name].nbytes, dtype=torch.uint8)
    asyncio.run(store.read(name, 0, out))
    return out


def crash(store: Store) -> None:
    """Leave everything as a killed process would."""
    store.file.close()
    store._lock.release(remove=False)
    store._closed = True


def kill_a_child(code: str, arguments: Sequence[object], lines: int, before: int, errors: Path) -> tuple[int, int]:
    """Run `code` in a process, which prints `step N` when it has committed N, and kill -9 it after `lines` lines.

    Returns (its pid, the last step that it had told; `before` if none).
    """
    process, output = forked.start(forked.source, code, arguments, errors=errors)
    pid, committed = process.pid, before
    assert pid is not None
    with output:
        for number, line in enumerate(output, 1):  # after the signal, what it had told before that arrived
            word, *rest = line.split()
            if word == "step":
                committed = int(rest[0])
            if number == lines:
                process.kill()
    assert forked.code_of(process) == -signal.SIGKILL, errors.read_text()
    return pid, committed


def faulty(plan: list[Fault]) -> Callable[[str, Any], BlockFile]:
    return lambda path, engine: FaultyFile(open_block_file(path, engine), plan)


def committed(path: Path) -> Store:
    """A closed store with one snapshot of two records."""
    store = Store(path)
    asyncio.run(store.put("a", some(10_000, 1)))
    asyncio.run(store.put("b", some(10_000, 2)))
    asyncio.run(store.snapshot("s", {"step": 1}))
    store.close()
    return store


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}
