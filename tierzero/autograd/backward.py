"""When things move in backward: autograd's events become pager.begin_backward / end_backward, gradients leave.

Note [backward]
A hook on each output that requires a gradient makes the unit resident before its backward begins. A post-accumulate
hook on each live parameter takes the gradient to the host at once, in autograd's own order, so that sums round as in
the plain loop. Hooks on the inputs tell that the backward is over. No node is added to the graph: an identity function
on the inputs would change the order in which their gradients are summed (and refuse in-place operations on them). All
of these only say when bytes may leave; that they are there is the unpack hook's business. The live parameters are
registered meanwhile: what a checkpoint inside the unit recomputes may use them without calling the unit's module.

An input that is passed on as an output is not the unit's: its gradient arrives in the backward of the unit that made
it, whose weights may be held by what a checkpoint has recomputed, and must not be taken away for this one.

Note [cut short backwards]
After an error autograd drops the callback that would have told the end, and its `__del__` tidies up. A gradient that no
hook has taken yet is dropped with it: left in the live parameter, the next one would be added to it.

Private torch names used here, and why:
- torch._C._current_graph_task_id: the only way to know that a forward runs inside a backward.
- Variable._execution_engine.queue_callback: the only way to run code at the end of a backward, for units whose input
hooks never fire.
- RemovableHandle.hooks_dict_ref: whether a hook is there still, and to run the "backward is over" hook of a tensor
before the "backward begins" hook of the unit that made it.
- Tensor._version: whether an output is an input that was not changed in place.
- Parameter._backward_hooks, _post_accumulate_grad_hooks: hooks users put on a parameter at rest must run with its
gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from tierzero.autograd.tensors import tensors_in
from tierzero.errors import TierzeroError
from tierzero.monitoring.clock import D2H, ENGINE
from tierzero.paging.pager import Pager
from tierzero.units.unit import Unit


class Backward:
    """The backwards through one offloaded model. `end_frames(task, over)` ends the forwards that a backward recomputed;
    `over` tells whether the backward is.
    """

    def __init__(self, units: list[Unit], pager: Pager, end_frames: Callable[[int, bool], None]) -> None:
        self.pager = pager
        self.end_frames = end_frames
        self.units = units
        self.tasks: set[int] = set()  # the backwards going on
        self.cut = False  # one was cut short, and what it left is not tidied up yet
        self._held: set[int] = set()  # ids of live parameters whose gradients stay with them for the moment
        self._leaf_hooks: list[Any] = []
        # opaque to the compiler; not a decorator, because that would import it with this module
        self.metrics = pager.metrics
        self._over, self._ends = self.metrics.engine(self._inputs_done), self.metrics.engine(self._ended)
        self.pre_backward = torch.compiler.disable(self.metrics.engine(self._pre_backward))
        for unit in units:
            for index, live in enumerate(unit.live):
                if unit.layout.places[index].grad >= 0:
                    live.register_post_accumulate_grad_hook(
                        functools.partial(_arrived, weakref.ref(self), unit.uid, index)
                    )

    def reset(self) -> None:
        """Forget backwards that were cut short."""
        if self.unfinished:
            for unit in self.units:
                for live in unit.live:
                    live.grad = None  # its hook had no time to take it, and the next one would be added to it
        self._held.clear()
        self._end_backwards()
        self.tasks.clear()
        self.cut = False

    @property
    def unfinished(self) -> bool:
        """Whether a backward is going on, or was cut short and left something."""
        return self.cut or bool(self.tasks)

    def fault(self, unit: Unit) -> None:
        """A node is about to use a weight of `unit`."""
        if in_backward():
            _refuse_double(unit)
        if not unit.in_backward and not unit.pins:
            self.pager.metrics.add("faults")
            self._backward_begins(unit)

    def _pre_backward(self, unit: Unit) -> None:
        _refuse_double(unit)
        if not unit.in_backward:
            self._backward_begins(unit)
        if self.metrics.watch is not None:
            self.metrics.watch.begin(("backward", unit.uid), "backward", unit.name)

    def _backward_begins(self, unit: Unit) -> None:
        if in_backward():  # frames are left of it where torch silenced an exception in the hook after a recomputation
            self.end_frames(torch._C._current_graph_task_id(), False)
        self.note_task()
        self.pager.begin_backward(unit, record=True)

    def note_task(self) -> None:
        """See to it that the end of this backward is noticed."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self.tasks:
            self.tasks.add(task)
            Variable._execution_engine.queue_callback(_BackwardEnd(self, task))
            if self.metrics.watch is not None:
                self.metrics.watch.begin(self, "pass", "backward")

    def watch_inputs(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Notice when the gradients of all inputs are there: the unit's backward is over."""
        inputs = [tensor for tensor in tensors_in((*args, *kwargs.values())) if tensor.requires_grad]
        watched = Inputs(len(inputs))
        left, over = watched.left, self._over

        def fired(grad: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                over(unit)

        for tensor in inputs:
            handle = tensor.register_hook(fired)
            _run_first(handle)
            self._keep(tensor, handle)
            watched.add(tensor, handle)
        return watched

    def _inputs_done(self, unit: Unit) -> None:
        if self.metrics.watch is not None:
            self.metrics.watch.end(("backward", unit.uid))
        self.pager.end_backward(unit)
        unit.owner.gradients_final(unit)

    def watch_output(self, unit: Unit, tensor: torch.Tensor) -> None:
        """Make `unit` resident before the backward that begins at its output `tensor`."""
        self._keep(tensor, tensor.register_hook(lambda grad: self.pre_backward(unit)))

    def _keep(self, tensor: torch.Tensor, handle: Any) -> None:
        """Remember the hook of a leaf, which would live as long as the leaf does."""
        if tensor.is_leaf:
            self._leaf_hooks.append(handle)

    def ends(self, task: int) -> None:
        """The backward with this graph task id is over."""
        self._ends(task)

    def _ended(self, task: int) -> None:
        if task in self.tasks:
            if self.metrics.watch is not None:
                self.metrics.watch.end(self)
            self.end_frames(task, True)
            if self.tasks == {task}:
                self._end_backwards()
                self.units[0].owner.backward_over()
            self.tasks.discard(task)

    def cut_short(self, task: int) -> None:
        """The backward with this graph task id will never be over."""
        if task in self.tasks:
            self.cut = True
            if self.metrics.watch is not None:
                self.metrics.watch.end(self)
            self.end_frames(task, True)
            if self.tasks == {task}:
                self.reset()
            self.tasks.discard(task)

    def _end_backwards(self) -> None:
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        self.pager.end_all_backward()

    @contextmanager
    def holding(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, the gradients of these live parameters add up in their `.grad`; what is there at the end is dropped.

        Nothing else can accumulate into them meanwhile: it waits for the node that runs inside.
        """
        ids = {id(param) for param in params}
        try:
            self._held |= ids
            yield
        finally:
            self._held -= ids
            for param in params:
                param.grad = None

    def take_grad(self, unit: Unit, index: int) -> None:
        """A gradient has been accumulated into a live parameter: move it to the rest parameter's place on the host."""
        before = self.metrics.clock.enter(ENGINE)
        try:
            self._take_grad(unit, index)
        finally:
            self.metrics.clock.enter(before)

    def _take_grad(self, unit: Unit, index: int) -> None:
        live, rest = unit.live[index], unit.rest[index]
        grad = live.grad
        if grad is None or id(live) in self._held:
            return
        live.grad = None
        if grad.is_sparse:
            raise TierzeroError(
                f"parameter {unit.names[index]} got a sparse gradient; build its embedding with sparse=False, AdamW "
                "needs dense ones"
            )
        with torch._C.DisableTorchFunctionSubclass():  # as Paged would do itself, for each of them
            hooks, after_hooks = rest._backward_hooks, getattr(rest, "_post_accumulate_grad_hooks", None)
        for hook in (hooks or {}).values():
            changed = hook(grad)
            grad = grad if changed is None else changed
        unit.own_grads()
        held = unit.grad(index)
        view = held if held is not None else unit.publish_grad(index)
        unit.fold_clip(index)
        watch, key = self.metrics.watch, (D2H, unit.uid, index)
        if watch is not None:
            watch.begin(key, "gradient", f"gradient {unit.names[index]}")
        before = self.metrics.clock.enter(D2H)
        try:
            self.pager.transfer.take_grad(unit, grad.detach(), view, accumulate=held is not None)
        finally:
            self.metrics.clock.enter(before)
            if watch is not None:
                watch.end(key)
        for after in (after_hooks or {}).values():
            after(rest)


class Inputs:
    """The inputs of a running forward whose gradients are waited for. Hooks refer to `left` alone: gc does not see what
    hangs on a tensor.
    """

    __slots__ = ("_watched", "left")

    def __init__(self, count: int) -> None:
        self.left = [count]
        self._watched: list[tuple[torch.Tensor, int, Any]] = []

    def add(self, tensor: torch.Tensor, handle: Any) -> None:
        """Remember an input as it is now, and its hook."""
        self._watched.append((tensor, tensor._version, handle))

    def passed_on(self, output: torch.Tensor) -> bool:
        """Whether `output` is one of the inputs, unchanged; then its gradient is not waited for."""
        found = False
        for tensor, version, handle in self._watched:
            if output is tensor and output._version == version:
                found = True
                if handle.id in (handle.hooks_dict_ref() or {}):
                    handle.remove()
                    self.left[0] -= 1
        return found


class _BackwardOver:
    """What a _BackwardEnd is after it was called."""


class _BackwardEnd:
    """Autograd calls it at the end of a backward; after an error it only drops it."""

    backward: Backward | None = None

    def __init__(self, backward: Backward, task: int) -> None:
        self.task = task
        self.backward = backward

    def __call__(self) -> None:
        if self.backward is not None:
            self.backward.ends(self.task)
        self.__class__ = _BackwardOver  # type: ignore[assignment]  # whatever a signal handler raises in __del__ is lost

    def __del__(self) -> None:
        if self.backward is not None:
            self.backward.cut_short(self.task)


def _arrived(backward: weakref.ref[Backward], uid: int, index: int, live: torch.Tensor) -> None:
    """A live parameter's hook. It refers to the engine weakly: gc does not see what hangs on a tensor."""
    found = backward()
    if found is not None:
        found.take_grad(found.pager.units[uid], index)


def _refuse_double(unit: Unit) -> None:
    if torch.is_grad_enabled():
        raise TierzeroError(
            f"backward through unit {unit.name} with create_graph=True (double backward) is not supported on an "
            "offloaded model: "
            "compute that gradient on a model that was not passed to offload(), or without create_graph"
        )


def _run_first(handle: Any) -> None:
    """Move a tensor hook before the others: this unit leaves before the one that made the tensor comes."""
    hooks = handle.hooks_dict_ref()
    for key in [key for key in hooks or () if key != handle.id]:
        hooks[key] = hooks.pop(key)  # reinserted, because autograd iterates in the order of insertion


def in_backward() -> bool:
    """Whether the caller runs inside a backward of this thread."""
    return torch._C._current_graph_task_id() != -1
