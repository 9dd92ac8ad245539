"""What a checkpoint holds beside the records: persistent buffers, step counts and hyper-parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tierzero.engine import Engine
from tierzero.errors import StoreError
from tierzero.units.paged import Paged

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def groups_of(optimizer: Optimizers) -> list[dict[str, Any]]:
    """The parameter groups of one optimizer, or of several one after another."""
    if optimizer is None:
        return []
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return [group for one in several for group in one.param_groups]


def check_optimizers(optimizer: Any) -> None:
    """TypeError for what is no optimizer, no list of them and not None."""
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    fits = isinstance(several, Sequence) and all(isinstance(one, torch.optim.Optimizer) for one in several)
    if optimizer is not None and not fits:
        raise TypeError(f"optimizer must be an optimizer, a list of them or None, got {type(optimizer).__name__}")


def describe_groups(optimizer: Optimizers) -> list[dict[str, Any]]:
    """The hyper-parameters of every group."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups_of(optimizer)]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def check_groups(optimizer: Optimizers, saved: list[dict[str, Any]]) -> None:
    """ValueError if `saved` cannot be put into the groups of `optimizer`."""
    groups = groups_of(optimizer)
    if optimizer is not None and len(groups) != len(saved):
        raise ValueError(
            f"the snapshot has {len(saved)} parameter groups and this optimizer {len(groups)}: build it over "
            "the same groups"
        )


def put_back(engine: Engine, optimizer: Optimizers, own: dict[str, Any]) -> None:
    """Set step counts and hyper-parameters to those that a snapshot describes; its groups have been checked."""
    groups = groups_of(optimizer)
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


def persistent_buffers(engine: Engine) -> dict[str, torch.Tensor]:
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


def check_buffers(engine: Engine, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's persistent buffers. StoreError if others are in the snapshot."""
    now = persistent_buffers(engine)
    if saved.keys() != now.keys() or any(saved[name].shape != now[name].shape for name in saved):
        differing = sorted(saved.keys() ^ now.keys()) or [n for n in saved if saved[n].shape != now[n].shape]
        raise StoreError(f"the snapshot was written by a model with other buffers (first difference: {differing[0]})")
    return now
