"""When things move in forward: module events become pager.acquire / release. With backward.py and saved.py, all that
knows autograd's internals.

Note [forward]
A unit module's forward pre-hook acquires its unit and registers the live parameters; its forward hook (`always_call`,
so an exception runs it too) registers the rest parameters and releases. In between, the saved-tensor hooks of saved.py
stand in for the unit's weights. What leaves the unit as a view of its storage (a module that returns rows of its own
table) leaves as a copy: the bytes behind the view may go at any moment.

Note [recomputation]
A forward that runs inside a backward (activation checkpointing) is not a use of its own: the backward's use has been
counted already.

Note [cut short]
KeyboardInterrupt passes forward hooks by, and an exception from a signal handler may end a hook anywhere (see Note
[signals] in loop.py), so frames may be left behind. A frame is listed before anything is done for it and until all of
it is undone, and undoing twice is harmless. The next forward of the root takes the frames that are left for stale,
unless the root is already running further up the Python stack (a model that calls itself, `generate`).

Private torch names used here, and why:
- torch.autograd._profiler_enabled: ranges cost some microseconds each, and no public name tells if one listens.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tierzero.activations.activations import Activations
from tierzero.autograd.arrivals import Arrivals
from tierzero.autograd.backward import Backward, Inputs, in_backward
from tierzero.autograd.changes import keep_changes
from tierzero.autograd.entrances import hook_entrances
from tierzero.autograd.lending import Borrower, Lending
from tierzero.autograd.modules import ModuleHook, is_nested
from tierzero.autograd.saved import Keep, Kept, Net, unit_of
from tierzero.autograd.tensors import tensors_in
from tierzero.errors import TierzeroError
from tierzero.monitoring.clock import COMPUTE, ENGINE
from tierzero.monitoring.ranges import ProfilerRanges
from tierzero.paging.pager import Pager
from tierzero.units.unit import Unit


class _Frame(Borrower):
    """One running forward of a unit's module. Leaving it twice is leaving it once."""

    __slots__ = ("acquired", "again", "entrance", "inputs", "net", "pieces", "task", "unit")

    def __init__(self, unit: Unit, train: bool, entrance: int = 0) -> None:
        super().__init__(train)
        self.entrance = entrance  # id of the module that was called instead of the unit's; see entrances.py
        self.again = 0  # how many more times it is running further down
        self.unit = unit
        self.task = torch._C._current_graph_task_id()  # the backward that recomputes it, or -1
        self.acquired = False
        self.pieces = False  # it runs its batch in pieces; see microbatch.py
        self.net: Net | None = None
        self.inputs: Inputs | None = None


class _Root(Borrower):
    """One running forward of the root; `net` stands in for what is saved between units in it."""

    __slots__ = ("net", "task")

    def __init__(self, train: bool, net: Net) -> None:
        super().__init__(train)
        self.net = net
        self.task = torch._C._current_graph_task_id()  # the backward that recomputes it, or -1


