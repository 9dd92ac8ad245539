"""Snapshots: everything a run needs to go on, kept in the store by pinning what is there."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save

from tierzero.checkpoint.beside import (
    Optimizers,
    check_buffers,
    check_groups,
    check_optimizers,
    describe_groups,
    persistent_buffers,
    put_back,
)
from tierzero.engine import Engine
from tierzero.errors import StoreError
from tierzero.model.model import describe
from tierzero.storage.blocks import checksum_of

BUFFERS = "buffers"  # the record that holds the model's persistent buffers, as safetensors
NAME = "snapshot"  # of one that was given no name
OWN = "engine"  # the key of what belongs to the engine in a snapshot's meta


def snapshot(
    engine: Engine, optimizer: Optimizers = None, name: str | None = None, meta: dict[str, Any] | None = None
) -> None:
    """Keep parameters, persistent buffers, optimizer states and step counts as snapshot `name`, with `meta` (JSON
    values) and the hyper-parameters of `optimizer`, or of several. It replaces the snapshot before it.

    Waits for queued updates first. Costs the bytes of records in host memory that changed since the snapshot before it,
    and a flush; records on NVMe are pinned where they are. StoreError without a store, OSError for a full or failing
    drive: the snapshot before it still stands then.
    """
    store = engine.store
    name, meta = NAME if name is None else name, {} if meta is None else meta
    _check(optimizer, name, meta)
    if store is None:
        raise StoreError(
            "snapshot() needs Tiers(nvme=DIRECTORY): a snapshot lies in its store. Use torch.save(model.state_dict(), "
            "path) without one"
        )
    engine.pager.synchronize()
    engine.reserve_for_snapshot()
    engine.run(engine.homes.settle_borrowed(engine.units))
    own = {
        **describe(engine.units, engine.placement.chunk),
        "borrowed": engine.homes.borrowed(engine.units),
        "tied": _tied(engine),
        "state": engine.states.describe(),
        "steps": {unit.name: list(unit.steps) for unit in engine.units},
        "generic": {unit.name: unit.generic.describe() for unit in engine.units if unit.generic is not None},
        "groups": describe_groups(optimizer),
        "lineage": engine.lineage,
    }
    kept = json.loads(json.dumps({**meta, OWN: own}))  # as it comes back, whatever the caller does with it
    buffers = {key: value.detach().cpu().clone().contiguous() for key, value in persistent_buffers(engine).items()}

    async def write() -> None:
        flushed: dict[str, int] = {}
        try:
            if buffers:
                await _flush_buffers(engine, torch.frombuffer(bytearray(save(buffers)), dtype=torch.uint8))
            await engine.homes.flush_host(engine.units, flushed)
            engine.homes.saved(flushed, await store.snapshot(name, kept))
        finally:
            for record in [*flushed, *([BUFFERS] if buffers and BUFFERS in store.current else [])]:
                store.remove(record)

    engine.run(write())


def _check(optimizer: Any, name: Any, meta: Any) -> None:
    """TypeError or ValueError for what cannot be a snapshot's."""
    check_optimizers(optimizer)
    if not isinstance(name, str):
        raise TypeError(
            f"the name of a snapshot is a string, not {type(name).__name__}: "
            'snapshot(model, optimizer, "step-1000", meta)'
        )
    if not name:
        raise ValueError("the name of a snapshot cannot be empty; leave it out if one is enough")
    if not isinstance(meta, dict):
        raise TypeError(f"the meta values of a snapshot are a dict, not {type(meta).__name__}")
    if OWN in meta:
        raise ValueError(f"the meta values of a snapshot cannot have the key {OWN!r}, which is its own")
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the meta values of a snapshot must be JSON (numbers, strings, lists, dicts): {error}. Turn tensors into "
            "lists, such as torch.get_rng_state().tolist()"
        ) from error


def _tied(engine: Engine) -> dict[str, str]:
    """The further names of parameters that have several, each with the one that the records know."""
    known = {id(param): name for unit in engine.units for param, name in zip(unit.rest, unit.names, strict=True)}
    model = engine.model()
    named = model.named_parameters(remove_duplicate=False) if model is not None else ()
    return {name: known[id(param)] for name, param in named if known.get(id(param), name) != name}


async def _flush_buffers(engine: Engine, raw: torch.Tensor) -> None:
    """Make `raw` the current buffers' record. Buffers count no changes: what the last snapshot has is read and
    compared, and `raw` is written only if it differs.
    """
    store = engine.store
    assert store is not None
    if store.recall(BUFFERS):
        same = store.current[BUFFERS].nbytes == raw.numel() and store.checksum_of(BUFFERS) == await checksum_of(raw)
        if same:  # most likely: the bytes decide
            there = torch.empty_like(raw)
            engine.metrics.add("nvme_read_expected", raw.numel())
            await store.read(BUFFERS, 0, there)
            if torch.equal(there, raw):
                return
    engine.metrics.add("nvme_written_expected", raw.numel())
    await store.put(BUFFERS, raw)


def restore(engine: Engine, optimizer: Optimizers) -> dict[str, Any]:
    """Put the buffers, step counts and hyper-parameters of the snapshot opened by offload(resume=...) back; returns the
    `meta` given to snapshot.
    """
    store = engine.store
    if store is None or store.resumed is None:
        raise StoreError("restore() needs a model offloaded with resume=True or resume=NAME")
    meta = dict(store.resumed.meta)
    own = meta.pop(OWN)
    check_groups(optimizer, own["groups"])
    if BUFFERS in store.current:
        raw = torch.empty(store.current[BUFFERS].nbytes, dtype=torch.uint8)
        engine.run(store.read(BUFFERS, 0, raw))
        engine.metrics.add("nvme_read_expected", raw.numel())
        put_buffers(engine, raw)
    put_back(engine, optimizer, own)
    engine.lineage = own["lineage"]  # what it saves from now on is of the same run
    return meta


def put_buffers(engine: Engine, raw: torch.Tensor) -> None:
    """Give the model's buffers the values that `raw` has. StoreError, and nothing is changed, if it has others."""
    saved = load(bytes(raw.numpy()))
    now = check_buffers(engine, saved)
    with torch.no_grad():
        for name, value in saved.items():
            now[name].copy_(value)
