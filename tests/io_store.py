"""Engines of every kind, and a store with one committed step that has to survive what happens next."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from tierzero import _native
from tierzero.storage.store import Store
from tierzero.tiers.nvme import NativeEngine

KINDS = {"uring": ("uring", True), "pool": ("pool", True), "buffered": ("auto", False)}  # kind, direct
PIECE = 1 << 16


def record(step: int) -> torch.Tensor:
    return torch.full((300_000,), step, dtype=torch.uint8)


def make_engine(kind: str = "auto", deadline: float = 30.0) -> NativeEngine:
    engine = NativeEngine(block=PIECE)
    engine.native.close()
    engine.native = _native.Engine(kind=kind, block=PIECE, depth=2, deadline=deadline)
    return engine


def committed(directory: Path, engine: NativeEngine, room: int = 8 << 20) -> Store:
    """A store with step 1 committed, and record "a" changed since."""
    store = Store(directory, engine=engine)
    store.reserve(room)

    async def go() -> None:
        await store.put("a", record(1))
        await store.snapshot("s", {"step": 1})
        await store.put("a", record(2))

    asyncio.run(go())
    return store


def abandon(store: Store) -> None:
    """Leave it as a process that was killed would."""
    store.file.close()
    store._lock.release(remove=False)
    store._closed = True


def reads_back(directory: Path) -> None:
    """What was committed is there, whole."""
    store = Store(directory, resume=True)
    out = torch.empty(300_000, dtype=torch.uint8)

    async def go() -> None:
        await store.verify()
        await store.read("a", 0, out)

    asyncio.run(go())
    assert store.resumed is not None
    assert store.resumed.meta == {"step": 1}
    assert torch.equal(out, record(1))
    store.close()
