"""How long a planned step takes and what limits it: a placement and a machine's rates, through the simulation. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tierzero.hardware.machine import Machine
from tierzero.paging.waiting import WIDTH
from tierzero.planning.placement import Placement, UnitSize
from tierzero.planning.simulate import simulate
from tierzero.sim.links import DriveRates
from tierzero.sim.model import Rates, Setup, SimStep, SimUnit
from tierzero.units.fit import Fit

UNDER_WAY = 12  # chunks of the streamed step, before it has found how many the drive needs (csrc/appetite.cpp)

HIDDEN = 1.05  # I/O is hidden when a step takes at most so much longer than its compute
_COARSE = 600  # chunks a step where only its length is asked for
_HALVINGS = 5
_SOME = Rates(50e9, 50e9, 7e9, 50e9, DriveRates(7e9, 7e9, 7e9))  # a machine, where it does not matter which
NAMES = {"compute": "compute", "h2d": "the bus to the device", "d2h": "the bus to the host"}
NAMES |= {"drive": "the drives", "adam": "the CPU's Adam"}


@dataclass(frozen=True)
class Load:
    """What is computed. flops: of each unit's forward, for one token. tokens: of a micro-batch. accumulate: how many
    of them a step has. recompute: backward runs the forward again. clip: by the norm of all gradients.
    """

    flops: Sequence[float]
    tokens: int = 0
    accumulate: int = 1
    recompute: bool = True
    clip: bool = True

    def seconds(self, machine: Machine) -> list[tuple[float, float]]:
        """(forward, backward) of each unit for one micro-batch."""
        if machine.seconds is not None:
            return list(machine.seconds)
        if not machine.flops:
            return [(0.0, 0.0)] * len(self.flops)
        forward = [each * self.tokens / machine.flops for each in self.flops]
        return [(each, (3 if self.recompute else 2) * each) for each in forward]


@dataclass(frozen=True)
class Forecast:
    """step: while guesses hold (see optim/overlap.py). deferred: when every step is clipped, so that updates wait for
    the norm. compute: seconds a step that cannot be saved by moving bytes faster. hidden_tokens: of a step, from which
    on it takes at most 5 % longer than its compute; None where there is nothing to compute or it is never so.
    """

    step: SimStep
    deferred: SimStep
    compute: float
    tokens: int
    hidden_tokens: int | None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.seconds

    @property
    def bottleneck(self) -> str:
        """What is busiest, in words."""
        return NAMES[self.step.bottleneck]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def sim_units(
    sizes: Sequence[UnitSize], placement: Placement, fitted: Fit, seconds: Sequence[tuple[float, float]]
) -> list[SimUnit]:
    """The units as the simulation sees them."""
    units = []
    for index, (size, (forward, backward)) in enumerate(zip(sizes, seconds, strict=True)):
        layout, cached = size.layout, placement.param_host[index]
        units.append(
            SimUnit(
                flat=layout.flat_bytes,
                grads=layout.grad_bytes,
                grad=max([size.gathers, *(place.spec.nbytes for place in layout.places if place.grad >= 0)]),
                elements=layout.elements,
                state=fitted.state_bytes[index],
                copy=0 if cached else layout.region_bytes("param"),
                cached=cached,
                on_drive=bool(layout.elements) and not fitted.state_host[index],
                forward=forward,
                backward=backward,
                around=size.around,
            )
        )
    return units


def device_peak(sizes: Sequence[UnitSize], placement: Placement, fitted: Fit, *, device: int, depth: int | None) -> int:
    """The most bytes on the device during a step, gradients on their way out included: it follows from the order of
    uses, and hardly from what takes how long.
    """
    units = sim_units(sizes, placement, fitted, [(1e-3, 2e-3)] * len(sizes))
    setup = Setup(budget=device - placement.grad_reserve, depth=depth, chunk=placement.chunk)
    return simulate(units, _SOME, setup, chunks=len(sizes)).peak


def forecast(
    sizes: Sequence[UnitSize],
    placement: Placement,
    fitted: Fit,
    machine: Machine,
    load: Load,
    *,
    device: int,
    depth: int | None,
    native: bool,
    shadows: bool,
    overlap: Literal["auto", "eager", "deferred"] = "auto",
    block: int | None = None,
) -> Forecast:
    """device: the budget in bytes. depth: of prefetching. shadows: the drives have room for two versions of all states.
    block: bytes of a piece of I/O.
    """
    seconds = load.seconds(machine)
    units = sim_units(sizes, placement, fitted, seconds)
    guess = native and shadows and overlap != "deferred" and all(each.master != "split" for each in fitted.formats)
    chunk = max(1, fitted.widest.chunk_bytes(placement.chunk) + 2 * placement.chunk)
    setup = Setup(
        budget=device - placement.grad_reserve,
        depth=depth,
        overlap="eager" if guess else "deferred",
        width=WIDTH if native else 1,
        slots=max(1, min(UNDER_WAY, fitted.update_bytes // chunk)),
        chunk=placement.chunk,
        clip=load.clip,
        micro=load.accumulate,
    )
    if block is not None:
        setup = replace(setup, block=block)
    step = simulate(units, machine.rates, setup)
    deferred = simulate(units, machine.rates, replace(setup, overlap="deferred")) if guess else step
    tokens = load.tokens * load.accumulate
    compute = load.accumulate * sum(forward + backward for forward, backward in seconds)
    hidden = None
    if compute and tokens:
        hidden = _hidden(units, machine, setup, step, compute, tokens)
    return Forecast(step, deferred, compute, tokens, hidden)


def _hidden(
    units: Sequence[SimUnit], machine: Machine, setup: Setup, step: SimStep, compute: float, tokens: int
) -> int | None:
    """The fewest tokens a step with which I/O hides, by halving: within a factor of the bound that links alone give."""

    def hides(factor: float) -> bool:
        longer = [replace(unit, forward=unit.forward * factor, backward=unit.backward * factor) for unit in units]
        found = simulate(longer, machine.rates, setup, chunks=_COARSE)
        return found.seconds <= HIDDEN * found.stalls["compute"]

    low = max(step.busy.values()) / compute / HIDDEN  # a link cannot hide behind less
    high = max(4 * low, 1e-9)
    if not hides(high):
        low, high = high, 16 * high
        if not hides(high):
            return None
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high) if low > 0 else high / 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return math.ceil(high * tokens)
