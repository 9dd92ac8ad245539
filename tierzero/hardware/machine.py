"""What a machine can do, as a plan takes it: measured, of a preset, or given. Pure arithmetic.

Note [presets]
Peak rates are dense, in bfloat16 with float32 accumulation; a plan multiplies them by the share that training reaches
(`UTILISATION` unless told otherwise). A bus counts per direction, at `BUS` of its raw rate: PCIe 5.0 x16 or 4.0 x16.
docs/plan.md says what each figure was compared with, and which were not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tierzero.errors import ConfigError
from tierzero.sim.links import DriveRates
from tierzero.sim.model import Rates
from tierzero.sizes import parse_size

BUS = 0.85  # of a PCIe link's raw rate
UTILISATION = 0.5  # of the peak FLOP/s: what well-kept dense training reaches
MEMORY = 200e9  # bytes/s of a host with a preset GPU: eight channels of DDR4-3200, say
ADAM_BYTES = 30  # memory traffic of one element: state read and written, 16-bit gradient and parameter
DRIVE = 1 << 62  # bytes on a drive of unknown size


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. flops: peak FLOP/s in bfloat16. bus: raw bytes/s per direction."""

    memory: int
    flops: float
    bus: float


GPUS = {
    "h200": Gpu(141 * 10**9, 989.5e12, 64e9),
    "h100": Gpu(80 * 10**9, 989.5e12, 64e9),
    "a100": Gpu(80 * 10**9, 312e12, 32e9),
    "l40s": Gpu(48 * 10**9, 362.05e12, 32e9),
    "rtx4090": Gpu(24 * 10**9, 165.2e12, 32e9),
    "rtx3090": Gpu(24 * 10**9, 71e12, 32e9),
}


@dataclass(frozen=True)
class Machine:
    """rates: its links, `drive` being all drives together. flops: FLOP/s that its compute device reaches; 0 if unknown.
    seconds: (forward, backward) of each unit for one micro-batch, over what follows from `flops`. sources: where each
    figure is from, in words.
    """

    rates: Rates
    flops: float = 0.0
    seconds: Sequence[tuple[float, float]] | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def under(self, drives: float, link: float) -> Machine:
        """The same machine with all its drives together, and the link to its device, held below these rates (bytes/s);
        0 is no limit.
        """
        drive = self.rates.drive.under(drives) if self.rates.drive is not None else None
        sources = dict(self.sources)
        if drive is not None and drives:
            sources["drives"] = f"{sources.get('drives', '')}, held below {drives / 1e9:.3g} GB/s".removeprefix(", ")
        if link:
            sources["bus"] = f"{sources.get('bus', '')}, held below {link / 1e9:.3g} GB/s".removeprefix(", ")
        return replace(self, rates=replace(self.rates, drive=drive, link_limit=link), sources=sources)


def preset(
    name: str,
    drive: DriveRates | None,
    *,
    utilisation: float = UTILISATION,
    memory: float = MEMORY,
    flops: float | None = None,
) -> tuple[Gpu, Machine]:
    """A machine with the GPU of that name. memory: bytes/s of host memory. flops: what the GPU reaches, if known.
    ConfigError for an unknown name.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(f"there is no preset for the GPU {name!r}: use one of {', '.join(GPUS)}, or give --flops")
    reached = gpu.flops * utilisation if flops is None else flops
    rates = Rates(gpu.bus * BUS, gpu.bus * BUS, memory / ADAM_BYTES, memory / 4, drive)
    of = f"{reached / 1e12:.0f} TFLOP/s" + (f", {utilisation:.0%} of {name}'s peak" if flops is None else ", given")
    sources = {
        "compute": of,
        "bus": f"{rates.h2d / 1e9:.0f} GB/s each way, {BUS:.0%} of {name}'s PCIe",
        "host": f"{memory / 1e9:.0f} GB/s of memory: {rates.adam / 1e9:.1f} G elements/s of Adam",
    }
    return gpu, Machine(rates, reached, None, sources)


def parse_drives(text: str) -> tuple[list[DriveRates], str]:
    """The drives of "4x7GB/s", "7GB/s" or "2x6.5/5GB/s" (read/write each), several kinds joined by a comma; and that in
    words. Reads and writes at the same time are taken to share the slower of both rates, as most drives do. ConfigError
    with what to write.
    """
    drives: list[DriveRates] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?([\d.]+)\s*(?:/\s*([\d.]+)\s*)?([kMGT]i?B)/s\s*", part)
        count = int(match[1] or 1) if match else 0
        try:
            if match is None or not 0 < count <= 64:
                raise ValueError(part)
            read = float(parse_size(match[2] + match[4]))
            write = float(parse_size((match[3] or match[2]) + match[4]))
            if not (read and write):
                raise ValueError(part)
        except ValueError:
            raise ConfigError(
                f"drives {part.strip()!r} cannot be read: write 7GB/s, 4x7GB/s, or 4x7/5GB/s for other rates of "
                "reading and writing"
            ) from None
        drives += [DriveRates(read, write, min(read, write))] * count
    return drives, f"{len(drives)} given, {text.strip()}"


def together(drives: Sequence[DriveRates], weights: Sequence[int]) -> DriveRates | None:
    """Drives striped by `weights` as one: each rate is that of the member which takes the longest for its share."""
    if not drives:
        return None
    total = sum(weights)
    slowest = lambda name: min(
        getattr(drive, name) * total / weight for drive, weight in zip(drives, weights, strict=True)
    )
    return DriveRates(slowest("read"), slowest("write"), slowest("mixed"))
