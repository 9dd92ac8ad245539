"""Gradient norms, one per parameter, equal to the last bit to torch.linalg.vector_norm of the float32 gradient."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tierzero.monitoring.clock import GRADIENT
from tierzero.native import NATIVE
from tierzero.units.unit import Unit

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
    with unit.owner.metrics.inside(GRADIENT):
        unit.finish_grads()
    if unit.grad_block is None:
        return [0.0] * len(grads)
    if unit.norming is not None and not unit.norming.done():
        with unit.owner.metrics.timed("stall_grad_s", f"norms of {unit.name}"):
            unit.owner.run(asyncio.wait([unit.norming]))
    present = tuple(grad is not None for grad in grads)
    of = (unit.grad_block.tensor._version, present, tuple(unit.unscaled))
    if unit.norms is None or unit.touched or unit.norms[0] != of:
        tensors = [_unscaled(unit, index, grad) for index, grad in enumerate(grads) if grad is not None]
        values = iter(_norms(tensors))
        unit.norms = of, [next(values) if there else 0.0 for there in present]
    return unit.norms[1]


def _unscaled(unit: Unit, index: int, grad: torch.Tensor) -> torch.Tensor:
    flat = grad.reshape(-1)
    return flat if unit.unscaled[index] == 1.0 else flat.float() * unit.unscaled[index]


def begin_norms(unit: Unit) -> None:
    """Start computing the norms, so that they are there when somebody asks. Any later change makes them useless."""
    if NATIVE is None or unit.grad_block is None or unit.touched:
        return  # torch's own kernels would take its threads
    block = unit.grad_block.tensor
    if unit.norming is not None and unit.normed == block._version:
        return
    unit.normed = block._version
    present = tuple(rest.grad is not None for rest in unit.rest)
    as_is = (1.0,) * len(present)
    tensors = [
        view.reshape(-1) for view, there in zip(unit.grad_views, present, strict=True) if there and view is not None
    ]

    def compute() -> tuple[int, list[float]]:
        unit.finish_grads()
        start = time.perf_counter_ns()
        found = block._version, _norms(tensors, threads=1)
        recorder = unit.owner.metrics.recorder
        if recorder is not None:
            recorder.add("norms", "norms", f"norms {unit.name}", start, time.perf_counter_ns())
        return found

    async def work() -> None:
        version, values = await asyncio.get_running_loop().run_in_executor(None, compute)
        if block._version == version and not unit.touched:
            each = iter(values)
            unit.norms = (version, present, as_is), [next(each) if there else 0.0 for there in present]

    def start() -> None:
        unit.norming = asyncio.ensure_future(work())

    unit.owner.loop.call(start)


def _norms(tensors: list[torch.Tensor], threads: int | None = None) -> list[float]:
    if NATIVE is not None:
        return list(NATIVE.l2_norms(tensors, threads=threads or max(1, torch.get_num_threads())))
    return [float(torch.linalg.vector_norm(tensor.float())) for tensor in tensors]


def is_finite(unit: Unit, index: int) -> bool:
    """Whether every element of a gradient is finite. A norm may overflow although they all are."""
    grad = unit.grad(index)
    return grad is None or bool(torch.isfinite(grad).all())
