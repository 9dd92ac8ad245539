"""Gradient norms, one per parameter, equal to the last bit to torch.linalg.vector_norm of the float32 gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tierzero.native import NATIVE
from tierzero.unit import Unit

P = ParamSpec("P")
R = TypeVar("R")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """As torch.no_grad(), which leaves gradients off when a signal handler raises as it is entered or left. The C
    function behind it leaves no room for one.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return wrapper


def unit_norms(unit: Unit) -> list[float]:
    """The norm of each parameter's gradient in float32 (0.0 where there is none), known since the last change of the
    gradients or computed now.
    """
    grads = [unit.grad(index) for index in range(len(unit.rest))]
    unit.finish_grads()
    if unit.grad_block is None:
        return [0.0] * len(grads)
    version = unit.grad_block.tensor._version
    present = tuple(grad is not None for grad in grads)
    if unit.norms is None or unit.touched or unit.norms[0] != (version, present):
        tensors = [grad.reshape(-1) for grad in grads if grad is not None]
        values = iter(_norms(tensors))
        unit.norms = (version, present), [next(values) if there else 0.0 for there in present]
    return unit.norms[1]


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    if NATIVE is not None:
        return list(NATIVE.l2_norms(tensors, threads=max(1, torch.get_num_threads())))
    return [float(torch.linalg.vector_norm(tensor.float())) for tensor in tensors]


def is_finite(unit: Unit, index: int) -> bool:
    """Whether every element of a gradient is finite. A norm may overflow although they all are."""
    grad = unit.grad(index)
    return grad is None or bool(torch.isfinite(grad).all())
