"""Pure arithmetic: what a state format, known only when the optimizer is built, needs of budgets that were divided for
float32 states of 12 bytes an element.

Smaller formats fit as they are. amsgrad's records and chunk buffers are larger, and updates of split masters write a
shadow of the parameters first: these take what is left of the host budget, and state records that find no room there
any more go to NVMe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierzero.errors import BudgetError
from tierzero.planning.placement import MIN_SLOTS, Placement
from tierzero.sizes import format_size
from tierzero.units.layout import PAGE, STATE_BYTES, UnitLayout, round_up
from tierzero.units.state_format import StateFormat

MOST_SHADOWS = 3  # as many as there are updates on their way at a time


@dataclass(frozen=True)
class Fit:
    """Per unit: its format, the bytes of its state record, whether that lies in host memory. `host_needed` is the bytes
    of host memory, `update_bytes` and `work_bytes` those of the engine's buffers, as in Placement.
    """

    formats: tuple[StateFormat, ...]
    state_bytes: tuple[int, ...]
    state_host: tuple[bool, ...]
    widest: StateFormat  # of those in use, the one with the largest chunks
    update_bytes: int
    work_bytes: int
    shadows: int
    shadow_bytes: int  # of each
    host_needed: int


def fit(
    wanted: StateFormat,
    layouts: Sequence[UnitLayout],
    placement: Placement,
    cached: Sequence[bool],
    host: int,
    *,
    nvme: bool,
) -> Fit:
    """How `wanted` fits a placement for a budget of `host` bytes; `cached`: whose parameters lie in host memory.
    BudgetError naming a budget to try.
    """
    chunk = placement.chunk
    formats = [wanted.of_unit(layout, there) for layout, there in zip(layouts, cached, strict=True)]
    sizes = [each.record_bytes(layout.elements, chunk) for each, layout in zip(formats, layouts, strict=True)]
    widest = max(formats, key=lambda each: each.chunk_bytes(chunk), default=wanted)
    update, work = placement.update_bytes, placement.work_bytes
    if update:
        update = max(update, MIN_SLOTS * (widest.chunk_bytes(chunk) + 2 * chunk))
    if work:
        work = max(work, *(size + layout.flat_bytes for size, layout in zip(sizes, layouts, strict=True)))
    shadow = max(
        (
            round_up(layout.region_bytes("param"), PAGE)
            for each, layout, there in zip(formats, layouts, placement.state_host, strict=True)
            if each.master == "split" and (not there or wanted.amsgrad)
        ),
        default=0,
    )
    left = host - placement.host_needed + placement.update_bytes - update + placement.work_bytes - work - shadow
    left += sum(
        round_up(STATE_BYTES * layout.elements, PAGE)
        for layout, there in zip(layouts, placement.state_host, strict=True)
        if there
    )
    state_host = []
    for size, there in zip(sizes, placement.state_host, strict=True):
        state_host.append(there and (not nvme or size <= left))
        left -= round_up(size, PAGE) if state_host[-1] else 0
    if left < 0:
        raise BudgetError(
            f"the host budget of {format_size(host)} is too small for {wanted}: give at least {host - left} bytes "
            f"({format_size(host - left)})" + ("" if nvme else ", or give Tiers(nvme=DIRECTORY) to keep states there")
        )
    shadows = 1 + min(left // shadow, MOST_SHADOWS - 1) if shadow else 0
    return Fit(
        formats=tuple(formats),
        state_bytes=tuple(sizes),
        state_host=tuple(state_host),
        widest=widest,
        update_bytes=update,
        work_bytes=work,
        shadows=shadows,
        shadow_bytes=shadow,
        host_needed=host - left + max(shadows - 1, 0) * shadow,
    )
