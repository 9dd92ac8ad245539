"""Unit: the parameters that move together: their flat storage, their live and rest forms, and their bytes in the tiers.

Note [one storage, two forms]
All live parameters of a unit view one resizable storage, built with `Tensor.set_` so that each has its own version
counter. Paging in is `resize_(nbytes)` and a copy through the flat tensor; paging out is `resize_(0)`. Views that
autograd saved share the storage, so they follow. `.data` swaps do not work (saved `weight.t()` keeps the old storage),
and `.numpy()` must never be called on any of them (it makes the storage non-resizable). At rest each (module, name)
slot holds a Parameter over Paged instead; every slot is written, so ties stay ties.

Note [two facts]
*Registered* (the live parameters stand in the modules) and *resident* (the storage holds bytes) are separate. A unit is
registered while a forward that uses it runs; it stays resident until the pager wants the bytes for another.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tierzero.errors import TierzeroError
from tierzero.model.replaced import note_replaced
from tierzero.paging.pins import Pins
from tierzero.paging.states import LEGAL, State
from tierzero.tiers.host import Block
from tierzero.units.grads import HostGrad
from tierzero.units.layout import ParamSpec, UnitLayout, unit_layout
from tierzero.units.live import LiveParameter, Values, live_parameter
from tierzero.units.paged import Paged
from tierzero.units.records import DiskRecord, HostRecord, StateRecord
from tierzero.units.source import ParamSource

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


AtRest = Callable[..., Any]


def spec_of(name: str, param: nn.Parameter) -> ParamSpec:
    """The layout's view of a parameter."""
    dtype = DTYPE_NAMES.get(param.dtype, str(param.dtype).removeprefix("torch."))
    return ParamSpec(name, tuple(param.shape), dtype, param.element_size(), param.requires_grad)


