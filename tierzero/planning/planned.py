"""Plan: what was planned, and its table."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierzero.planning.forecast import Forecast
from tierzero.planning.phases import Phase
from tierzero.sizes import format_size


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
    phases: tuple[Phase, ...] = ()
    forecast: Forecast | None = field(default=None, repr=False)  # with a machine
    warning: str = ""  # a sentence about what works and may end badly; empty if nothing

    @property
    def fits(self) -> bool:
        """Whether it works; `why` says what does not. Budgets that are too small are an error already."""
        return not self.why

    @property
    def why(self) -> str:
        """A sentence that says what does not work; empty if nothing."""
        if self.disk_free is not None and self.nvme_min > self.disk_free:
            return (
                f"the store needs {self.store_needs} and the drives have {format_size(self.disk_free)} free: "
                "free some space, use larger drives, or keep more in host memory"
            )
        return ""

    @property
    def store_needs(self) -> str:
        """The bytes of the store as the tables show them, and those without which nothing works if that is less."""
        whole, least = format_size(self.nvme_bytes), format_size(self.nvme_min)
        return whole if least == whole else f"{whole} ({least} at least, with updates that wait for their step)"

    def __str__(self) -> str:
        """The table, under its heading, and the warning if there is one."""
        rows = [("", "device", "host", "NVMe"), *self.table()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"warning: {self.warning}"] if self.warning else lines)

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
        beyond = ("-", "what exceeds it") if self.nvme_bytes else ("what exceeds it", "-")
        return [("activations", beyond[0], f"up to {format_size(self.activation_bytes)}", beyond[1])]
