"""What will live where: the budgets of a run and the table printed before it starts."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

import tierzero as tz
from tierzero.checkpoint.export import export_needs
from tierzero.cli.config import Config
from tierzero.cli.task import Task
from tierzero.errors import ConfigError
from tierzero.hardware.drives import existing_parent
from tierzero.hardware.tuning import measured, weights_of
from tierzero.native import NATIVE
from tierzero.planning.placement import place
from tierzero.planning.planned import Plan
from tierzero.sizes import format_size, parse_size
from tierzero.storage.space import room_for
from tierzero.units.partition import partition
from tierzero.units.unit_sizes import unit_sizes

DEVICE_SHARE = 6  # the device holds a sixth of the parameters
HOST_SHARE = 4  # host memory a quarter of the optimizer states' bytes
_BOUNDLESS = 1 << 60
_WHOLE = 1 << 20


def choose_tiers(config: Config, model: nn.Module) -> tz.Tiers:
    """The budgets of the configuration; unset ones become shares of the model, or the smallest that works if more."""
    tiers = config.tiers
    host, device = tiers.host, tiers.device
    if host is None or device is None:
        cuda = torch.cuda.is_available()
        sizes = unit_sizes(model, partition(model), config.train.micro_batches)
        drives, native = len(config.stores), NATIVE is not None
        least = place(sizes, host=_BOUNDLESS, device=_BOUNDLESS, drives=drives, native=native, cuda=cuda)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        param_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        state_bytes = 12 * sum(parameter.numel() for parameter in trained)
        device = max(_share(param_bytes, DEVICE_SHARE), least.device_min) if device is None else device
        if host is None:
            host = _with_activations(max(_share(state_bytes, HOST_SHARE), least.host_min), tiers.activations)
    return tz.Tiers(
        nvme=config.stores,
        host=host,
        device=device,
        activations=tiers.activations,
        prefetch=tiers.prefetch,
        gds=tiers.gds,
        nvme_tbw=tiers.nvme_tbw,
        nvme_limit=tiers.nvme_limit,
        link_limit=tiers.link_limit,
        nvme_block=tiers.nvme_block,
        update_threads=tiers.update_threads,
        update_cores=tiers.update_cores,
    )


def _share(nbytes: int, parts: int) -> int:
    """A part of `nbytes`, in whole MiB where that is at least one."""
    return nbytes // parts // _WHOLE * _WHOLE or nbytes // parts


def _with_activations(host: int, activations: int | float | str) -> int:
    """A host budget with `activations` on top of `host` bytes. ConfigError if they are to be all of it."""
    if not (isinstance(activations, str) and activations.endswith("%")):
        return host + parse_size(activations)
    rest = _WHOLE - parse_size(activations, of=_WHOLE)
    if not rest:
        raise ConfigError(
            f"tiers.activations = {activations!r} leaves nothing of the host budget: give less, or tiers.host"
        )
    return host * _WHOLE // rest + 1


def check_disk(config: Config, plan: Plan, *, exports: bool = True, overwrite: bool = False) -> None:
    """OSError(ENOSPC) where the drive has less room than the store needs beside the export that the run `exports` to
    the same drive. What the store takes already counts as room, and so does an earlier export if the run is to
    `overwrite` it: otherwise that stands until the new one is whole.
    """
    stores, folder = config.stores, config.train.out / "export"
    promised = Counter({os.stat(existing_parent(store)).st_dev: 0 for store in stores})
    for store in stores:
        promised.subtract(_taken(store))
    beside = ""
    drive = os.stat(existing_parent(folder)).st_dev
    if exports and drive in promised:
        export = export_needs(plan.param_bytes)
        promised[drive] += export
        beside = f" beside the export of {format_size(export)} to {folder}"
        if overwrite:
            promised.subtract(_taken(folder))
    room, _ = room_for(list(map(os.fspath, stores)), weights_of(measured(stores)), promised)
    if plan.nvme_min > room:
        raise OSError(
            errno.ENOSPC,
            f"the store in {config.store} needs {plan.store_needs} and the drive has {format_size(room)} for it"
            f"{beside}: free some space, or set tiers.nvme to a directory on a larger drive",
            str(config.store),
        )


def _taken(folder: Path) -> Counter[int]:
    """By device number, the bytes that files in `folder` take."""
    found: Counter[int] = Counter()
    for path in folder.glob("*"):
        if path.is_file():
            stat = path.stat()
            found[stat.st_dev] += stat.st_blocks * 512
    return found


def print_placement(console: Console, config: Config, task: Task, plan: Plan) -> None:
    """The table of what lives where, what moves per step, and what the drive must hold."""
    console.print(Text(f"{task.describe()}, {plan.params:,} parameters in {config.train.dtype}"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("", "left"), ("device", "right"), ("host", "right"), ("NVMe", "right")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows(config, plan):
        table.add_row(*map(Text, row))  # a path may look like markup
    console.print(table)
    if not plan.native:
        console.print(
            "The native extension is not built: the portable tier and torch's own AdamW do the work, slower.",
            soft_wrap=True,
        )


def rows(config: Config, plan: Plan) -> list[tuple[str, str, str, str]]:
    """(what, device, host, NVMe); bytes per step are those of all its micro-batches."""

    def size(nbytes: int) -> str:
        return format_size(nbytes) if nbytes else "-"

    micro = config.train.accumulate
    read = plan.state_nvme + micro * (plan.step_nvme_read - plan.state_nvme)
    free = "" if plan.disk_free is None else f", {format_size(plan.disk_free)} free"
    wear = []
    if plan.steps_to_tbw is not None:
        wear.append(("steps to rating", "-", "-", f"{plan.steps_to_tbw:,}"))
    places = ", ".join(map(str, config.stores))
    return [
        ("parameters", "as used", size(plan.param_host), size(plan.param_nvme)),
        ("gradients", "passing", size(plan.grad_bytes), "-"),
        ("optimizer states", "-", size(plan.state_host), size(plan.state_nvme)),
        ("engine buffers", "-", size(plan.buffer_bytes), "-"),
        *plan.activation_row(),
        ("needed", size(plan.device_needed), size(plan.host_needed), size(plan.nvme_bytes)),
        ("budget", size(plan.device_budget), size(plan.host_budget), f"{places}{free}"),
        ("in per step", size(micro * plan.step_h2d), "-", f"{size(read)} read"),
        ("out per step", size(micro * plan.step_d2h), "-", f"{size(plan.step_nvme_written)} written"),
        *wear,
    ]
