"""Snapshots: everything a run needs to go on, committed in the store by pinning what is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load, save

from tierzero.blocks import checksum_of
from tierzero.engine import Engine
from tierzero.errors import StoreError
from tierzero.model import describe
from tierzero.paged import Paged

BUFFERS = "buffers"  # the record that holds the model's persistent buffers, as safetensors


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def _groups(optimizer: Optimizers) -> list[dict[str, Any]]:
    """The parameter groups of one optimizer, or of several one after another."""
    if optimizer is None:
        return []
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return [group for one in several for group in one.param_groups]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def commit(engine: Engine, optimizer: Optimizers, name: str, meta: dict[str, Any]) -> None:
    """Commit parameters, persistent buffers, optimizer states and step counts as snapshot `name`, with `meta` (JSON
    values). It replaces the snapshot before it.

    Waits for queued updates first. Costs the bytes of records in host memory that changed since the snapshot before it,
    and a flush; records on NVMe are pinned where they are.
    """
    store = engine.store
    if store is None:
        raise StoreError(
            "commit() needs Tiers(nvme=DIRECTORY): a snapshot lies in its store. Use torch.save(model.state_dict(), "
            "path) without one"
        )
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the meta values of a snapshot must be JSON (numbers, strings, lists, dicts): {error}. Turn tensors into "
            "lists, "
            "such as torch.get_rng_state().tolist()"
        ) from error
    engine.pager.synchronize()
    engine.reserve_for_snapshot()
    own = {
        **describe(engine.units, engine.placement.chunk),
        "state": engine.states.describe(),
        "steps": {unit.name: unit.steps for unit in engine.units},
        "generic": {unit.name: unit.generic.describe() for unit in engine.units if unit.generic is not None},
        "groups": [
            {key: _plain(value) for key, value in group.items() if key != "params"} for group in _groups(optimizer)
        ],
    }

    buffers = {key: value.detach().cpu().clone().contiguous() for key, value in _buffers(engine).items()}

    async def write() -> None:
        flushed: dict[str, int] = {}
        try:
            if buffers:
                await _flush_buffers(engine, torch.frombuffer(bytearray(save(buffers)), dtype=torch.uint8))
            await engine.homes.flush_host(engine.units, flushed)
            engine.homes.saved(flushed, await store.snapshot(name, {**meta, "engine": own}))
        finally:
            for record in [*flushed, *([BUFFERS] if buffers and BUFFERS in store.current else [])]:
                store.remove(record)

    engine.run(write())


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
    `meta` given to commit.
    """
    store = engine.store
    if store is None or store.resumed is None:
        raise StoreError("restore() needs a model offloaded with resume=True or resume=NAME")
    meta = dict(store.resumed.meta)
    own = meta.pop("engine")
    groups = _groups(optimizer)
    if optimizer is not None and len(groups) != len(own["groups"]):
        raise ValueError(
            f"the snapshot has {len(own['groups'])} parameter groups and this optimizer {len(groups)}: build it over "
            "the same groups"
        )
    _restore_buffers(engine)
    for unit in engine.units:
        unit.steps[:] = own["steps"][unit.name]
    for group, saved in zip(groups, own["groups"] if groups else [], strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
    for one in engine.optimizers:
        one.restored()
    return meta


def _buffers(engine: Engine) -> dict[str, torch.Tensor]:
    """The model's persistent buffers by name."""
    model = engine.model()
    if model is None:
        return {}
    state = model.state_dict(keep_vars=True)
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: value
        for name, value in state.items()
        if name not in params and isinstance(value, torch.Tensor) and not isinstance(value, Paged)
    }


def _restore_buffers(engine: Engine) -> None:
    store = engine.store
    assert store is not None
    if BUFFERS not in store.current:
        return
    raw = torch.empty(store.current[BUFFERS].nbytes, dtype=torch.uint8)
    engine.run(store.read(BUFFERS, 0, raw))
    engine.metrics.add("nvme_read_expected", raw.numel())
    saved = load(bytes(raw.numpy()))
    now = _buffers(engine)
    if saved.keys() != now.keys() or any(saved[name].shape != now[name].shape for name in saved):
        differing = sorted(saved.keys() ^ now.keys()) or [n for n in saved if saved[n].shape != now[n].shape]
        raise StoreError(f"the snapshot was written by a model with other buffers (first difference: {differing[0]})")
    with torch.no_grad():
        for name, value in saved.items():
            now[name].copy_(value)
