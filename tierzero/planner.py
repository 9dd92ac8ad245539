"""plan: what a model comes to under given tiers, before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierzero.endurance import steps_left
from tierzero.fit import fit
from tierzero.layout import CHUNK_MAX, UnitLayout
from tierzero.microbatch import check_count
from tierzero.native import NATIVE
from tierzero.partition import Units, partition
from tierzero.placement import UnitSize, place
from tierzero.schedule import Trace, choose_victims
from tierzero.sizes import format_size
from tierzero.space import room_for
from tierzero.state_format import StateFormat, choose_format
from tierzero.tiers.config import Tiers
from tierzero.tuning import measured, weights_of
from tierzero.unit_sizes import unit_sizes


@dataclass(frozen=True)
class Plan:
    """Sizes are bytes; `step_*` are bytes per optimizer step with one micro-batch, all units used once in forward and
    backward.
    """

    params: int
    trainable: int
    units: int
    param_bytes: int
    grad_bytes: int
    state_bytes: int
    param_host: int
    param_nvme: int
    state_host: int
    state_nvme: int
    buffer_bytes: int
    activation_bytes: int  # of host memory; what exceeds them depends on the batch, which is not known here
    device_budget: int
    device_needed: int
    host_budget: int
    host_needed: int
    host_min: int
    nvme_bytes: int  # with room for updates that begin in backward
    nvme_min: int  # updates begin at the step
    step_nvme_read: int
    step_nvme_written: int
    step_h2d: int
    step_d2h: int
    disk_free: int | None
    native: bool
    steps_to_tbw: int | None  # how many such steps new drives stand; None without a rating or without writing

    def __str__(self) -> str:
        """The table, under its heading."""
        rows = [("", "device", "host", "NVMe"), *self.table()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def table(self) -> list[tuple[str, str, str, str]]:
        """(what, device, host, NVMe) rows of the placement, as text."""
        size = format_size
        rows = [
            ("parameters", f"up to {size(self.device_budget)} at a time", size(self.param_host), size(self.param_nvme)),
            ("gradients", "on their way out", size(self.grad_bytes), "-"),
            ("optimizer states", "-", size(self.state_host), size(self.state_nvme)),
            ("engine buffers", "-", size(self.buffer_bytes), "-"),
            *self.activation_row(),
            ("total", size(self.device_needed) + " needed", size(self.host_needed), size(self.nvme_bytes)),
            (
                "budget / free",
                size(self.device_budget),
                size(self.host_budget),
                "-" if self.disk_free is None else size(self.disk_free) + " free",
            ),
            (
                "moved per step",
                f"{size(self.step_h2d)} in, {size(self.step_d2h)} out",
                "-",
                f"{size(self.step_nvme_read)} read, {size(self.step_nvme_written)} written",
            ),
        ]
        if self.steps_to_tbw is not None:
            rows.append(("steps to rating", "-", "-", f"{self.steps_to_tbw:,}"))
        return rows

    def activation_row(self) -> list[tuple[str, str, str, str]]:
        """The row of activations that are moved, where they are."""
        if not self.activation_bytes:
            return []
        beyond = ("-", "what exceeds it") if self.disk_free is not None else ("what exceeds it", "-")
        return [("activations", beyond[0], f"up to {format_size(self.activation_bytes)}", beyond[1])]


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
) -> Plan:
    """What offloading `model` (real or on the meta device) would take, without allocating anything.

    `units` and `micro_batches` are those of `offload`; `state_dtype`, `master` and `amsgrad` those of the optimizer.
    `snapshots`: count the space that a pinned snapshot needs on NVMe. Raises BudgetError naming the smallest budget
    that works.
    """
    tiers.check()
    check_count(micro_batches)
    sizes = unit_sizes(model, partition(model, units), micro_batches)
    host, device, directories = tiers.host_bytes(), tiers.device_bytes(), tiers.directories()
    cuda = tiers.compute_device().type == "cuda"
    placement = place(
        sizes,
        host=host,
        device=device,
        drives=len(directories),
        native=NATIVE is not None,
        cuda=cuda,
        activations=tiers.activation_bytes(),
    )
    specs = [place.spec for unit in sizes for place in unit.layout.places]
    layouts = [unit.layout for unit in sizes]
    trainable = sum(spec.numel for spec in specs if spec.trainable)
    param_host = sum(layout.flat_bytes for layout, there in zip(layouts, placement.param_host, strict=True) if there)
    wanted = choose_format(state_dtype, master, amsgrad, native=NATIVE is not None)
    fitted = fit(wanted, layouts, placement, placement.param_host, host, nvme=bool(directories))
    state_host = sum(size for size, there in zip(fitted.state_bytes, fitted.state_host, strict=True) if there)
    state_nvme = sum(fitted.state_bytes) - state_host
    copies = sum(
        layout.region_bytes("param") for layout, there in zip(layouts, placement.param_host, strict=True) if not there
    )
    frozen = sum(
        layout.region_bytes("frozen") for layout, there in zip(layouts, placement.param_host, strict=True) if not there
    )
    trained_host = param_host - sum(
        layout.region_bytes("frozen") for layout, there in zip(layouts, placement.param_host, strict=True) if there
    )
    fetches = fetches_per_step(sizes, device - placement.grad_reserve, tiers.depth())
    fetched = [count * layout.flat_bytes for count, layout in zip(fetches, layouts, strict=True)]
    changing = state_nvme + copies
    largest = max(
        (size + layout.flat_bytes for size, layout in zip(fitted.state_bytes, layouts, strict=True)), default=0
    )
    nvme = nvme_min = 0
    if directories:
        held = changing + frozen
        spare = 3 * largest
        if snapshots:
            held += changing + param_host + state_host
            spare = max(spare, state_host + trained_host)  # the last snapshot stands while they are written again
        nvme_min = held + spare
        nvme = held + max(spare, changing)  # updates that begin in backward write a second version of everything
    grads = sum(layout.grad_bytes for layout in layouts)
    return Plan(
        params=sum(spec.numel for spec in specs),
        trainable=trainable,
        units=len(sizes),
        param_bytes=sum(spec.nbytes for spec in specs),
        grad_bytes=grads,
        state_bytes=round(sum(_per_element(*each) for each in zip(fitted.formats, layouts, strict=True))),
        param_host=param_host,
        param_nvme=copies + frozen,  # float32 parameters on NVMe are their masters and have no bytes of their own
        state_host=state_host,
        state_nvme=state_nvme,
        buffer_bytes=fitted.host_needed - grads - param_host - state_host - placement.activations,
        activation_bytes=placement.activations,
        device_budget=device,
        device_needed=placement.device_min,
        host_budget=host,
        host_needed=fitted.host_needed,
        host_min=placement.host_min,
        nvme_bytes=nvme,
        nvme_min=nvme_min,
        step_nvme_read=state_nvme + sum(n for n, there in zip(fetched, placement.param_host, strict=True) if not there),
        step_nvme_written=changing,
        step_h2d=sum(fetched),
        step_d2h=grads,
        disk_free=room_for(list(map(os.fspath, directories)), weights_of(measured(directories)))[0]
        if directories
        else None,
        native=NATIVE is not None,
        steps_to_tbw=steps_left(tiers.rated_bytes(), changing) if directories else None,
    )


def _per_element(format: StateFormat, layout: UnitLayout) -> float:
    """Bytes of the states of a unit's parameters, without what fills chunks up."""
    trained = sum(place.spec.numel for place in layout.places if place.elem >= 0)
    return trained * format.record_bytes(CHUNK_MAX, CHUNK_MAX) / CHUNK_MAX


def fetches_per_step(units: list[UnitSize], budget: int, depth: int | None) -> list[int]:
    """How often each unit is fetched in one step once the trace is known: MIN residency over one forward and one
    backward, after which trained units are stale.
    """
    order = list(range(len(units)))
    trace = Trace(order + order[::-1])
    trace.begin_step()
    counts = [0] * len(units)
    resident: dict[int, int] = {}
    for _ in range(2):
        counts = [0] * len(units)
        for position, uid in enumerate(order + order[::-1]):
            trace.use(uid)
            if uid in resident:
                continue
            counts[uid] += 1
            pinned = {uid, *units[uid].around} if position < len(units) else {uid}
            need = units[uid].layout.flat_bytes - (budget - sum(resident.values()))
            for victim in choose_victims(resident, need, trace.next_use, pinned) or ():
                del resident[victim]
            resident[uid] = units[uid].layout.flat_bytes
        trace.end_step()
        resident = {uid: nbytes for uid, nbytes in resident.items() if not units[uid].layout.elements}
    return counts
