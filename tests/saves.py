"""What the tests of save and load share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from models import Tied
from oracle import Tiered, batches, loss_of, make, tiered, tiers_for
from torch import nn

import tierzero as tz


def files_of(directory: Path) -> list[str]:
    """The names in a directory, hidden ones too."""
    return sorted(one.name for one in directory.iterdir())


def step(
    run: Any,
    data: Any,
    *,
    micro: tuple[int, int] = (0, 2),
    accumulate: int = 2,
    scheduler: Any = None,
    scaler: Any = None,
    stop: bool = True,
) -> list[torch.Tensor]:
    """Micro-batches micro[0] to micro[1] of one step on a plain or an offloaded model, and with `stop` its end. The
    losses.
    """
    losses = []
    for _ in range(*micro):
        loss = loss_of(run.model, next(data))
        losses.append(loss.detach())
        whole = loss / accumulate
        (whole if scaler is None else scaler.scale(whole)).backward()
    if stop:
        if scaler is None:
            run.step(0.5)
        else:
            scaler.step(run.optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        run.zero_grad()
    return losses


def trained(run: Any, steps: int, seed: int = 1, **options: Any) -> Any:
    """`run` after some steps; the data that come next."""
    data = batches(2 * steps + 40, seed)
    for _ in range(steps):
        step(run, data, **options)
    return data


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters."""
    return {name: param.read() for name, param in model.named_parameters()}  # type: ignore[operator]


Save = Callable[[Any, Path], tz.Saving]


@contextmanager
def saved_once(folder: Path) -> Iterator[Tiered]:
    """A model that has taken a step and is saved in folder/saves/one, and then another step."""
    model = make(Tied)
    with tiered(model, tiers_for(model, "mixed", folder / "store")) as found:
        step(found, batches(2))
        states = {"plain": {"x": 1}, "module": torch.nn.Linear(2, 2)}
        tz.save(found.model, folder / "saves" / "one", found.optimizer, states=states, wait=True)
        step(found, batches(2))
        yield found
