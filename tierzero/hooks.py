"""When things move: module and autograd events become pager.acquire / release. With saved.py, all that knows autograd's
internals.

Note [forward]
A unit module's forward pre-hook acquires its unit and registers the live parameters; its forward hook (`always_call`,
so an exception runs it too) registers the rest parameters and releases. In between, the saved-tensor hooks of saved.py
stand in for the unit's weights. What leaves the unit as a view of its storage (a module that returns rows of its own
table) leaves as a copy: the bytes behind the view may go at any moment.

Note [backward]
A hook on each output that requires a gradient makes the unit resident before its backward begins. A post-accumulate
hook on each live parameter takes the gradient to the host at once, in autograd's own order, so that sums round as in
the plain loop. Hooks on the inputs tell that the backward is over. No node is added to the graph: an identity function
on the inputs would change the order in which their gradients are summed (and refuse in-place operations on them). All
of these only say when bytes may leave; that they are there is the unpack hook's business. The live parameters are
registered meanwhile: what a checkpoint inside the unit recomputes may use them without calling the unit's module.

Note [recomputation]
A forward that runs inside a backward (activation checkpointing) is not a use of its own: the backward's use has been
counted already.

Note [cut short]
KeyboardInterrupt passes forward hooks by, so frames may be left behind. The next forward of the root takes them for
stale, unless the root is already running further up the Python stack (a model that calls itself, `generate`).

Private torch names used here, and why:
- torch._C._current_graph_task_id: the only way to know that a forward runs inside a backward.
- Variable._execution_engine.queue_callback: the only way to run code at the end of a backward, for units whose input
hooks never fire.
- nn.Module._call_impl: its code object, to see whether the root is running further up the stack.
- RemovableHandle.hooks_dict_ref: to run the "backward is over" hook of a tensor before the "backward begins" hook of
the unit that made it.
- Parameter._backward_hooks, _post_accumulate_grad_hooks: hooks users put on a parameter at rest must run with its
gradient.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves, tree_map

from tierzero.errors import TierzeroError
from tierzero.pager import Pager
from tierzero.saved import net, unit_of
from tierzero.unit import Unit


class _Frame:
    """One running forward of a unit's module."""

    __slots__ = ("acquired", "net", "task", "train", "unit")

    def __init__(self, unit: Unit, train: bool) -> None:
        self.unit = unit
        self.train = train
        self.task = torch._C._current_graph_task_id()  # the backward that recomputes it, or -1
        self.acquired = False
        self.net: AbstractContextManager[object] | None = None


