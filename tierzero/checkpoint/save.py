"""save: a training run as a directory that torch.distributed.checkpoint reads, written while training goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tierzero.api import check_outside, open_engine
from tierzero.checkpoint.contents import checked_values, gather
from tierzero.checkpoint.frozen import freeze
from tierzero.checkpoint.given import path_of
from tierzero.checkpoint.place import Place
from tierzero.checkpoint.randomness import random_state
from tierzero.checkpoint.saving import Saving
from tierzero.errors import TierzeroError
from tierzero.monitoring.clock import SAVE


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    states: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
    gradients: bool = True,
    random: bool = True,
    keep: int | None = None,
    overwrite: bool = False,
    wait: bool = False,
    limit: int = 0,
) -> Saving:
    """Save a run into the directory `path`, while training goes on: the parameters and persistent buffers of the
    offloaded `model`, the states and hyper-parameters of `optimizer` (one of this package's, or several), and what is
    given here. `load` resumes from it bit for bit, under any placement, budget and drives.

    The directory is a checkpoint of torch.distributed.checkpoint in its canonical layout (model.<name>,
    optimizer.state.<name>.exp_avg, ...), which `dcp.load` reads without this package. It appears under its name when it
    is whole and durable; until then, and whatever happens, all that was there before stays.

    states: by name, objects with state_dict() and load_state_dict() (schedulers, scalers, data loaders, modules), or
    plain values. meta: JSON values (the position in the data), which `load` returns. gradients: also the `.grad` of the
    parameters, so that a run can be saved between the micro-batches of a step; without effect after zero_grad().
    random: also the state of the random generators of torch, CUDA, Python and NumPy.
    keep: delete all but the last `keep` checkpoints of this run in the directory above once this one, which counts, is
    durable. A run is what has saved them, with all that has loaded them to go on; those of other runs stay.
    overwrite: replace a checkpoint of that name. What is no checkpoint of this package is never replaced or deleted.
    wait: return when it is done. limit: bytes per second to write at most, 0: no limit.

    Returns a Saving. Raises TierzeroError inside a forward, backward or `unsharded`, StoreError for a target that is
    not ours or there already, TypeError for states that cannot be loaded safely, OSError(ENOSPC) if the drive has no
    room; and what an earlier save of the model failed with, if nobody has seen that.
    """
    engine = open_engine(model)
    check_outside(engine, engine.model() or model, "save")
    engine.hooks.arrivals.check(engine.model() or model, trained=False)
    given = checked_values(states, meta, keep, limit)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the path comes second, then the optimizer: save(model, path, optimizer), not {path!r:.40}")
    target = Path(os.path.abspath(path_of(path, "a checkpoint")))
    if engine.last_save is not None:
        engine.last_save.result()
    with engine.metrics.inside(SAVE, "save", f"save {path}"):
        place = Place(target, overwrite)
        try:
            frozen = freeze(engine, gradients=gradients)
            try:
                contents = gather(frozen, model, optimizer, states or {}, given, gradients=gradients)
                if random:
                    contents.extra["random"] = random_state()
                saving = Saving(engine, place, frozen, contents, given, keep, limit)
            except BaseException:
                frozen.release()
                raise
        except BaseException:
            place.close()
            raise
        try:
            saving.begin()
        except TierzeroError:  # the engine was closed meanwhile
            if not saving.begun:
                saving.give_up()
            raise
        if wait:
            saving.result()
    return saving
