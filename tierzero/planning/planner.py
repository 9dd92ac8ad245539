"""plan: what a model comes to under given tiers, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tierzero.autograd.microbatch import check_count
from tierzero.hardware.endurance import steps_left
from tierzero.hardware.machine import Machine
from tierzero.hardware.tuning import engine_options, measured, weights_of
from tierzero.native import NATIVE
from tierzero.planning.forecast import Load, device_peak, forecast
from tierzero.planning.phases import bytes_of, fetches_per_step, phases_of
from tierzero.planning.placement import UnitSize, memory_warning, place
from tierzero.planning.planned import Plan
from tierzero.storage.space import room_for
from tierzero.tiers.config import Tiers, memory_limit
from tierzero.units.fit import fit
from tierzero.units.layout import CHUNK_MAX, UnitLayout
from tierzero.units.partition import Part, Units, partition
from tierzero.units.state_format import StateFormat, choose_format
from tierzero.units.unit_sizes import unit_sizes


@dataclass(frozen=True)
class Budgets:
    """What a plan is made for. host, device: bytes. weights: of the drives, none without any. free: bytes on all drives
    together, None if unknown. depth: of prefetching, None for "auto". rating: bytes that the drives may write. block:
    bytes of a piece of I/O, None if unknown. activations: bytes of `host` set aside for them. memory: bytes that the
    process may use, None if unknown.
    """

    host: int
    device: int
    weights: Sequence[int] = ()
    cuda: bool = False
    free: int | None = None
    depth: int | None = None
    rating: int | None = None
    block: int | None = None
    activations: int = 0
    memory: int | None = None


def budgets_of(tiers: Tiers) -> Budgets:
    """Those of `tiers` on this machine."""
    tiers.check()
    directories = tiers.directories()
    profiles = measured(directories)
    weights = weights_of(profiles) if directories else []
    return Budgets(
        host=tiers.host_bytes(),
        device=tiers.device_bytes(),
        weights=weights,
        cuda=tiers.compute_device().type == "cuda",
        free=_free(directories, weights),
        depth=tiers.depth(),
        rating=tiers.rated_bytes() if directories else None,
        block=engine_options(profiles, tiers.block_bytes()).get("block"),
        activations=tiers.activation_bytes(),
        memory=memory_limit(),
    )


def _free(directories: Sequence[Path], weights: Sequence[int]) -> int | None:
    return room_for(list(map(os.fspath, directories)), weights)[0] if directories else None


def plan(
    model: nn.Module,
    tiers: Tiers,
    *,
    units: Units | None = None,
    micro_batches: int = 1,
    snapshots: bool = True,
    state_dtype: Any = torch.float32,
    master: str = "float32",
    amsgrad: bool = False,
    machine: Machine | None = None,
    tokens: int = 0,
    accumulate: int = 1,
    recompute: bool = True,
    clip: bool = True,
    overlap: Literal["auto", "eager", "deferred"] = "auto",
) -> Plan:
    """What offloading `model` (real or on the meta device) would take, without allocating anything.

    `units` and `micro_batches` are those of `offload`; `state_dtype`, `master`, `amsgrad` and `overlap` those of the
    optimizer. `snapshots`: count the space that a pinned snapshot needs on NVMe. With `machine`
    (`tierzero.machine.preset`, `tierzero.measure.this_machine`) the plan has a forecast: the time of a step of
    `accumulate` micro-batches of `tokens` tokens, its backward with or without the recomputation of activations (which
    `micro_batches` bring with them), with clipping or without. A host budget above the memory of this process is in the
    plan's `warning`. Raises BudgetError naming the smallest budget that works.
    """
    check_count(micro_batches)
    parts = partition(model, units)
    budgets = budgets_of(tiers)
    if machine is not None:
        machine = machine.under(tiers.drive_limit() * len(budgets.weights), tiers.device_limit())
    load = Load([forward_flops(part) for part in parts], tokens, accumulate, recompute or micro_batches > 1, clip)
    return plan_units(
        unit_sizes(model, parts, micro_batches),
        budgets,
        load,
        machine=machine,
        snapshots=snapshots,
        overlap=overlap,
        format=choose_format(state_dtype, master, amsgrad, native=NATIVE is not None),
    )


def forward_flops(part: Part) -> float:
    """Of one token: two for each element of a matrix that is multiplied with, which tables of embeddings are not."""
    counted = 0
    for param, slots in zip(part.params, part.slots, strict=True):
        looked_up = all(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module, _ in slots)
        counted += param.numel() if param.ndim > 1 and not looked_up else 0
    return 2.0 * counted


def plan_units(
    sizes: list[UnitSize],
    budgets: Budgets,
    load: Load,
    *,
    machine: Machine | None = None,
    snapshots: bool = True,
    overlap: Literal["auto", "eager", "deferred"] = "auto",
    format: StateFormat,
) -> Plan:
    """`plan` for units that are known by their sizes. Raises BudgetError."""
    host, device, native = budgets.host, budgets.device, NATIVE is not None
    drives = len(budgets.weights)
    placement = place(
        sizes,
        host=host,
        device=device,
        drives=drives,
        native=native,
        cuda=budgets.cuda,
        activations=budgets.activations,
    )
    specs = [place.spec for unit in sizes for place in unit.layout.places]
    layouts = [unit.layout for unit in sizes]
    fitted = fit(format, layouts, placement, placement.param_host, host, nvme=drives > 0)
    found = bytes_of(layouts, placement, fitted)

    def fetched(micro: int) -> tuple[int, int]:
        """(bytes to the device in a step of so many micro-batches, those of them that are read from the drives)."""
        counts = fetches_per_step(sizes, device - placement.grad_reserve, micro)
        each = [count * layout.flat_bytes for count, layout in zip(counts, layouts, strict=True)]
        return sum(each), sum(n for n, there in zip(each, placement.param_host, strict=True) if not there)

    largest = max(
        (size + layout.flat_bytes for size, layout in zip(fitted.state_bytes, layouts, strict=True)), default=0
    )
    nvme = nvme_min = 0
    if drives:
        held = found.changing + found.param_nvme - found.copies
        spare = 3 * largest
        if snapshots:
            held += found.changing + found.param_host + found.state_host
            # the last snapshot stands while they are written again
            spare = max(spare, found.state_host + found.trained_host)
        nvme_min = held + spare
        nvme = held + max(spare, found.changing)  # updates that begin in backward write a second version of everything
    grads = sum(layout.grad_bytes for layout in layouts)
    h2d, read = fetched(1)
    h2d_all, read_all = (h2d, read) if load.accumulate == 1 else fetched(load.accumulate)
    predicted = None
    if machine is not None:
        shadows = budgets.free is None or budgets.free >= nvme
        predicted = forecast(
            sizes,
            placement,
            fitted,
            machine,
            load,
            device=device,
            depth=budgets.depth,
            native=native,
            shadows=shadows,
            overlap=overlap,
            block=budgets.block,
        )
        peak = predicted.step.peak
    else:
        peak = device_peak(sizes, placement, fitted, device=device, depth=budgets.depth)
    return Plan(
        params=sum(spec.numel for spec in specs),
        trainable=sum(spec.numel for spec in specs if spec.trainable),
        units=len(sizes),
        param_bytes=sum(spec.nbytes for spec in specs),
        grad_bytes=grads,
        state_bytes=round(sum(_per_element(*each) for each in zip(fitted.formats, layouts, strict=True))),
        param_host=found.param_host,
        param_nvme=found.param_nvme,
        state_host=found.state_host,
        state_nvme=found.state_nvme,
        buffer_bytes=fitted.host_needed - grads - found.param_host - found.state_host - placement.activations,
        activation_bytes=placement.activations,
        device_budget=device,
        device_needed=placement.device_min,
        host_budget=host,
        host_needed=fitted.host_needed,
        host_min=placement.host_min,
        nvme_bytes=nvme,
        nvme_min=nvme_min,
        step_nvme_read=found.state_nvme + read,
        step_nvme_written=found.changing,
        step_h2d=h2d,
        step_d2h=grads,
        disk_free=budgets.free,
        native=native,
        steps_to_tbw=steps_left(budgets.rating, found.changing) if drives else None,
        phases=phases_of(
            found,
            fitted.host_needed,
            budgets.weights,
            (peak, found.state_nvme + read_all, found.changing, h2d_all, load.accumulate * grads),
            nvme,
        ),
        forecast=predicted,
        warning="" if budgets.memory is None else memory_warning(placement, budgets.memory),
    )


def _per_element(format: StateFormat, layout: UnitLayout) -> float:
    """Bytes of the states of a unit's parameters, without what fills chunks up."""
    trained = sum(place.spec.numel for place in layout.places if place.elem >= 0)
    return trained * format.record_bytes(CHUNK_MAX, CHUNK_MAX) / CHUNK_MAX
