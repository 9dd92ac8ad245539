"""The functions users call: offload a model, look at it, and take it apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from tierzero.autograd.backward import in_backward
from tierzero.autograd.changes import differs, write_back
from tierzero.autograd.modules import is_running
from tierzero.checkpoint import rollback as back
from tierzero.checkpoint import snapshot as snapshots
from tierzero.checkpoint.beside import Optimizers
from tierzero.engine import ENGINES, Engine
from tierzero.errors import TierzeroError
from tierzero.hardware.endurance import days_left, per_day
from tierzero.monitoring.clock import SAVE
from tierzero.optim.clip import place_of
from tierzero.paging.pins import Hold
from tierzero.paging.states import State
from tierzero.tiers.config import Tiers
from tierzero.units.partition import Units
from tierzero.units.unit import Unit

M = TypeVar("M", bound=nn.Module)


def offload(
    model: M,
    tiers: Tiers,
    *,
    units: Units | None = None,
    micro_batches: int = 1,
    resume: str | bool = False,
    overwrite: bool = False,
) -> M:
    """Move the parameters of `model` into the tiers, in place, and page them in as its modules run. Returns `model`.

    units: what moves together; see tierzero.units.partition. By default the elements of the model's ModuleLists and
    Sequentials.
    micro_batches: in training, each repeated unit (an element of a ModuleList or Sequential that contains no other
    unit) runs its batch in this many pieces, one after the other, and again in backward, so that it keeps its arguments
    and never more than the activations of one piece; parameters are fetched and gradients leave once whatever the
    number. Units that mix the rows of a batch are refused when they run. See docs/how-it-works.md for what the results
    are equal to.
    resume: open a snapshot of the store (its name, or True for the latest) instead of writing the parameters; the model
    may be on the meta device.
    overwrite: give up the snapshots of an earlier run in the same directory.

    A model on the meta device starts without values: give it some with `initialize`, `load` or
    `load_state_dict`. Raises BudgetError naming the smallest budget that works, StoreError and its kin for the NVMe
    directory, OSError for a full disk, ValueError for micro_batches below 1; the model is then unchanged.
    """
    if any(place_of(param) is not None for param in model.parameters()):
        open_engine(model)
        raise TierzeroError(
            "this model, or a part of it, is offloaded already; offload a model once, before anything else"
        )
    if not isinstance(tiers, Tiers):
        raise TypeError(f"tiers must be a tierzero.Tiers, got {type(tiers).__name__}")
    Engine(model, tiers, units, micro_batches, resume, overwrite)
    return model


def engine_of(model: nn.Module) -> Engine:
    """The engine of an offloaded model or of one of its submodules, closed or not."""
    for engine in list(ENGINES):
        if engine.model() is model:
            return engine
    for param in model.parameters():
        place = place_of(param)
        if place is not None:
            owner: Engine = place[0].owner
            return owner
        for engine in list(ENGINES):  # inside `unsharded` or a forward
            if any(live is param for unit in engine.units for live in unit.live):
                return engine
    raise TierzeroError(
        f"{type(model).__name__} is not an offloaded model; call tierzero.offload(model, tierzero.Tiers(...)) first"
    )


def open_engine(model: nn.Module) -> Engine:
    """The engine of an offloaded model; TierzeroError if it was closed."""
    engine = engine_of(model)
    if engine.closed:
        raise TierzeroError(
            f"the engine of this {type(model).__name__} was closed by tierzero.close(); build the model anew and "
            "offload() that"
        )
    return engine


def _units_of(module: nn.Module, recurse: bool) -> list[Unit]:
    wanted = {id(inner) for inner in (module.modules() if recurse else [module])}
    return [
        unit
        for unit in open_engine(module).units
        if any(id(owner) in wanted for slots in unit.slots for owner, _ in slots)
    ]


@contextmanager
def unsharded(module: nn.Module, *, write: bool = False, recurse: bool = True) -> Iterator[None]:
    """Inside, the parameters of `module` are live: whole, plain, on the compute device. With `write`, changed ones are
    written back at the end.

    What is computed from them may be part of a loss. All of them must fit the device budget at once: for a large model
    do it module by module. Without `write`, and after an exception, values that were changed are as before at the end.
    """
    engine = open_engine(module)
    units = _units_of(module, recurse)
    held: list[Unit] = []
    dropped: list[Unit] = []
    hold = Hold()
    done = False
    try:
        for unit in units:
            _acquire(engine, unit, hold, held)
        with engine.hooks.net():
            yield
        for unit in units:
            if write:
                _write_back(engine, unit)
            elif any(differs(engine.pager, unit, index) for index in unit.values.changed()):
                dropped.append(unit)
        done = True
    finally:
        for unit in reversed(held):
            touched = not done and unit.live_registered and bool(unit.values.changed())
            _let_go(engine, unit, hold, changed=unit in dropped or touched)


def _acquire(engine: Engine, unit: Unit, hold: Hold, held: list[Unit]) -> None:
    held.append(unit)
    engine.pager.acquire(unit, hold, train=False, record=False)
    unit.register_live()


def _let_go(engine: Engine, unit: Unit, hold: Hold, *, changed: bool) -> None:
    engine.pager.release(unit, hold, register_rest=True)
    if changed and not unit.pins:
        engine.pager.mark_stale(unit)


def _write_back(engine: Engine, unit: Unit) -> None:
    unit.version += len(write_back(engine.pager, unit, range(len(unit.live))))
    unit.values.at_rest()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make the method `name` of this module page its parameters in as `forward` does (`generate`, `encode`, ...)."""
    open_engine(module).hooks.wrap_method(module, name)


