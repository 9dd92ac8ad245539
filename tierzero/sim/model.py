"""What a simulation is told: the units of a model, the machine's rates, and how the engine is set up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tierzero.paging.waiting import WIDTH
from tierzero.sim.links import DriveRates


@dataclass(frozen=True)
class SimUnit:
    """One unit. Sizes are bytes, times seconds of the compute device for one micro-batch.

    flat: parameters on the device. cached: they lie in host memory, else on the drive. grads: what leaves for the host.
    grad: the most of them that are on the device at a time. elements: of its optimizer state, 0 if nothing is trained.
    state: its record. on_drive: that lies on the drive. copy: parameters written to the drive by an update. around:
    units whose forwards run around this one's.
    """

    flat: int
    grads: int
    grad: int
    elements: int
    state: int
    copy: int
    cached: bool
    on_drive: bool
    forward: float
    backward: float
    around: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rates:
    """A machine. h2d, d2h, norm: bytes/s. adam: elements/s of the CPU. `drive` None: there is none.

    inline: the CPU is the compute device, so gradients leave on its time. overhead: seconds of Python at each use of a
    unit. latency: seconds from a request to the drive until it begins to be served. staging: bytes of the blocks that
    fetches from the drive pass through. link_limit: what parameters on their way to the device are held below, 0 for
    nothing.
    """

    h2d: float
    d2h: float
    adam: float
    norm: float
    drive: DriveRates | None = None
    inline: bool = False
    overhead: float = 1e-4
    latency: float = 1e-4
    staging: int = 4 << 20
    link_limit: float = 0.0


@dataclass(frozen=True)
class Setup:
    """How the engine is set up. budget: bytes for resident units. depth: units to look ahead, None: as far as the
    budget reaches. overlap: when updates begin. width: updates on their way at once. slots, chunk: of the streamed
    step, chunks in elements. block: bytes of a piece of I/O. clip: the step waits for the norms. micro: micro-batches a
    step, each a forward and a backward of its own.
    """

    budget: int
    depth: int | None = None
    overlap: Literal["eager", "deferred"] = "deferred"
    width: int = WIDTH
    slots: int = 8
    chunk: int = 256 * 1024
    block: int = 4 << 20
    clip: bool = True
    micro: int = 1


@dataclass(frozen=True)
class SimStep:
    """One step of a run that has settled. Times are seconds, sizes bytes.

    stalls: compute, and what it waited for; together `seconds`. busy: how long each link worked meanwhile. moved: bytes
    over each link. peak: bytes on the device, gradients on their way included.
    """

    seconds: float
    stalls: dict[str, float]
    busy: dict[str, float]
    moved: dict[str, float]
    peak: int
    fetches: int
    hits: int
    forced: int = 0
    wasted: int = 0
    timeline: list[tuple[str, int, float, float]] = field(default_factory=list, repr=False)

    @property
    def bottleneck(self) -> str:
        """The busiest: "compute" or a link."""
        work = {"compute": self.stalls["compute"], **self.busy}
        return max(work, key=lambda name: work[name])


def uses_of(units: Sequence[SimUnit]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(forward, backward) as lists of what happens to which unit: enter, compute, leave.

    Units come in module order, those around others first. In forward a unit that contains others computes after them;
    its backward begins before theirs, in reverse.
    """
    forward: list[tuple[str, int]] = []
    stack: list[int] = []
    for uid, unit in enumerate(units):
        while stack and stack[-1] not in unit.around:
            forward += [("compute", stack[-1]), ("leave", stack.pop())]
        forward.append(("enter", uid))
        stack.append(uid)
    while stack:
        forward += [("compute", stack[-1]), ("leave", stack.pop())]
    other = {"enter": "leave", "leave": "enter", "compute": "compute"}
    return forward, [(other[what], uid) for what, uid in reversed(forward)]
