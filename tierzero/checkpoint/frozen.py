"""Frozen: an engine's records as they were at one moment, to be read while training goes on.

Note [frozen]
Nothing is copied. What lies in the store is held there: later versions go elsewhere. What lies in host memory is
protected by a gate (see gate.py) until `unit_done`, and so is everything where the drive has no room for versions
beside those that are held. An update that is queued when it begins comes first, and its results are what is read:
beginning waits for no update, reading does. A gate opens by itself when all that it protects has been read.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from tierzero.checkpoint.frozen_unit import FrozenUnit
from tierzero.engine import Engine
from tierzero.errors import TierzeroError
from tierzero.optim.streamed import UnitUpdate
from tierzero.paging.loop import LoopThread


class Frozen:
    """Made by `freeze`. Iterating gives every unit once, those first that training waits for: read its sources, then
    call `unit_done`. `release` ends it, at any time and from any thread; so does a `with` block, and dropping it.
    """

    def __init__(self, engine: Engine, *, gradients: bool = True) -> None:
        self.engine = engine
        self.units = [FrozenUnit(unit, gradients=gradients) for unit in engine.units]
        self._left = self.units[::-1]  # backward changes the last ones first
        self._taking: set[asyncio.Task[None]] = set()
        self._closed_with = _weakly(self)
        engine.closing.append(self._closed_with)
        self._dropped = weakref.finalize(self, _release_soon, engine, self.units, self._closed_with)
        self._dropped.atexit = False

    def begin(self, keep_gated: bool) -> None:
        """Close the gates and hold what is there. On the loop."""
        if any(unit.gate is not None for unit in self.engine.units):
            raise TierzeroError("a save of this model is going on already: wait for it, or close it")
        for one in self.units:
            one.unit.gate = one.gate
            if one.unit.pending is None:
                one.take(keep_gated)
            else:
                task = asyncio.ensure_future(one.take_later(keep_gated))
                self._taking.add(task)
                task.add_done_callback(self._taking.discard)

    def __iter__(self) -> Iterator[FrozenUnit]:
        yield from in_order(self._left)

    def unit_done(self, one: FrozenUnit) -> None:
        """Everything of this unit that is wanted has been read: training need not wait for it any more."""
        _on_loop(self.engine.loop, one.let_go)

    def release(self) -> None:
        """Hold nothing any more. Reads that come later raise TierzeroError."""
        if self._dropped.detach() is not None:
            _on_loop(self.engine.loop, partial(_let_all_go, self.engine, self.units, self._closed_with))

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def in_order(left: list[FrozenUnit]) -> Iterator[FrozenUnit]:
    """Take one after another out of `left`: those first that training waits for, then those it may wait for."""
    while left:
        wanted = (one for one in left if one.gate.wanted)
        in_host = (one for one in left if one.in_host)
        chosen = next(wanted, None) or next(in_host, None) or left[0]
        left.remove(chosen)
        yield chosen


def freeze(engine: Engine, *, gradients: bool = True) -> Frozen:
    """Hold the parameters, optimizer states and (with `gradients`) the gradients of `engine` as they are now, queued
    updates included; no guess is among them. Called by the thread that trains, outside the model and `unsharded`.

    TierzeroError while another save goes on, and for parameters of a meta model that were never given values.
    """
    pager = engine.pager
    for unit in engine.units:
        unit.check_given()
    pager.check_idle(engine.units, "save outside the model and `unsharded`")
    for unit in engine.units:
        other = unit.pending is not None and not isinstance(unit.pending.work, UnitUpdate)
        if unit.guess is not None or other:  # the tensors of other optimizers are known when they have stepped
            pager.settle(unit)
        unit.finish_grads()
        for index, view in enumerate(unit.grad_views):
            if view is not None:
                unit.grad(index)  # one that somebody else made comes into the buffer
    keep_gated = engine.store is not None and not engine.room.beside()
    frozen = Frozen(engine, gradients=gradients)
    try:
        engine.loop.do(partial(frozen.begin, keep_gated))
    except BaseException:
        frozen.release()
        raise
    return frozen


def _let_all_go(engine: Engine, units: list[FrozenUnit], closed_with: Callable[[], None]) -> None:
    for one in units:
        one.let_go()
    with suppress(ValueError):
        engine.closing.remove(closed_with)


def _release_soon(engine: Engine, units: list[FrozenUnit], closed_with: Callable[[], None]) -> None:
    """For a Frozen that nobody has any more."""
    with suppress(TierzeroError):  # closed: its gates are open
        engine.loop.call(partial(_let_all_go, engine, units, closed_with))


def _weakly(frozen: Frozen) -> Callable[[], None]:
    """Its `release`, by a reference that does not keep it."""
    ref = weakref.WeakMethod(frozen.release)

    def release() -> None:
        method = ref()
        if method is not None:
            method()

    return release


def _on_loop(loop: LoopThread, function: Callable[[], None]) -> None:
    if loop.inside:
        function()
    else:
        loop.do(function)
