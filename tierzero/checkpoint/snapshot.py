"""Snapshots: everything a run needs to go on, committed in the store by pinning what is there."""

from __future__ import annotations

from typing import Any

import torch

from tierzero.engine import Engine
from tierzero.errors import StoreError


def commit(engine: Engine, optimizer: torch.optim.Optimizer | None, name: str, meta: dict[str, Any]) -> None:
    """Commit parameters, optimizer states and step counts as snapshot `name`, with `meta` (JSON values). It replaces
    the snapshot before it.

    Waits for queued updates first. Costs the bytes of records in host memory and a flush; records on NVMe are pinned
    where they are.
    """
    store = engine.store
    if store is None:
        raise StoreError(
            "commit() needs Tiers(nvme=DIRECTORY): a snapshot lies in its store. Use torch.save(model.state_dict(), "
            "path) without one"
        )
    engine.pager.synchronize()
    engine.reserve_for_snapshot()
    own = {
        **engine.describe(),
        "steps": {unit.name: unit.steps for unit in engine.units},
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        if optimizer is not None
        else [],
    }

    async def write() -> None:
        flushed: list[str] = []
        try:
            flushed = await engine.homes.flush_host(engine.units)
            await store.snapshot(name, {**meta, "engine": own})
        finally:
            for record in flushed:
                store.remove(record)

    engine.run(write())


def restore(engine: Engine, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Put the step counts and hyper-parameters of the snapshot opened by offload(resume=...) back; returns the `meta`
    given to commit.
    """
    store = engine.store
    if store is None or store.resumed is None:
        raise StoreError("restore() needs a model offloaded with resume=True or resume=NAME")
    meta = dict(store.resumed.meta)
    own = meta.pop("engine")
    for unit in engine.units:
        unit.steps[:] = own["steps"][unit.name]
    if optimizer is not None:
        for group, saved in zip(optimizer.param_groups, own["groups"], strict=True):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
        for unit in engine.units:
            for index, param in enumerate(unit.rest):
                if param in optimizer.state:
                    optimizer.state[param]["step"].fill_(unit.steps[index])
    return meta
