"""Micro-batches inside a unit: its forward runs the batch in pieces, one after the other, and again in backward.

Note [pieces]
A repeated unit (an element of a ModuleList or Sequential that contains no other unit) gets a `forward` of its own, on
the instance. In training it cuts its arguments (see rows.py), runs the pieces in order and puts the results together.
Only the arguments are kept, through `save_for_backward`, so that whatever hooks are active may move them. In backward
each piece runs again, from the random state that it had, under the autocast that it had, and goes straight backward; so
the activations of one piece are all that is there at a time. The unit is fetched once for all pieces, as it is without
them. Evaluation, and everything else without gradients, runs the whole batch at once.

Note [order]
The gradients of a parameter are summed in the order of the pieces, ((g1 + g2) + g3) + g4, in the parameter's dtype on
the device, and go on through the outer graph as one gradient: they leave once, after all other uses of the parameter
have been added as autograd does it. This is the order of a loop that runs micro-batches one after the other. The same
holds for arguments that are not cut.

Note [graph without memory]
The first run records a graph as well, and throws away what it saves: under `no_grad` some modules and kernels compute
in another way, whose last bits may differ from the run in backward. Whoever takes a tensor out of there, past the
unit's results, and goes backward from it gets an error.

Note [autocast]
Autocast keeps a weight that it has cast, to use it again. Pieces do not share such copies, or their gradients would be
summed in the lower precision: under autocast a unit runs as with `cache_enabled=False`.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from tierzero.autograd.hooks import Hooks
from tierzero.autograd.mixing import Buffers, check_norms, try_two_rows
from tierzero.autograd.rows import Arguments, Results
from tierzero.autograd.saved import unit_of
from tierzero.errors import ConfigError, TierzeroError
from tierzero.units.unit import Unit


def check_count(pieces: int) -> None:
    """ConfigError for what is not a number of pieces."""
    if isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 1:
        raise ConfigError(f"micro_batches={pieces!r} is not a number of pieces; use a whole number, 1 or more")


class MicroBatches:
    """The repeated units of one offloaded model, each of whose batches runs in `pieces` pieces."""

    def __init__(self, hooks: Hooks, units: Sequence[Unit], pieces: int) -> None:
        self.hooks = hooks
        self.pieces = pieces
        self.device: torch.device = hooks.pager.transfer.device
        self._tried: dict[int, set[tuple[bool, ...]]] = {unit.uid: set() for unit in units}
        self._forwards = [_Forward(self, unit) for unit in units]

    def remove(self) -> None:
        """Give the units their own forward back."""
        for forward in self._forwards:
            forward.remove()

    def run(self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The unit's forward, in pieces where this is a training step."""
        frames = self.hooks.frames
        frame = frames[-1] if frames and frames[-1].unit is unit else None
        pieces_run = any(frame.pieces for frame in frames)
        if frame is None or pieces_run or not frame.train or not unit.module.training:
            return forward(*args, **kwargs)
        frame.pieces = True
        try:
            return self._run(unit, forward, args, kwargs)
        finally:
            frame.pieces = False

    def _run(self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_norms(unit.name, unit.module)
        arguments = Arguments(unit.name, args, kwargs, self.pieces)
        params = [param for param in unit.module.parameters() if param.requires_grad]
        for name, param in unit.module.named_parameters():
            if param.requires_grad and unit_of(param, self.hooks.by_storage) is None:
                raise TierzeroError(
                    f"parameter {name} of unit {unit.name} was added after offload(), and micro_batches takes the "
                    "gradients of offloaded parameters only: add adapters before offload(), or leave micro_batches at 1"
                )
        with _autocast(_autocast_now(self.device)):
            call = _Call(self, unit, forward, arguments, params)
            training = tuple(module.training for module in unit.module.modules())
            if len(arguments.sizes) > 1 and training not in self._tried[unit.uid]:
                with _random_kept(self.device):
                    try_two_rows(unit.name, unit.module, arguments, lambda parts: call.piece(parts)[0], params)
                self._tried[unit.uid].add(training)
            if torch.is_grad_enabled():
                results = _Pieces.apply(call, *arguments.tensors, *params)
            else:
                results = call.run(arguments.tensors, record=False)
        output = call.results.build(results, arguments.tensors)
        arguments.tensors = []  # whoever needs them keeps them
        return output


class _Forward:
    """What stands as `forward` on a unit's module. A copy of the module gets the class's own."""

    def __init__(self, batches: MicroBatches, unit: Unit) -> None:
        self.module = unit.module
        self.own = unit.module.__dict__.get("forward")
        self.__wrapped__: Callable[..., Any] = unit.module.forward  # for whoever looks at the signature

        def run(*args: Any, **kwargs: Any) -> Any:
            return batches.run(unit, self.__wrapped__, args, kwargs)

        self.run = torch.compiler.disable(run)
        unit.module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.module), self.module)
        return types.MethodType(type(module).forward, module) if self.own is None else copy.deepcopy(self.own, memo)

    def __reduce__(self) -> Any:
        return (getattr, (self.module, "forward")) if self.own is None else (_itself, (self.own,))

    def remove(self) -> None:
        if self.module.__dict__.get("forward") is self:
            if self.own is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = self.own


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What a pickled module has for a `forward` that its owner had put on it."""
    return forward


class _Call:
    """One forward of a unit in pieces, and its backward. The graph holds it; it holds no tensor of the arguments."""

    def __init__(
        self,
        batches: MicroBatches,
        unit: Unit,
        forward: Callable[..., Any],
        arguments: Arguments,
        params: Sequence[torch.nn.Parameter],
    ) -> None:
        self.hooks = batches.hooks
        self.device = batches.device
        self.unit = unit
        self.forward = forward
        self.arguments = arguments
        self.results = Results(unit.name, arguments.sizes)
        self.params = params
        self.wants = [tensor.requires_grad for tensor in arguments.tensors]
        self.random: list[Random] = []  # the generators' states before each piece
        self.autocast = _autocast_now(self.device)
        self.differentiable: list[bool] = []

    def run(self, tensors: Sequence[torch.Tensor], *, record: bool) -> list[torch.Tensor]:
        """Run all pieces; returns what they return, put together. With `record`, as a graph that saves nothing."""
        versions = [tensor._version for tensor in tensors if not tensor.is_inference()]
        buffers = Buffers(self.unit.module)
        for start, rows in zip(self.arguments.starts, self.arguments.sizes, strict=True):
            parts = self.arguments.take(tensors, start, rows)
            if record:
                self.random.append(_random_state(self.device))
                parts = self._leaves(parts)
                for part in parts:
                    if part.requires_grad:
                        part.register_hook(self._lost)
            with self._graph_without_memory() if record else nullcontext():
                found = self.results.add(*self.piece(parts))
            asks = [tensor.requires_grad for tensor in found]
            self.differentiable = [a or b for a, b in zip(self.differentiable or asks, asks, strict=True)]
            self.results.keep(found)
            del found, parts
        if versions != [tensor._version for tensor in tensors if not tensor.is_inference()]:
            raise self._in_place()
        buffers.check(self.unit.name)
        return self.results.together()

    def backward(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of arguments and parameters from those of the results: each piece runs again, and backward."""
        parted: list[list[torch.Tensor | None]] = [[] for _ in tensors]
        around = {unit.uid: unit for param in self.params if (unit := unit_of(param, self.hooks.by_storage))}
        around.pop(self.unit.uid, None)
        with ExitStack() as stack:
            stack.enter_context(self.hooks.recompute([*around.values(), self.unit]))
            stack.enter_context(self.hooks.backward.holding(self.params))
            stack.enter_context(_random_kept(self.device))
            for piece, (start, rows) in enumerate(zip(self.arguments.starts, self.arguments.sizes, strict=True)):
                parts = self._leaves(self.arguments.take(tensors, start, rows))
                self._piece_backward(piece, parts, grads)
                for gathered, part in zip(parted, parts, strict=True):
                    gathered.append(part.grad)
            sums = [param.grad for param in self.params]
            self.hooks.pager.metrics.device_passing(sum(grad.nbytes for grad in sums if grad is not None))
        return [*map(self._whole_grad, parted, self.arguments.cut, tensors), *sums]

    def _piece_backward(self, piece: int, parts: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        """Run one piece again and backward; gradients are added up in `.grad`."""
        _set_random_state(self.random[piece], self.device)
        with torch.enable_grad(), _autocast(self.autocast):
            again = self.results.again(*self.piece(parts))
        pairs = [
            (tensor, grad)
            for tensor, grad in zip(again, self.results.cut(grads, piece), strict=True)
            if grad is not None and tensor.requires_grad
        ]
        del again
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])

    def _whole_grad(self, parted: list[torch.Tensor | None], cut: bool, tensor: torch.Tensor) -> torch.Tensor | None:
        """The gradient of an argument from those of its pieces."""
        given = [grad for grad in parted if grad is not None]
        if not given:
            return None
        if cut:
            sized = zip(parted, self.arguments.sizes, strict=True)
            zeros = lambda rows: tensor.new_zeros((rows, *tensor.shape[1:]))
            return torch.cat([zeros(rows) if grad is None else grad for grad, rows in sized])
        total = given[0]
        for grad in given[1:]:
            total = total + grad
        return total

    def piece(self, parts: Sequence[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor | None]]:
        """Run one piece; returns its output, and those of `parts` that were not cut."""
        called = self.arguments.call(parts)
        try:
            output = self.forward(*called[0], **called[1])
        except Exception as error:
            if isinstance(error, RuntimeError) and "leaf" in str(error) and "in-place" in str(error):
                raise self._in_place() from error
            if len(self.arguments.sizes) > 1 and not isinstance(error, TierzeroError):
                error.add_note(self.arguments.describe())
            raise
        self.arguments.check_untouched(called, parts)
        if len(self.arguments.sizes) == 1:
            return output, []
        return output, [None if cut else part for part, cut in zip(parts, self.arguments.cut, strict=True)]

    def _leaves(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`parts` as the beginning of a graph of their own."""
        return [part.detach().requires_grad_(wants) for part, wants in zip(parts, self.wants, strict=True)]

    @contextmanager
    def _graph_without_memory(self) -> Iterator[None]:
        """See Note [graph without memory]."""
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_forget, self._lost):
            yield

    def _lost(self, what: Any) -> Any:
        raise TierzeroError(
            f"backward reached a tensor of the inside of unit {self.unit.name} in another way than through what the "
            "unit returns (an auxiliary loss that was collected in it, say), and micro_batches keeps none of it: "
            "return it from the unit, a row for each row of the batch, or leave micro_batches at 1"
        )

    def _in_place(self) -> TierzeroError:
        return TierzeroError(
            f"unit {self.unit.name} changes one of its arguments in place, which micro_batches needs as it was to run "
            "the pieces again in backward: work on a copy (x = x + y), or leave micro_batches at 1"
        )


class _Pieces(torch.autograd.Function):
    """A unit in the outer graph: arguments and parameters in, results out."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = tensors[: len(call.wants)]
        results = call.run(arguments, record=True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments)
        ctx.mark_non_differentiable(*(t for t, yes in zip(results, call.differentiable, strict=True) if not yes))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.call.backward(ctx.saved_tensors, grads))


def _forget(tensor: torch.Tensor) -> None:
    """What a graph without memory keeps of a tensor."""


Random = tuple[torch.Tensor, torch.Tensor | None]


def _random_state(device: torch.device) -> Random:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: Random, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def _random_kept(device: torch.device) -> Iterator[None]:
    """Inside, torch's generators may be used and set; afterwards they are as before."""
    before = _random_state(device)
    try:
        yield
    finally:
        _set_random_state(before, device)


Autocast = list[tuple[str, bool, torch.dtype]]


def _autocast_now(device: torch.device) -> Autocast:
    """(kind of device, whether autocast is on for it, its dtype)."""
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys(("cpu", device.type))
    ]


@contextmanager
def _autocast(states: Autocast) -> Iterator[None]:
    """Inside, autocast is as `states` say, and keeps nothing it casts; see Note [autocast]."""
    with ExitStack() as stack:
        for kind, enabled, dtype in states:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield
