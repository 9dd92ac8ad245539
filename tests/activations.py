"""What the tests of moved activations share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from models import Net
from oracle import Plain, Tiered, assert_same, make, tiered, tiers_for
from torch import nn

import tierzero as tz

PAGE = 4096
ROOMS = {"host": (None, 1 << 20), "spilled": ("nvme", 2 * PAGE), "some stays": (None, 2 * PAGE)}


def with_activations(model: nn.Module, placement: str, directory: Path, nbytes: int, **options: Any) -> tz.Tiers:
    """The smallest budgets that work, with `nbytes` for activations."""
    tiers = tiers_for(model, placement, directory, **options)
    return dataclasses.replace(tiers, host=int(tiers.host) + nbytes, activations=nbytes)


@contextmanager
def pair(
    directory: Path,
    factory: Callable[[], nn.Module] = Net,
    room: str = "spilled",
    dtype: torch.dtype = torch.float32,
    units: Callable[[nn.Module], Any] | None = None,
) -> Iterator[tuple[Plain, Tiered]]:
    """A model under the plain loop and the same one offloaded with its activations; compared at the end."""
    nvme, nbytes = ROOMS[room]
    model, plain = make(factory, dtype), Plain(make(factory, dtype))
    cut = None if units is None else units(model)
    tiers = with_activations(model, nvme or "host", directory, nbytes, units=cut)
    with tiered(model, tiers, units=cut) as run:
        yield plain, run
        assert_same(run, plain)


def usage(run: Tiered) -> dict[str, int]:
    """Bytes of activations, by where they are."""
    assert run.engine.activations is not None
    return run.engine.activations.usage()


def moved_all(run: Tiered) -> None:
    """Return when nothing waits for its copy any more."""
    activations = run.engine.activations
    assert activations is not None
    run.engine.run(activations.pool.settle(0))
