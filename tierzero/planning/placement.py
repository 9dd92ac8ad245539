"""Pure arithmetic: unit layouts and byte budgets -> what lives where, buffer sizes, and the smallest budgets that
work.

Note [host budget]
Everything the engine keeps in host memory comes out of one budget: gradients of all trainable parameters, the chunk
buffers of the streamed step, bounce memory for I/O, staging blocks for a GPU, and records cached there. Without NVMe
all records must fit. With it, what is left after gradients and buffers caches parameter records first (they are read
twice a step), then state records of units whose parameters are there. What is set aside for activations comes off
first.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tierzero.errors import BudgetError
from tierzero.sizes import format_size
from tierzero.units.layout import PAGE, SLOT_BYTES, UnitLayout, chunk_elements, round_up

log = logging.getLogger("tierzero")
IO_BYTES = 4 << 20  # bounce memory of the native engine per drive, whatever its block and depth
MIN_SLOTS = 3
# (chunk buffers, bytes of a staging block), the most generous that fits is taken; more than AMPLE only where there is
# plenty. How many of them are in use is found while training (csrc/appetite.hpp).
AMPLE = 8
BUFFERS = ((24, 4 << 20), (16, 4 << 20), (8, 4 << 20), (6, 2 << 20), (4, 1 << 20), (3, 256 << 10), (3, 64 << 10))


@dataclass(frozen=True)
class UnitSize:
    """A unit as placement sees it: its layout, the units whose modules contain its module (their forwards run around
    its own), the bytes of gradients that gather on the device until its backward is over (those of micro-batches), and
    the units whose weights it is seen to read.
    """

    name: str
    layout: UnitLayout
    around: tuple[int, ...] = ()
    gathers: int = 0
    borrows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where every unit's records live and how large the engine's buffers are. Sizes are bytes."""

    chunk: int
    slots: int
    staging_block: int
    staging_blocks: int
    work_bytes: int
    param_host: tuple[bool, ...]
    state_host: tuple[bool, ...]
    host_needed: int
    host_min: int
    device_min: int
    grad_reserve: int
    activations: int

    @property
    def update_bytes(self) -> int:
        """The chunk buffers of the streamed step; none where nothing is trained, or without the native pipeline."""
        return self.slots * SLOT_BYTES * self.chunk


def place(
    units: Sequence[UnitSize], *, host: int, device: int, drives: int, native: bool, cuda: bool, activations: int = 0
) -> Placement:
    """Choose the placement for budgets in bytes; `drives` is the number of directories on NVMe, 0 without;
    `activations` are bytes of the host budget.

    Raises BudgetError naming the smallest budget that works.
    """
    layouts = [unit.layout for unit in units]
    chunk = chunk_elements(layouts)
    activations = activations // PAGE * PAGE
    grads = sum(round_up(layout.grad_bytes, PAGE) for layout in layouts)
    flats = [round_up(layout.flat_bytes, PAGE) for layout in layouts]
    states = [round_up(layout.state_bytes, PAGE) for layout in layouts]
    trains, nvme = any(states), drives > 0

    def buffers(slots: int, block: int) -> tuple[int, int, int, int]:
        """(chunk buffers, staging blocks of their own, Python work area, all of it with the bounce memory for I/O)."""
        update = slots * SLOT_BYTES * chunk if native and trains else 0
        work = 0 if native or not nvme else max((s + f for s, f in zip(states, flats, strict=True)), default=0)
        staging = 4 if cuda and nvme else 0
        bounce = IO_BYTES * drives if native else 0
        return update, staging, work, update + staging * block + work + bounce

    largest = max([*flats, *states, 1])
    options = [(slots, min(block, round_up(largest, 64 << 10))) for slots, block in BUFFERS]
    resident = 0 if nvme else sum(flats) + sum(states)
    smallest = grads + buffers(*options[-1])[3] + resident + activations
    if host < smallest:
        raise BudgetError(
            f"the host budget of {format_size(host)} is too small: gradients of the trainable parameters take "
            f"{format_size(grads)}, the engine's buffers at least "
            f"{format_size(buffers(*options[-1])[3])}"
            + (
                f", and without an NVMe path all {format_size(resident)} of parameters and optimizer states"
                if not nvme
                else ""
            )
            + (f", and {format_size(activations)} are set aside for activations" if activations else "")
            + f"; the smallest host budget that works is {smallest} bytes ({format_size(smallest)})"
            + ("" if nvme else ", or give Tiers(nvme=DIRECTORY) to keep parameters and states there")
        )
    device_min, reserve = device_needs(units)
    if device < device_min:
        raise BudgetError(
            f"the device budget of {format_size(device)} is too small for the largest unit with the units around it"
            f"{_lent(units)} and its gradients; {format_size(device_min - device)} more are needed: the smallest "
            "device budget that works is "
            f"{device_min} bytes ({format_size(device_min)}), or split the model into smaller "
            "units with offload(..., units=...) in Python"
        )

    def suits(slots: int, block: int) -> bool:
        need = buffers(slots, block)[3]
        room = host - activations
        plenty = nvme and (grads + need + sum(flats) <= room or 64 * need <= room)
        return grads + need + resident <= room and (slots <= AMPLE or plenty)

    slots, block = next(option for option in options if suits(*option))
    _, staging, work, overhead = buffers(slots, block)
    left = host - activations - grads - overhead
    param_host, state_host = [not nvme] * len(units), [not nvme] * len(units)
    if nvme:
        for index, nbytes in enumerate(flats):
            if nbytes <= left:
                param_host[index] = True
                left -= nbytes
        for index, nbytes in enumerate(states):
            if nbytes <= left and param_host[index]:
                state_host[index] = True
                left -= nbytes
    else:
        left -= resident
    return Placement(
        chunk=chunk,
        slots=slots if native and trains else 0,
        staging_block=block if staging else 0,
        staging_blocks=staging,
        work_bytes=work,
        param_host=tuple(param_host),
        state_host=tuple(state_host),
        host_needed=host - left,
        host_min=smallest,
        device_min=device_min,
        grad_reserve=reserve,
        activations=activations,
    )