class Unit:
    """See the notes above. Who may change the fields listed last is said in pager.py and residency.py."""

    def __init__(self, uid: int, name: str, module: nn.Module, params: list[nn.Parameter], names: list[str]) -> None:
        self.uid = uid
        self.name = name
        self.module = module
        self.names = names
        self.layout: UnitLayout = unit_layout([spec_of(n, p) for n, p in zip(names, params, strict=True)])
        self.slots: list[list[tuple[nn.Module, str]]] = [[] for _ in params]
        self.records: dict[str, HostRecord | DiskRecord] = {}
        self.state: StateRecord | None = None
        self.grad_block: Block | None = None
        self.host_flat: Block | None = None  # the parameters cached in host memory, laid out as the flat buffer
        self.live: list[LiveParameter] = []
        self.values = Values(self.live)
        self.rest: list[nn.Parameter] = []
        self.grad_views: list[torch.Tensor | None] = [None] * len(params)
        self.published: list[weakref.ref[HostGrad] | None] = [None] * len(params)
        self.coef: list[float] = [1.0] * len(params)  # clip coefficient to fold into the next update
        self.unscaled: list[float] = [1.0] * len(params)  # loss scale's inverse, applied in float32 before it
        self.owner: Any = None  # the engine
        self.lending: Any = None  # lends its parameters to other modules; see lending.py
        self.state_host = False  # where optimizer state goes when there is some
        self.steps: list[int] = [0] * len(params)
        self.stepped: set[int] = set()  # by an AdamW in this process: another one starts anew
        self.latest: dict[int, weakref.ref[Any]] = {}  # the AdamW whose moments they are
        self.blank: set[int] = set()  # parameters of a meta model that were not given values yet
        self.norms: tuple[tuple[int, tuple[bool, ...], tuple[float, ...]], list[float]] | None = (
            None  # gradient norms, and what they were computed from
        )
        self.norming: asyncio.Task[None] | None = None  # norms being computed
        self.normed = -1  # of which version of the gradients
        self.touched = False  # somebody has had their hands on the gradients
        # what is resident and in use
        self.residency = State.REST
        self.pins = Pins()
        self.registered = False
        self.live_registered = False  # or some of it: see register_live
        self.in_backward = 0  # when its backward began, counted from 1; 0 if it is not in backward
        self.version = 0
        self.arrival: asyncio.Task[None] | None = None  # the fetch under way
        self.pending: Any = None  # the queued update that the next use waits for
        self.generic: Any = None  # GenericState: what optimizers other than AdamW keep
        self.guess: Any = None  # an update that was begun before the step was taken
        self.gate: Any = None  # what a save has still to read; see gate.py
        self.has_grads = False  # since the last step: its parameters are about to change
        self.master_edited = False  # since the last step: the parameters need not be the rounded masters
        self.prefetched = False
        self.ready_event: Any = None
        self.used_event: Any = None
        self.finish_grads: Callable[[], None] = _nothing

    # -- building ------------------------------------------------------------------------------------------------------

    def build(
        self, params: list[nn.Parameter], device: torch.device, settle: Callable[[], None], at_rest: AtRest
    ) -> None:
        """Make the flat storage and both forms of every parameter; the slots are not touched yet.

        `settle()` is called before a published gradient is used; `at_rest(work, changes)` runs a coroutine on the bytes
        at rest.
        """
        self.at_rest = at_rest
        self.flat = torch.empty(0, dtype=torch.uint8, device=device)
        storage = self.flat.untyped_storage()
        storage.resize_(self.layout.flat_bytes)
        self.flat.set_(storage, 0, (self.layout.flat_bytes,), (1,))
        for index, (param, place) in enumerate(zip(params, self.layout.places, strict=True)):
            live = live_parameter(param, self.names[index], storage, self.layout.flat_offset(place), device)
            rest = nn.Parameter(
                Paged(ParamSource(self, index), param.shape, param.dtype), requires_grad=param.requires_grad
            )
            for form in (live, rest):
                form.__dict__.update(param.__dict__)
            self.values.add(live)
            self.rest.append(rest)
        storage.resize_(0)
        grads = self.grad_block.tensor if self.grad_block is not None else torch.empty(0, dtype=torch.uint8)
        for index, place in enumerate(self.layout.places):
            if place.grad >= 0:
                raw = grads[place.grad : place.grad + place.spec.nbytes]
                self.grad_views[index] = raw.view(params[index].dtype).view(params[index].shape)
        self.settle = settle

    # -- registered ----------------------------------------------------------------------------------------------------

    def register_live(self) -> None:
        """Put the live parameters into every slot, following later changes of requires_grad.

        Leaves tensors alone that somebody else put there (torch.func.functional_call). Raises TierzeroError for
        parameters that took our place.
        """
        self._open(range(len(self.live)))
        for index, (live, rest, slots) in enumerate(zip(self.live, self.rest, self.slots, strict=True)):
            for module, name in slots:
                there = module._parameters.get(name)
                if there is rest:
                    module._parameters[name] = live
                elif there is not live and isinstance(there, nn.Parameter):
                    raise TierzeroError(
                        f"parameter {self.names[index]} was replaced after offload(): cast, move, load with "
                        "assign=True or rebuild modules before "
                        "offload(), and change values with load_state_dict() or inside `with "
                        "tierzero.unsharded(module, write=True)`"
                    )

    def lend(self, index: int) -> LiveParameter:
        """A live parameter for use outside the unit's modules, while the unit is pinned. `register_rest` ends it."""
        self._open([index])
        return self.live[index]

    def _open(self, indices: Iterable[int]) -> None:
        """Open the live parameters; those at `indices` follow requires_grad."""
        first, self.live_registered = not self.live_registered, True
        with torch._C.DisableTorchFunctionSubclass():  # flags need none of Paged's care, which would cost most of this
            for live in self.live:
                live.open()
            if first:
                self.values.at_rest()
            for index in indices:
                live, rest = self.live[index], self.rest[index]
                if live.requires_grad != rest.requires_grad:
                    if rest.requires_grad and self.layout.places[index].grad < 0:
                        raise self._frozen(index)
                    live.requires_grad_(rest.requires_grad)

    def register_rest(self) -> None:
        """Put the rest parameters into every slot: the first time, and then wherever the live one stands."""
        for live, rest, slots in zip(self.live, self.rest, self.slots, strict=True):
            for module, name in slots:
                there = module._parameters.get(name)
                if not self.registered and there is not None:
                    note_replaced(there, live.param_name)
                if not self.registered or there is live:
                    module._parameters[name] = rest
            live.shut()
        self.registered = True
        self.live_registered = False

    def let_go(self) -> None:
        """Drop the references to the model's modules, which keep their parameters."""
        self.slots = [[] for _ in self.slots]
        del self.module

    def leave_backward(self) -> None:
        """The unit is in backward no more; its rest parameters come back unless a forward uses it."""
        if self.in_backward:
            if not self.pins:
                self.register_rest()
            self.in_backward = 0

    # -- resident ------------------------------------------------------------------------------------------------------

    def become(self, state: State) -> None:
        """Change `residency`, refusing a transition that is not legal."""
        if (self.residency, state) not in LEGAL:
            raise TierzeroError(
                f"unit {self.name} cannot go from {self.residency.value} to {state.value}; please report this as a bug"
            )
        self.residency = state

    def allocate(self) -> None:
        """Give the flat storage its bytes, uninitialised."""
        self.flat.untyped_storage().resize_(self.layout.flat_bytes)

    def free(self) -> None:
        """Take the bytes of the flat storage away."""
        self.flat.untyped_storage().resize_(0)

    def region(self, name: str) -> torch.Tensor:
        """The bytes of one region of the flat buffer; only while allocated."""
        offset, nbytes = self.layout.regions[name]
        return self.flat[offset : offset + nbytes]

    def check_given(self) -> None:
        """TierzeroError if a parameter of a meta model was never given a value."""
        if self.blank:
            raise TierzeroError(
                f"parameter {self.names[min(self.blank)]} was never given a value: the model was on the meta device "
                "when it was offloaded; call tierzero.initialize(model) or tierzero.load(model, path) before training"
            )

    # -- bytes at rest -------------------------------------------------------------------------------------------------

    async def read_region(self, region: str, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8[n], host) from `offset` of a region, wherever its current bytes lie."""
        record = self.records.get(region)
        if record is not None:
            await record.read(offset, out)
        elif region == "fp32" and self.state is not None:
            await self.state.read(StateRecord.MASTER, offset // 4, out.view(torch.float32))
        else:
            raise TierzeroError(
                f"unit {self.name} has no bytes for its {region} parameters; please report this as a bug"
            )

    async def read_param(self, index: int) -> torch.Tensor:
        """One parameter as a new plain CPU tensor."""
        place = self.layout.places[index]
        out = torch.empty(place.spec.shape, dtype=self.live[index].dtype)
        if place.spec.nbytes:
            await self.read_region(place.region, place.offset, out.view(-1).view(torch.uint8))
        return out

    async def write_param(self, index: int, value: torch.Tensor) -> None:
        """Replace one parameter, and its master where it has a state record."""
        place = self.layout.places[index]
        self.blank.discard(index)
        if not place.spec.nbytes:
            return
        flat = value.detach().to(device="cpu", dtype=self.live[index].dtype).contiguous().view(-1)
        record = self.records.get(place.region)
        if record is not None:
            await record.write(place.offset, flat.view(torch.uint8))
        if self.state is not None and place.elem >= 0:
            await self.state.write(StateRecord.MASTER, place.elem, flat.float())
        elif self.generic is not None:
            await self.generic.write_master(index, flat.float())

    # -- gradients -----------------------------------------------------------------------------------------------------

    def own_grads(self) -> None:
        """Wait until no queued update and no save needs the gradient buffer any more."""
        if self.pending is not None or self.guess is not None or self.gate is not None:
            self.settle()

    def _frozen(self, index: int) -> TierzeroError:
        return TierzeroError(
            f"parameter {self.names[index]} was frozen when offload() laid the model out and has no room for a "
            "gradient: call requires_grad_(True) before offload()"
        )

    def publish_grad(self, index: int) -> torch.Tensor:
        """Make the gradient buffer's view the `.grad` of the rest parameter; returns the plain view."""
        view = self.grad_views[index]
        if view is None:
            raise self._frozen(index)
        self.own_grads()
        self.has_grads = True
        self.coef[index] = self.unscaled[index] = 1.0
        self.touched = False
        before = self.published[index]
        kept = before() if before is not None else None
        if kept is not None:  # by somebody who expects a gradient to stay what it was
            kept.part()
        grad = HostGrad.over(view, functools.partial(_touch, weakref.ref(self), index))
        with torch._C.DisableTorchFunctionSubclass():
            self.rest[index].grad = grad
        self.published[index] = weakref.ref(grad)
        return view

    def touch_grad(self, index: int, changes: bool) -> None:
        """Somebody uses a published gradient, and may keep what changes it behind our back (`.data`, `.numpy()`)."""
        self.settle()
        self.norms, self.touched = None, True
        self.fold_clip(index, clip=changes)  # what is written now is not to be scaled by a clip before it

    def grad(self, index: int) -> torch.Tensor | None:
        """The gradient of one parameter as a plain tensor in the unit's buffer (a foreign `.grad` is copied in), or
        None.
        """
        view = self.grad_views[index]
        with torch._C.DisableTorchFunctionSubclass():
            grad = self.rest[index].grad
            if isinstance(grad, HostGrad) and view is not None and grad.data_ptr() == view.data_ptr():
                return view
        if grad is None:
            return None
        plain = grad.plain if isinstance(grad, HostGrad) else grad
        ours = view is not None and plain.data_ptr() == view.data_ptr()
        # `p.grad = p.grad.detach()` is still the clipped gradient
        coef, unscaled = (self.coef[index], self.unscaled[index]) if ours else (1.0, 1.0)
        view = self.publish_grad(index)
        view.copy_(plain)
        self.coef[index], self.unscaled[index] = coef, unscaled
        return view

    def fold_clip(self, index: int, *, clip: bool = True, scale: bool = True) -> None:
        """Scale a gradient by what waits for a step (the clip coefficient, the inverse loss scale), as the plain loop
        would have done at once.
        """
        view = self.grad_views[index]
        for waits, factors in ((scale, self.unscaled), (clip, self.coef)):
            if waits and factors[index] != 1.0 and view is not None:
                self.own_grads()
                view.mul_(factors[index])
                factors[index] = 1.0


def _touch(unit: weakref.ref[Unit], index: int, changes: bool) -> None:
    """What a published gradient calls; weak, because gc does not see through a parameter to its gradient."""
    found = unit()
    if found is not None:
        found.touch_grad(index, changes)


def _nothing() -> None:
    pass