class Hooks:
    """The hooks of one offloaded model."""

    def __init__(self, root: nn.Module, units: list[Unit], pager: Pager) -> None:
        self.pager = pager
        self.frames: list[_Frame] = []
        self.floor = 0  # frames below belong to registered methods, which clean up after themselves
        self.graph_tasks: set[int] = set()
        self.by_storage = {unit.flat.untyped_storage()._cdata: unit for unit in units}
        self.handles: list[Any] = []
        self._leaf_hooks: list[Any] = []
        # opaque to the compiler; not decorators, because that would import it with this module
        self.pre_forward = torch.compiler.disable(self._pre_forward)
        self.post_forward = torch.compiler.disable(self._post_forward)
        self.pre_backward = torch.compiler.disable(self._pre_backward)
        self.root_train: bool | None = None  # while the root's forward runs: whether with gradients
        for unit in units:
            self._hook(unit)
        enter, leave = torch.compiler.disable(self._enter_root), torch.compiler.disable(self._leave_root)
        self._add(root, enter, leave)

    def _add(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Hook `module`, but not copies of it: deepcopy takes hooks along."""
        mine = weakref.ref(module)
        self.handles += [
            module.register_forward_pre_hook(
                lambda m, args, kwargs: before(args, kwargs) if m is mine() else None, prepend=True, with_kwargs=True
            ),
            module.register_forward_hook(lambda m, _, out: after(out) if m is mine() else None, always_call=True),
        ]

    def _enter_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not _in_backward():
            if (self.frames or self.graph_tasks or self.root_train is not None) and not _is_nested():
                self.reset()
            elif not self.frames:
                self.pager.repin([])
            self.root_train = torch.is_grad_enabled()
        if self.pager.transfer.device.type != "cpu":
            args, kwargs = tree_map(self._to_device, (args, kwargs))
        return args, kwargs

    def _leave_root(self, output: Any) -> None:
        if not _in_backward():
            self.root_train = None

    def _hook(self, unit: Unit) -> None:
        self._add(
            unit.module,
            lambda args, kwargs: self.pre_forward(unit, args, kwargs),
            lambda output: self.post_forward(unit, output),
        )
        for index, live in enumerate(unit.live):
            if unit.layout.places[index].grad >= 0:
                live.register_post_accumulate_grad_hook(functools.partial(_arrived, weakref.ref(self), unit.uid, index))

    def remove(self) -> None:
        """Take every hook off the modules and let go of them: what is left of the engine must not keep them alive."""
        for handle in self.handles:
            handle.remove()
        for unit in self.by_storage.values():
            unit.let_go()

    # -- forward -------------------------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside = _in_backward()
        if not inside and not self.frames and self.root_train is None:
            self.reset()
        outer = self.root_train
        if outer is None:
            outer = self.frames[0].train if self.frames else torch.is_grad_enabled()
        if inside:
            self._note_task()
        frame = _Frame(unit, outer)
        self.frames.append(frame)  # whatever fails from here on, _post_forward finds its frame
        unit.check_given()
        self.pager.acquire(unit, train=frame.train or inside, record=not (inside and unit.in_backward))
        frame.acquired = True
        unit.register_live()
        if torch.is_grad_enabled():
            self._watch_inputs(unit, args, kwargs)
        hooks = net(self.by_storage, self.fault)  # without gradients too: the forward may switch them on inside
        hooks.__enter__()
        frame.net = hooks

    def _post_forward(self, unit: Unit, output: Any) -> Any:
        if not any(frame.unit is unit for frame in self.frames):
            return None
        while self.frames[-1].unit is not unit:
            self._leave(self.frames.pop())
        frame = self.frames.pop()
        changed = None
        if frame.acquired and unit.pins == 1 and any(self._is_weight(unit, leaf) for leaf in tree_leaves(output)):
            output = changed = tree_map(lambda leaf: leaf.clone() if self._is_weight(unit, leaf) else leaf, output)
        if frame.acquired and _in_backward():
            self.pager.begin_backward(unit, record=False)
        self._leave(frame)
        if frame.acquired:
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    self._keep(tensor, tensor.register_hook(lambda grad: self.pre_backward(unit)))
        return changed

    def _leave(self, frame: _Frame) -> None:
        """Undo what _pre_forward did."""
        if frame.net is not None:
            frame.net.__exit__(None, None, None)
        if frame.acquired:
            self.pager.release(frame.unit, register_rest=True)

    def _is_weight(self, unit: Unit, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and unit_of(leaf, self.by_storage) is unit

    def wrap_method(self, module: nn.Module, name: str) -> None:
        """Run the method `name` of `module` as if it were a forward of the innermost unit around it."""
        method = getattr(module, name, None)
        if not callable(method):
            raise TierzeroError(f"{type(module).__name__} has no method {name!r} to register")
        around = [unit for unit in self.by_storage.values() if any(inner is module for inner in unit.module.modules())]
        if not around:
            return  # nothing of its own to page: the units inside have hooks already
        unit = min(around, key=lambda unit: sum(1 for _ in unit.module.modules()))

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            floor, depth = self.floor, len(self.frames)
            try:
                self.pre_forward(unit, args, kwargs)
                self.floor = len(self.frames)
                output = method(*args, **kwargs)
                changed = self.post_forward(unit, output)
                return output if changed is None else changed
            finally:
                self.floor = floor
                while len(self.frames) > depth:  # an exception
                    self._leave(self.frames.pop())

        setattr(module, name, wrapped)

    def _to_device(self, value: Any) -> Any:
        return value.to(self.pager.transfer.device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    def reset(self) -> None:
        """Forget forwards and backwards that were cut short."""
        self.root_train = None
        while len(self.frames) > self.floor:
            self._leave(self.frames.pop())
        self.graph_tasks.clear()
        self._end_backwards()
        self.pager.repin([frame.unit for frame in self.frames if frame.acquired])

    # -- backward ------------------------------------------------------------------------------------------------------

    def fault(self, unit: Unit) -> None:
        """A node is about to use a weight of `unit`."""
        if _in_backward():
            _refuse_double(unit)
        if not unit.in_backward and not unit.pins:
            self.pager.metrics.add("faults")
            self._backward_begins(unit)

    def _pre_backward(self, unit: Unit) -> None:
        _refuse_double(unit)
        if not unit.in_backward:
            self._backward_begins(unit)

    def _backward_begins(self, unit: Unit) -> None:
        self._note_task()
        self.pager.begin_backward(unit, record=True)

    def _note_task(self) -> None:
        """See to it that the end of this backward is noticed."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self.graph_tasks:
            self.graph_tasks.add(task)
            Variable._execution_engine.queue_callback(_BackwardEnd(self, task))

    def _watch_inputs(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        left = len(inputs)

        def fired(grad: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.pager.end_backward(unit)

        for tensor in inputs:
            handle = tensor.register_hook(fired)
            _run_first(handle)
            self._keep(tensor, handle)

    def _keep(self, tensor: torch.Tensor, handle: Any) -> None:
        """Remember the hook of a leaf, which would live as long as the leaf does."""
        if tensor.is_leaf:
            self._leaf_hooks.append(handle)

    def backward_ends(self, task: int) -> None:
        """The backward with this graph task id is over, or was cut short."""
        if task in self.graph_tasks:
            self.graph_tasks.discard(task)
            for frame in [frame for frame in self.frames if frame.task == task]:
                self.frames.remove(frame)
                frame.net = None  # autograd drops the saved-tensor hooks of a backward itself
                self._leave(frame)
            if not self.graph_tasks:
                self._end_backwards()

    def _end_backwards(self) -> None:
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        self.pager.end_all_backward()

    def take_grad(self, unit: Unit, index: int) -> None:
        """A gradient has been accumulated into a live parameter: move it to the rest parameter's place on the host."""
        live, rest = unit.live[index], unit.rest[index]
        grad = live.grad
        if grad is None:
            return
        live.grad = None
        if grad.is_sparse:
            raise TierzeroError(
                f"parameter {unit.names[index]} got a sparse gradient; build its embedding with sparse=False, AdamW "
                "needs dense ones"
            )
        for hook in (rest._backward_hooks or {}).values():
            changed = hook(grad)
            grad = grad if changed is None else changed
        unit.own_grads()
        held = unit.grad(index)
        view = held if held is not None else unit.publish_grad(index)
        unit.fold_clip(index)
        self.pager.transfer.take_grad(unit, grad.detach(), view, accumulate=held is not None)
        for after in (getattr(rest, "_post_accumulate_grad_hooks", None) or {}).values():
            after(rest)


class _BackwardEnd:
    """Autograd calls it at the end of a backward; after an error it only drops it."""

    def __init__(self, hooks: Hooks, task: int) -> None:
        self.hooks = hooks
        self.task = task

    def __call__(self) -> None:
        self.hooks.backward_ends(self.task)

    __del__ = __call__


def _arrived(hooks: weakref.ref[Hooks], uid: int, index: int, live: torch.Tensor) -> None:
    """A live parameter's hook. It refers to the engine weakly: gc does not see what hangs on a tensor."""
    found = hooks()
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


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_CALL = nn.Module._call_impl.__code__


def _is_nested() -> bool:
    """Whether the module whose hook runs is running further up the Python stack too."""
    frame: FrameType | None = sys._getframe(1)
    module = None
    while frame is not None:
        if frame.f_code is _CALL:
            here = frame.f_locals.get("self")
            if module is not None and here is module:
                return True
            module = module if module is not None else here
        frame = frame.f_back
    return False
