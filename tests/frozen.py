"""Readers of a Frozen that take their time, and what they should find."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import torch
from oracle import same

from tierzero.checkpoint.frozen import Frozen, FrozenUnit
from tierzero.engine import Engine

Contents = dict[tuple[str, str], torch.Tensor]


def contents_of(run: Any) -> Contents:
    """Every tensor of a model, its optimizer and its gradients, by parameter and part; waits for queued updates."""
    found: Contents = {}
    state = run.optimizer.state
    for name, param in run.model.named_parameters():
        found[name, "param"] = param.read()
        for part, value in state.get(param, {}).items():
            if hasattr(value, "read"):
                found[name, part] = value.read()
        if param.grad is not None:
            found[name, "grad"] = param.grad.plain.clone()
    return found


def differing(found: Contents, expected: Contents) -> list[tuple[str, str]]:
    """What has other bits, or is in one of them only."""
    return sorted(
        {
            *(found.keys() ^ expected.keys()),
            *(k for k in found.keys() & expected.keys() if not same(found[k], expected[k])),
        }
    )


async def read_unit(one: FrozenUnit, piece: int = 7) -> Contents:
    """All its tensors, some elements at a time."""
    found: Contents = {}
    for source in one.sources:
        flat = torch.empty(source.numel, dtype=source.dtype)
        for first in range(0, source.numel, piece):
            await source.read(first, flat[first : first + piece])
        found[source.name, source.part] = flat.view(source.shape)
    return found


class Reader:
    """Reads `frozen` on the engine's loop. With `late`, each unit only when training waits for it; what is left then,
    when `finish` is called.
    """

    def __init__(self, engine: Engine, frozen: Frozen, *, late: bool = True) -> None:
        self.engine = engine
        self.frozen = frozen
        self.found: Contents = {}
        self.waited: list[str] = []  # units that training waited for
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._finish = not late
        engine.loop.call(self._start)

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            with self.frozen:
                left = list(self.frozen.units)
                while left:
                    wanted = [one for one in left if one.gate.wanted]
                    self.waited += [one.name for one in wanted]
                    for one in wanted or (left[:1] if self._finish else []):
                        await self._one(one)
                        left.remove(one)
                    await asyncio.sleep(0 if wanted or self._finish else 1e-4)
        except BaseException as error:
            self.error = error
        self._over.set()

    async def _one(self, one: FrozenUnit) -> None:
        self.found.update(await read_unit(one))
        self.frozen.unit_done(one)

    def finish(self) -> Contents:
        """What it read, all of it."""
        self._finish = True
        assert self._over.wait(60), "the reader never ends"
        if self.error is not None:
            raise self.error
        return self.found


def assert_let_go(engine: Engine) -> None:
    """No gate is closed and nothing is held in the store beyond what is current and in snapshots."""
    assert all(unit.gate is None for unit in engine.units)
    assert engine.closing == []
    store = engine.store
    if store is not None:
        pinned: Iterable[Any] = [extent for one in store.snapshots.values() for extent, _ in one.records.values()]
        known = {extent.offset for extent in (*store.current.values(), *pinned) if extent.capacity}
        assert {extent.offset for extent in store.space.live()} == known
