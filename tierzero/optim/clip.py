"""Gradient clipping by the global norm that leaves gradients alone: the coefficient is folded into the next step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tierzero.errors import TierzeroError
from tierzero.monitoring.clock import ENGINE
from tierzero.optim.norms import unit_norms, without_grad
from tierzero.units.paged import Paged
from tierzero.units.unit import ParamSource, Unit


def place_of(param: torch.Tensor) -> tuple[Unit, int] | None:
    """The unit and index of an offloaded model's parameter, None for any other tensor."""
    if isinstance(param, Paged) and isinstance(param.source, ParamSource):
        return param.source.unit, param.source.index
    return None


@contextmanager
def engine_time(owners: Iterable[Any], name: str) -> Iterator[None]:
    """What happens inside is the time of these engines; `name` shows it to whoever watches them."""
    with ExitStack() as stack:
        for owner in dict.fromkeys(owners):
            stack.enter_context(owner.metrics.inside(ENGINE, "optimizer", name))
        yield


@without_grad
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the gradients of `parameters` together to `max_norm`; returns the total norm before clipping, a float32
    scalar.

    As torch.nn.utils.clip_grad_norm_ on float32 gradients, to the last bit: a norm per parameter, in the given order,
    then the norm of those; coefficient max_norm / (norm + 1e-6), at most 1. The coefficient waits for `step()`: `.grad`
    stays unscaled. Gradients of parameters outside the offloaded model are scaled in place. Raises RuntimeError for a
    non-finite norm if `error_if_nonfinite`.
    """
    if norm_type != 2.0:
        raise TierzeroError(
            f"tierzero.clip_grad_norm_ clips by the 2-norm, not norm_type={norm_type}; torch.nn.utils.clip_grad_norm_ "
            "does others, slower"
        )
    if not max_norm >= 0 or math.isnan(max_norm):
        raise ValueError(f"max_norm must be zero or more, got {max_norm}")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    params = [param for param in params if param.grad is not None]
    if not params:
        return torch.tensor(0.0)
    places = [place_of(param) for param in params]
    with engine_time((place[0].owner for place in places if place is not None), "clip"):
        return _clip(params, max_norm, error_if_nonfinite)


def _clip(params: list[torch.Tensor], max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
    norms: list[torch.Tensor] = []
    for param in params:
        place = place_of(param)
        if place is not None:  # clipped before without a step: the plain loop would have scaled the gradient then
            place[0].fold_clip(place[1], scale=False)
    known: dict[Unit, list[float]] = {}
    for param in params:
        place = place_of(param)
        if place is None:
            assert param.grad is not None
            norms.append(torch.linalg.vector_norm(param.grad.float()).cpu())
            continue
        unit, index = place
        if unit not in known:
            known[unit] = unit_norms(unit)
        norms.append(torch.tensor(known[unit][index], dtype=torch.float32))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of the gradients is {float(total)}, so they cannot be clipped; set "
            "error_if_nonfinite=False to go on"
        )
    coefficient: torch.Tensor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for param in params:
        place = place_of(param)
        if place is None:
            assert param.grad is not None
            param.grad.mul_(coefficient.to(param.grad.device))
        else:
            place[0].coef[place[1]] = float(coefficient)
    return total