def device_needs(units: Sequence[UnitSize]) -> tuple[int, int]:
    """(the smallest device budget, the part of it kept for gradients on their way out), bytes."""
    reserve = 0
    chain = max((_chain(units, unit) for unit in units), default=0)
    for unit in units:
        grads = sorted((place.spec.nbytes for place in unit.layout.places if place.grad >= 0), reverse=True)
        reserve = max(reserve, sum(grads[:2]) + unit.gathers)
    return chain + reserve, reserve


def _chain(units: Sequence[UnitSize], unit: UnitSize) -> int:
    """Bytes that must be on the device at once while `unit` runs."""
    return unit.layout.flat_bytes + sum(units[index].layout.flat_bytes for index in (*unit.around, *unit.borrows))


def _lent(units: Sequence[UnitSize]) -> str:
    """What is lent to the unit that needs most."""
    most = max(units, key=lambda unit: _chain(units, unit), default=None)
    if most is None or not most.borrows:
        return ""
    names = ", ".join(units[index].name for index in most.borrows)
    nbytes = sum(units[index].layout.flat_bytes for index in most.borrows)
    return f" ({most.name}), with the weights that its modules read of {names} ({format_size(nbytes)})"


def device_too_small(
    name: str, nbytes: int, budget: int, held: dict[str, int], reserve: int, lent: Collection[str] = ()
) -> BudgetError:
    """The error for unit `name` of `nbytes` that finds no room beside the `held` units; names the budget that works.
    `lent`: those of all these that are there because others read their weights.
    """
    need = nbytes + reserve + sum(size for other, size in held.items() if other != name)
    names = ", ".join(other for other in held if other != name) or "nothing"
    loans = ", ".join(other for other in dict.fromkeys((name, *held)) if other in lent)
    return BudgetError(
        f"unit {name} ({format_size(nbytes)}) does not fit the device budget of {format_size(budget)} for parameters "
        f"while {names} must stay"
        + (f" (lent to modules that read their weights, which cannot be seen before: {loans})" if loans else "")
        + f"; {format_size(need - budget - reserve)} more are needed: a device budget of at least {format_size(need)} "
        f"({need} bytes) works here"
    )


def memory_warning(placement: Placement, memory: int) -> str:
    """What to say where the host tier may fill more than the `memory` in bytes that a process may use, else "". Its
    pages are there once they are touched, so that it would show as a kill, later.
    """
    if placement.host_needed <= memory:
        return ""
    least = f"the smallest one that works is {format_size(placement.host_min)}"
    lower = placement.host_min <= memory
    return (
        f"the host budget lets the model use {format_size(placement.host_needed)} of host memory, and this process may "
        f"use {format_size(memory)}: it will swap or be killed when that is full. "
        + (f"Give a lower one; {least}" if lower else f"Here {least}: use a drive (nvme=), or freeze parameters")
    )


def warn_of_memory(placement: Placement, memory: int) -> None:
    """Log that warning, if there is one."""
    if warning := memory_warning(placement, memory):
        log.warning("%s", warning)