def reset(model: nn.Module) -> None:
    """Forget a forward or backward that an exception (or Ctrl-C) cut short. The next forward of the whole model does
    this by itself.
    """
    open_engine(model).hooks.reset()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside are not the last ones before the step: nothing of the step is begun in them.

    Never needed for exactness; with gradient accumulation it saves the first steps some updates in vain.
    """
    engine = open_engine(model)
    before, engine.more_backwards = engine.more_backwards, True
    try:
        yield
    finally:
        engine.more_backwards = before


def synchronize(model: nn.Module) -> None:
    """Wait until every queued update has reached the tiers; raises what the first failed one raised."""
    open_engine(model).pager.synchronize()


def stats(model: nn.Module) -> dict[str, Any]:
    """Counters since `offload`: bytes per link and tier, stalls by cause in seconds, hits and misses, steps.

    nvme_written_per_day: bytes per day at the rate since `offload`.
    drive_days_left: days until drives that were new then reach Tiers(nvme_tbw=...) at that rate; None without it.
    activations_offloaded, activations_restored: bytes of activations that left the device and came back.
    activations_written, activations_read: bytes of them on NVMe. activations_kept: bytes for which there was no room.
    activations_host, activations_nvme (and _peak): bytes of them there now. activation_hits, activation_misses: pieces
    that backward found in memory, or waited for.
    last_step: the last optimizer step, from the end of the one before to its own, or None: `wall_s` and the `parts_s`
    of the training thread that add up to it, `exposed_io_s` and `hidden_io_s`, bytes, busy seconds and GB/s by link,
    hit rate, the device's high-water mark. See docs/observe.md.
    update_chunks: chunks of state that the streamed step keeps under way at present; it looks for the fewest with which
    the drive is at its fastest. 0 without the native step.
    device_needed: the smallest device budget for what was run so far, with the weights that modules read of others.
    host_slab_bytes, host_touched_bytes, host_huge_bytes: the host tier's memory, what of it is in use, and what of that
    lies in huge pages; at most ten seconds old.
    """
    engine = engine_of(model)
    read, written = engine.moved()
    trace = engine.pager.trace
    seconds = time.monotonic() - engine.started
    touched, huge = engine.arena.pages(settled=engine.metrics.steps > 1)
    return {
        **engine.metrics.snapshot(),
        "activations_budget": engine.placement.activations,
        **(engine.activations.usage() if engine.activations is not None else {}),
        "host_slab_bytes": engine.arena.budget,
        "host_touched_bytes": touched,
        "host_huge_bytes": huge,
        "host_peak": engine.arena.peak,
        "nvme_read": read,
        "nvme_written": written,
        "nvme_written_per_day": per_day(written, seconds),
        "drive_days_left": days_left(engine.tiers.rated_bytes(), written, seconds),
        "departures": trace.departures,
        "units": len(engine.units),
        "resident_units": sum(unit.residency is State.READY for unit in engine.units),
        "last_step": engine.metrics.last_step.as_dict() if engine.metrics.last_step is not None else None,
        "update_chunks": engine.streamed.under_way,
        "native": engine.io is not None,
    }


def check_outside(engine: Engine, model: nn.Module, doing: str) -> None:
    """TierzeroError inside a forward or backward of the model, between its units and in hooks too."""
    backward = bool(engine.hooks.backward.tasks) and in_backward()
    if backward or is_running(model):
        where = "backward" if backward else "forward"
        raise TierzeroError(f"a {where} of the {type(model).__name__} goes on: {doing} outside of it")


def snapshot(
    model: nn.Module, optimizer: Optimizers = None, name: str | None = None, meta: dict[str, Any] | None = None
) -> None:
    """See tierzero.checkpoint.snapshot.snapshot."""
    engine = open_engine(model)
    check_outside(engine, engine.model() or model, "snapshot")
    engine.hooks.arrivals.check(engine.model() or model, trained=False)
    with engine.metrics.inside(SAVE, "save", "snapshot"):
        snapshots.snapshot(engine, optimizer, name, meta)


def rollback(model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """See tierzero.checkpoint.rollback.rollback."""
    engine = open_engine(model)
    check_outside(engine, engine.model() or model, "rollback")
    with engine.metrics.inside(SAVE, "save", "rollback"):
        return back.rollback(engine, optimizer)


def restore(model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """See tierzero.checkpoint.snapshot.restore."""
    engine = open_engine(model)
    check_outside(engine, engine.model() or model, "restore")
    with engine.metrics.inside(SAVE, "save", "restore"):
        return snapshots.restore(engine, optimizer)


def close(model: nn.Module) -> None:
    """Finish queued updates, free everything and release the store; without a committed snapshot its data file is
    deleted.
    """
    engine_of(model).close()
