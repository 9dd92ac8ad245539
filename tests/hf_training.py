"""Training a Hugging Face model plain and offloaded in lockstep, everything compared bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hf_models import Batch, Case, cast, seed
from oracle import Plain, Tiered, assert_same, same
from torch import nn

import tierzero as tz

CLIP = 0.6  # of the norm, on every third step; the others stay below their limit


def train_equal(
    runs: Sequence[tuple[str, Tiered]],
    plain: Plain,
    case: Case,
    dtype: torch.dtype,
    *,
    steps: int = 5,
    accumulate: int = 2,
    base: int = 0,
) -> list[torch.Tensor]:
    """Train all in lockstep with the same seeds; losses, clip norms, and at the end everything else must be equal.

    `base` counts the steps taken before. Returns the plain loop's losses.
    """
    generator = torch.Generator().manual_seed(1 + base)
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            batch = cast(case.batch(generator), dtype)
            expected = loss_of(plain.model, case, batch, (base + step) * accumulate + micro)
            (expected / accumulate).backward()
            losses.append(expected.detach())
            for name, run in runs:
                value = loss_of(run.model, case, batch, (base + step) * accumulate + micro)
                where = f"{name}, step {step}, micro-batch {micro}"
                assert same(value, expected), f"{where}: the loss is {value.item()!r}, not {expected.item()!r}"
                (value / accumulate).backward()
        max_norm = plain.norm() * (CLIP if step % 3 == 1 else 2.0)
        total = plain.step(max_norm)
        plain.zero_grad()
        for name, run in runs:
            own = run.step(max_norm)
            run.zero_grad()
            assert own is not None
            assert total is not None
            assert same(own, total), f"{name}, step {step}: the clip norm is {own.item()!r}, not {total.item()!r}"
    for name, run in runs:
        assert_same(run, plain, name)
        stats = tz.stats(run.model)
        assert stats["steps"] == base + steps
        assert stats["skipped_steps"] == 0
    return losses


def loss_of(model: nn.Module, case: Case, batch: Batch, number: int) -> torch.Tensor:
    """The model's loss, with every generator seeded from `number`."""
    seed(number)
    return case.loss(model(**copied(batch)))


def copied(value: Any) -> Any:
    """A batch of its own: some models write into what they are given."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def generators_kept() -> Iterator[None]:
    """Python's and numpy's generators are afterwards what they were."""
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def losses_of(plain: Plain, case: Case, *, steps: int = 5) -> list[float]:
    """The losses and norms of the plain loop alone, as train_equal runs it without accumulation."""
    generator, found = torch.Generator().manual_seed(1), []
    for step in range(steps):
        loss = loss_of(plain.model, case, case.batch(generator), step)
        loss.backward()
        norm = plain.norm()
        found += [float(loss), norm]
        plain.step(norm * (CLIP if step % 3 == 1 else 2.0))
        plain.zero_grad()
    return found
