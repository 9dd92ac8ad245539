"""What will live where: the budgets of a run and the table printed before it starts."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tierzero as tz
from tierzero.cli.config import Config
from tierzero.cli.task import Task
from tierzero.engine import unit_sizes
from tierzero.native import NATIVE
from tierzero.partition import partition
from tierzero.placement import place
from tierzero.sizes import format_size

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
        sizes = unit_sizes(partition(model))
        least = place(sizes, host=_BOUNDLESS, device=_BOUNDLESS, nvme=True, native=NATIVE is not None, cuda=cuda)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        param_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        state_bytes = 12 * sum(parameter.numel() for parameter in trained)
        device = max(_share(param_bytes, DEVICE_SHARE), least.device_min) if device is None else device
        host = max(_share(state_bytes, HOST_SHARE), least.host_min) if host is None else host
    return tz.Tiers(nvme=config.store, host=host, device=device, prefetch=tiers.prefetch, gds=tiers.gds)


def _share(nbytes: int, parts: int) -> int:
    """A part of `nbytes`, in whole MiB where that is at least one."""
    return nbytes // parts // _WHOLE * _WHOLE or nbytes // parts
