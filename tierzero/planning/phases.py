"""Bytes per phase of a run: load, step, save, resume. Pure arithmetic over a placement; see how-it-works.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierzero.paging.schedule import Trace, choose_victims
from tierzero.planning.placement import Placement, UnitSize
from tierzero.units.fit import Fit
from tierzero.units.layout import UnitLayout, round_up


@dataclass(frozen=True)
class Phase:
    """Bytes. device, host: the most at any time. drives: the most that lies on each of them. read, written: on all
    drives together; h2d, d2h: between host and device.
    """

    name: str
    device: int
    host: int
    drives: tuple[int, ...]
    read: int
    written: int
    h2d: int = 0
    d2h: int = 0


@dataclass(frozen=True)
class Bytes:
    """What lies where, and what of it a step changes."""

    param_host: int
    param_nvme: int  # 16-bit and frozen parameters; float32 ones are their masters
    state_host: int
    state_nvme: int
    trained_host: int  # of param_host, what is in no state record and changes
    frozen_host: int
    masters_host: int  # of param_host, what is read from the masters when a run is resumed
    first_written: int  # all parameters on the drive, before there are masters
    first_read: int  # what masters are made of
    copies: int  # of param_nvme, what a step writes

    @property
    def changing(self) -> int:
        """Bytes on the drives that a step writes anew."""
        return self.state_nvme + self.copies


def bytes_of(layouts: Sequence[UnitLayout], placement: Placement, fitted: Fit) -> Bytes:
    """The sums over all units."""
    there = list(zip(layouts, placement.param_host, strict=True))

    def region(name: str, cached: bool) -> int:
        return sum(layout.region_bytes(name) for layout, host in there if host is cached)

    copies, frozen, masters = (region(name, False) for name in ("param", "frozen", "fp32"))
    state_host = sum(size for size, host in zip(fitted.state_bytes, fitted.state_host, strict=True) if host)
    return Bytes(
        param_host=sum(layout.flat_bytes for layout, host in there if host),
        param_nvme=copies + frozen,
        state_host=state_host,
        state_nvme=sum(fitted.state_bytes) - state_host,
        trained_host=region("param", True),
        frozen_host=region("frozen", True),
        masters_host=region("fp32", True),
        first_written=copies + frozen + masters,
        first_read=copies + masters,
        copies=copies,
    )


def phases_of(
    found: Bytes, host: int, weights: Sequence[int], step: tuple[int, int, int, int, int], drive: int
) -> tuple[Phase, ...]:
    """The phases in order. host: bytes of host memory. weights: of the drives, none without any. step: (device, read,
    written, h2d, d2h). drive: the most that lies on all drives, with the last snapshot and what updates write.
    """
    total = sum(weights)
    split = lambda nbytes: tuple(round_up(nbytes * weight, total) // total for weight in weights)
    device, read, written, h2d, d2h = step
    in_host = found.trained_host + found.frozen_host + found.state_host
    held = found.param_nvme + found.state_nvme
    first = found.first_written + found.state_nvme
    phases = [
        Phase("load", 0, host, split(first), found.first_read, first),
        Phase("step", device, host, split(drive), read, written, h2d, d2h),
    ]
    if weights:
        back = held + 2 * in_host + found.masters_host  # everything is compared with its checksum, then read
        phases += [
            Phase("save", 0, host, split(drive), 0, in_host),
            Phase("resume", 0, host, split(held + in_host), back, 0),
        ]
    return tuple(phases)


def fetches_per_step(units: list[UnitSize], budget: int, micro: int = 1) -> list[int]:
    """How often each unit is fetched in one step once the trace is known: MIN residency over `micro` forwards and
    backwards, after which trained units are stale.
    """
    order = list(range(len(units)))
    uses = (order + order[::-1]) * micro
    trace = Trace(uses)
    trace.begin_step()
    counts = [0] * len(units)
    resident: dict[int, int] = {}
    for _ in range(2):
        counts = [0] * len(units)
        for position, uid in enumerate(uses):
            trace.use(uid)
            if uid in resident:
                continue
            counts[uid] += 1
            forward = position % (2 * len(units)) < len(units)
            pinned = {uid, *units[uid].around} if forward else {uid}
            need = units[uid].layout.flat_bytes - (budget - sum(resident.values()))
            for victim in choose_victims(resident, need, trace.next_use, pinned) or ():
                del resident[victim]
            resident[uid] = units[uid].layout.flat_bytes
        trace.end_step()
        resident = {uid: nbytes for uid, nbytes in resident.items() if not units[uid].layout.elements}
    return counts