class Hooks:
    """The hooks of one offloaded model."""

    def __init__(
        self, root: nn.Module, units: list[Unit], pager: Pager, activations: Activations | None = None
    ) -> None:
        self.pager = pager
        self.activations = activations
        self.keep: Keep = Kept if activations is None else activations.keep
        self.roots: list[_Root] = []  # the root's forwards
        self.recomputing: dict[int, Borrower] = {}  # backwards in which functions run again, by task
        self.frames: list[_Frame] = []
        self.floor = 0  # frames below belong to registered methods, which clean up after themselves
        self.backward = Backward(units, pager, self._end_frames)
        self.by_storage = {unit.flat.untyped_storage()._cdata: unit for unit in units}
        self.lending = Lending(self.by_storage, pager, self._borrower, lambda: any(f.pieces for f in self.frames))
        self.arrivals = Arrivals(units)
        self.handles: list[Any] = []
        # opaque to the compiler; not decorators, because that would import it with this module
        self.metrics = pager.metrics
        counted = self.metrics.engine
        self.pre_forward = torch.compiler.disable(counted(self._pre_forward))
        self.post_forward = torch.compiler.disable(counted(self._post_forward))
        self.root_train: bool | None = None  # while the root's forward runs: whether with gradients
        for unit in units:
            self._hook(unit)
        hook_entrances(self, units)
        enter, leave = torch.compiler.disable(self._enter_root), torch.compiler.disable(self._leave_root)
        weak = weakref.ref(root)
        self.add(root, lambda args, kwargs: enter(weak(), args, kwargs), leave)

    def add(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Hook `module`, but not copies of it."""
        self.handles += [
            module.register_forward_pre_hook(ModuleHook(module, before), prepend=True, with_kwargs=True),
            module.register_forward_hook(ModuleHook(module, lambda _, output: after(output)), always_call=True),
        ]

    def _enter_root(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.metrics.begin_first()
        before = self.metrics.clock.enter(ENGINE)
        try:
            if not in_backward() and not self.frames:
                before = COMPUTE  # what a signal's exception may have left
                self._look_for_profiler()
            return self._begin_root(root, args, kwargs)
        finally:
            self.metrics.clock.enter(before)

    def _look_for_profiler(self) -> None:
        """Show it what the training thread does, if there is one and it is not shown yet."""
        if torch.autograd._profiler_enabled() != (self.metrics.ranges is not None):
            self.metrics.show(ProfilerRanges() if self.metrics.ranges is None else None)

    def _begin_root(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not in_backward():
            if (self.frames or self.backward.unfinished or self.root_train is not None) and not is_nested():
                self.reset()
            elif not self.frames:
                self.pager.repin(self.roots)
            if torch.is_grad_enabled():
                self.arrivals.check(root, trained=True)
            self.root_train = torch.is_grad_enabled()
            if self.metrics.watch is not None:
                self.metrics.watch.begin(self, "pass", "forward")
        if self.pager.transfer.device.type != "cpu":
            args, kwargs = tree_map(self.to_device, (args, kwargs))
        if self.activations is not None and not in_backward():
            self.activations.begin(root, (args, kwargs))
        self.roots.append(_Root(bool(self.root_train), self.net()))
        self.roots[-1].net.enter()
        return args, kwargs

    def _leave_root(self, output: Any) -> Any:
        changed = None
        if self.roots and self.roots[-1].task == torch._C._current_graph_task_id():
            changed = self._without_views(list(self.roots[-1].lent.values()), output, tensors_in([output]))
            self._leave_last_root()
        if not self.roots and not in_backward():
            self.root_train = None
            if self.metrics.watch is not None:
                self.metrics.watch.end(self)
        return changed

    def _leave_last_root(self) -> None:
        self.roots[-1].net.leave()
        self.lending.give_back(self.roots[-1])
        self.roots.pop()

    def _borrower(self) -> Borrower | None:
        """The innermost forward or backward that runs; see lending.py."""
        task = torch._C._current_graph_task_id()
        if self.frames and self.frames[-1].task == task:
            return self.frames[-1]
        if task != -1:
            self.backward.note_task()
            return self.recomputing.setdefault(task, Borrower(train=True, whole=True))
        return self.roots[-1] if self.roots else None

    def net(self) -> Net:
        """What stands in for weights that are saved while it is entered."""
        return Net(self.by_storage, self.backward.fault, self.keep)

    def _hook(self, unit: Unit) -> None:
        before, after = functools.partial(self.pre_forward, unit), functools.partial(self.post_forward, unit)
        self.add(unit.module, before, after)

    def remove(self) -> None:
        """Take every hook off the modules and let go of them: what is left of the engine must not keep them alive."""
        for handle in self.handles:
            handle.remove()
        for unit in self.by_storage.values():
            unit.let_go()

    # -- forward -------------------------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], entrance: int = 0) -> None:
        inside = in_backward()
        if not inside and not self.frames and self.root_train is None:
            self.reset()
        outer = self.root_train
        if outer is None:
            outer = self.frames[0].train if self.frames else torch.is_grad_enabled()
        if inside:
            self.backward.note_task()
        frame = _Frame(unit, outer, entrance)
        self.frames.append(frame)  # whatever fails from here on, _post_forward finds its frame
        unit.check_given()
        self.pager.acquire(unit, frame, train=frame.train or inside, record=not (inside and unit.in_backward))
        frame.acquired = True
        unit.register_live()
        if torch.is_grad_enabled():
            frame.inputs = self.backward.watch_inputs(unit, args, kwargs)
        # without gradients too: the forward may switch them on inside
        frame.net = self.net()
        frame.net.enter()
        if self.metrics.watch is not None:
            self.metrics.watch.begin(frame, "recompute" if inside else "forward", unit.name)

    def _post_forward(self, unit: Unit, output: Any) -> Any:
        if not any(frame.unit is unit for frame in self.frames):
            return None
        while self.frames[-1].unit is not unit:
            self._leave_last()
        frame = self.frames[-1]
        if not frame.acquired:
            self._leave_last()
            return None
        tensors = tensors_in([output])
        leaving = [one for one in (unit, *frame.lent.values()) if not one.pins.others(frame)]
        changed = self._without_views(leaving, output, tensors)
        if changed is not None:
            tensors = tensors_in([changed])
        if in_backward():
            self.pager.begin_backward(unit, record=False)
        else:
            keep_changes(self.pager, unit)
        self._leave_last()
        for tensor in tensors:
            if tensor.requires_grad and (frame.inputs is None or not frame.inputs.passed_on(tensor)):
                self.backward.watch_output(unit, tensor)
        return changed

    @contextmanager
    def recompute(self, units: Sequence[Unit]) -> Iterator[None]:
        """Inside, in a backward, the live parameters of `units` are there and registered: their modules' code may run
        again without their hooks.
        """
        depth = len(self.frames)
        self.backward.note_task()
        try:
            for unit in units:
                frame = _Frame(unit, train=True)
                frame.pieces = True
                self.frames.append(frame)
                self.pager.acquire(unit, frame, record=not unit.in_backward)
                frame.acquired = True
                unit.register_live()
            yield
        finally:
            while len(self.frames) > depth:
                self._leave_last()

    def _leave_last(self) -> None:
        """Undo what _pre_forward did for the innermost frame."""
        frame = self.frames[-1]
        self._show_end(frame)
        if frame.net is not None:
            frame.net.leave()
        self.lending.give_back(frame)
        self.pager.release(frame.unit, frame, register_rest=True)
        self.frames.pop()

    def _show_end(self, frame: _Frame) -> None:
        if self.metrics.watch is not None:
            self.metrics.watch.end(frame)

    def _without_views(self, units: list[Unit], output: Any, tensors: list[torch.Tensor]) -> Any:
        """`output`, which contains `tensors`, with copies of those that view the storage of one of `units`, and of
        parameters at rest; None if there are none.
        """
        views = [id(one) for one in tensors if unit_of(one, self.by_storage) in units or self.lending.lends(one)]
        return tree_map(lambda leaf: leaf.clone() if id(leaf) in views else leaf, output) if views else None

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
            floor, depth, roots = self.floor, len(self.frames), len(self.roots)
            try:
                self.pre_forward(unit, args, kwargs)
                self.floor = len(self.frames)
                output = method(*args, **kwargs)
                changed = self.post_forward(unit, output)
                return output if changed is None else changed
            finally:
                self.floor = floor
                while len(self.roots) > roots:  # an exception
                    self._leave_last_root()
                while len(self.frames) > depth:
                    self._leave_last()

        setattr(module, name, wrapped)

    def to_device(self, value: Any) -> Any:
        return value.to(self.pager.transfer.device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    def reset(self) -> None:
        """Forget forwards and backwards that were cut short."""
        self.root_train = None
        if self.metrics.watch is not None:
            self.metrics.watch.clear()
        while len(self.frames) > self.floor:
            self._leave_last()
        while self.roots and not self.floor:
            self._leave_last_root()
        self.recomputing.clear()
        self.backward.reset()
        self.pager.repin([*self.frames, *self.roots])

    def _end_frames(self, task: int, over: bool) -> None:
        """Leave the frames in which this backward recomputed, and what was lent to it if it is over."""
        for frame in [frame for frame in self.frames if frame.task == task]:
            # autograd drops the saved-tensor hooks of a backward itself
            self.lending.give_back(frame)
            self.pager.release(frame.unit, frame, register_rest=True)
            self.frames.remove(frame)
            self._show_end(frame)
        self.roots = [root for root in self.roots if root.task != task]
        if over and task in self.recomputing:
            self.lending.give_back(self.recomputing.pop(task))
