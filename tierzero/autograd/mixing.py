"""Whether a unit may run its batch in pieces: what of it is known to mix the batch, and one trial that shows the rest.

Note [trial]
Before a unit's batch is cut for the first time (and again when one of its modules was switched to training or
evaluation), the unit runs two rows twice, once to see whether the first row of what it returns depends on the second
row of what it takes, and once the other way round. The gradient tells: rows that are independent have a gradient that
is exactly zero. So a batch statistic written by hand is found, and a batch that is not the first dimension (a sequence
there depends on itself). The same runs show buffers that forward changes, tensors of its inside that somebody outside
keeps (a hook that collects them), and tensors it takes from elsewhere than its arguments. What does not show: rows that
influence each other without a gradient (an expert's capacity, shared by the batch).
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tierzero.autograd.rows import Arguments
from tierzero.errors import TierzeroError

log = logging.getLogger("tierzero")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_ADVICE = "let the unit see the whole batch with micro_batches=1"


def check_norms(name: str, module: nn.Module) -> None:
    """TierzeroError if `module` holds a normalisation that uses, or keeps, statistics of the whole batch."""
    for inner_name, inner in module.named_modules():
        batch = isinstance(inner, _BATCH_NORMS) and (inner.training or inner.running_mean is None)
        if batch or (isinstance(inner, _INSTANCE_NORMS) and inner.training and inner.track_running_stats):
            raise TierzeroError(
                f"unit {name} holds a {type(inner).__name__} in training mode ({inner_name or 'the unit itself'}), "
                f"which mixes the rows of the batch: micro_batches would change its statistics. Put it into eval(), "
                f"use a norm without batch statistics, or {_ADVICE}"
            )


class Buffers:
    """The buffers of a module as they are now, to see whether a forward changes them."""

    def __init__(self, module: nn.Module, *, copy: bool = False) -> None:
        self.module = module
        self.before = {name: (id(b), b._version) for name, b in self._all()}
        self.copies = {name: b.detach().clone() for name, b in self._all()} if copy else {}

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, b) for name, b in self.module.named_buffers() if not b.is_inference())

    def check(self, name: str) -> None:
        """TierzeroError if unit `name` changed one."""
        for buffer, tensor in self._all():
            if self.before.get(buffer) != (id(tensor), tensor._version):
                with torch.no_grad():
                    for other, there in self._all():
                        if other in self.copies and there.shape == self.copies[other].shape:
                            there.copy_(self.copies[other])
                raise TierzeroError(
                    f"unit {name} changes its buffer {buffer} in forward (a running statistic, a power iteration), "
                    f"which micro_batches would make it do several times; put the module that does it into eval(), or "
                    f"{_ADVICE}"
                )


Run = Callable[[Sequence[torch.Tensor]], Any]


def try_two_rows(name: str, module: nn.Module, arguments: Arguments, run: Run, known: Iterable[torch.Tensor]) -> None:
    """Make the trial of Note [trial] on unit `name`: `run(tensors)` is its forward with these tensors in place of
    those of `arguments`, `known` are the parameters whose gradients are taken care of. TierzeroError if it cannot be
    cut.
    """
    buffers = Buffers(module, copy=True)
    known_ids = {id(tensor) for tensor in known}
    try:
        for row in (0, 1):
            _one_row(name, module, arguments, run, known_ids, row)
    except torch.OutOfMemoryError:
        log.warning(
            "unit %s could not be tried on two rows of its batch for lack of memory: whether it mixes the batch was "
            "not checked",
            name,
        )
    buffers.check(name)


def _one_row(name: str, module: nn.Module, arguments: Arguments, run: Run, known: set[int], row: int) -> None:
    """See whether row `row` of the results depends on the other row of the arguments."""
    tensors = [
        tensor.detach().requires_grad_(tensor.requires_grad or (cut and _differentiable(tensor)))
        for tensor, cut in zip(arguments.take(arguments.tensors, 0, 2), arguments.cut, strict=True)
    ]
    asked = [t for t, cut in zip(tensors, arguments.cut, strict=True) if cut and _differentiable(t)]
    # a checkpoint around the unit counts what passes through its hooks
    own = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _itself)
    with torch.enable_grad(), own, _inside(module) as inside:
        output = run(tensors)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        weighted = [_of_row(name, leaf, row) for leaf in results if leaf.requires_grad and leaf.is_floating_point()]
    _check_leaves(name, results, known | {id(tensor) for tensor in tensors})
    if asked and weighted:
        try:
            grads = torch.autograd.grad(weighted, asked, [_weights(part) for part in weighted], allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            grads = ()  # a reentrant checkpoint inside answers no such question
        for grad in grads:
            if grad is not None and bool((torch.isfinite(grad[1 - row]) & (grad[1 - row] != 0)).any()):
                raise TierzeroError(
                    f"unit {name} mixes the rows of its batch: what it returns for one row depends on another row, or "
                    "the batch is not the first dimension of what it takes (batch_first=False). micro_batches would "
                    f"change its results; {_ADVICE}"
                )
        del grads
    del output, results, weighted
    _check_kept(name, inside, known | {id(tensor) for tensor in tensors})


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _of_row(name: str, leaf: torch.Tensor, row: int) -> torch.Tensor:
    """What of a result for two rows belongs to `row`."""
    if not leaf.ndim or leaf.shape[0] % 2 or not leaf.shape[0]:
        raise TierzeroError(
            f"unit {name} returns a tensor of shape {list(leaf.shape)} for two rows of its batch: its first dimension "
            "is not the batch, and micro_batches cannot put it together from pieces (a loss or a mean would be another "
            f"one); leave it out, or {_ADVICE}"
        )
    half = leaf.shape[0] // 2
    return leaf.narrow(0, row * half, half)


def _weights(part: torch.Tensor) -> torch.Tensor:
    """Numbers without a pattern that a norm would cancel (the sum of a layer norm's results is constant)."""
    count = torch.arange(part.numel(), device=part.device, dtype=torch.float32)
    return torch.cos(count * count * 0.37).view(part.shape).to(part.dtype)


@contextmanager
def _inside(module: nn.Module) -> Iterator[list[tuple[str, weakref.ref[torch.Tensor]]]]:
    """Weak references to all that modules inside `module` return meanwhile, with the modules' names."""
    found: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(inner: nn.Module, args: Any, output: Any) -> None:
            found.extend((name, weakref.ref(leaf)) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))

        return hook

    handles = [inner.register_forward_hook(note(name)) for name, inner in module.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _check_kept(name: str, inside: Sequence[tuple[str, weakref.ref[torch.Tensor]]], known: set[int]) -> None:
    """TierzeroError if something with a gradient that a module inside returned is still there; `known` are the ids of
    what may be.
    """
    for collect in (False, True):
        if collect:
            gc.collect()
        alive = [(where, tensor) for where, ref in inside if (tensor := ref()) is not None]
        left = [where for where, tensor in alive if tensor.requires_grad and id(tensor) not in known]
        if not left:
            return
        del alive
    raise TierzeroError(
        f"unit {name}: what its module {left[0]} returns is kept after forward by a hook or an attribute (collected "
        "attention weights or router logits, say). micro_batches would leave pieces there, without a way back for "
        f"their gradients: turn that off (output_attentions, output_router_logits), or {_ADVICE}"
    )


def _check_leaves(name: str, results: Sequence[torch.Tensor], known: set[int]) -> None:
    """TierzeroError if the graph behind `results` begins anywhere else than at the tensors with the ids `known`."""
    waiting = [leaf.grad_fn for leaf in results if leaf.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise TierzeroError(
                f"unit {name} uses a tensor of shape {list(leaf.shape)} that requires a gradient and is neither one of "
                "its arguments nor one of its offloaded parameters, so micro_batches cannot take its gradient along: "
                "pass it as an argument, add it before offload(), or leave micro_batches at 1"
            )
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
