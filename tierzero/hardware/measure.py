"""What this machine can do, for a plan: the stored profiles of its drives, and a second of timing for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tierzero.errors import ConfigError
from tierzero.hardware.drives import drive_of
from tierzero.hardware.machine import Machine, together
from tierzero.hardware.tuning import measured, weights_of
from tierzero.native import NATIVE
from tierzero.paging.malloc import advise_huge, mapped
from tierzero.sim.links import DriveRates
from tierzero.sim.model import Rates
from tierzero.units.layout import CHUNK_MAX

SECONDS = 0.2  # for each rate
_COPY = 32 << 20  # bytes; more than caches hold
_BLOCKS = 16  # chunk buffers that the arithmetic is timed over
# decay, w1, beta2, w2, eps, step size, bias correction, coefficient, l2: as Hyper.scalars gives them
_SCALARS = (1.0, 0.1, 0.999, 0.001, 1e-8, 1e-3, 1.0, 1.0, 0.0)


def best_rate(work: Callable[[], float], seconds: float = SECONDS) -> float:
    """The best of the rates that `work` had (it returns how much it did), after a first run that does not count."""
    work()
    best, until = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < until:
        start = time.perf_counter()
        done = work()
        best = max(best, done / (time.perf_counter() - start))
    return best


def drive_rates(directories: Sequence[Path]) -> DriveRates:
    """Of the drives under these directories, striped. ConfigError for one that was never measured."""
    found = measured(directories)
    missing = [path for path, profile in zip(directories, found, strict=True) if profile is None]
    memory = [path for path in missing if drive_of(path).in_memory]
    if memory:
        raise ConfigError(
            f"{memory[0]} is in memory and not on a drive: name a directory on one, or say what it does, such as "
            "--nvme 7GB/s"
        )
    if missing:
        there = dict.fromkeys(map(_existing, missing))
        raise ConfigError(
            f"the drive under {missing[0]} was never measured: run `tierzero bench nvme {' '.join(there)}` first, or "
            "say what it does, such as --nvme 7GB/s"
        )
    rates = [DriveRates(each.read, each.write, each.mixed) for each in found]
    whole = together(rates, weights_of(found))
    assert whole is not None
    return whole


def _existing(path: Path) -> str:
    """The directory itself or the nearest above it that is there."""
    return str(next(each for each in (path, *path.absolute().parents) if each.is_dir()))


def copy_rate(device: torch.device) -> float:
    """bytes/s from host memory into a unit's fresh storage on `device`."""
    if device.type == "cuda":
        source = torch.ones(_COPY, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(_COPY, dtype=torch.uint8, device=device)

        def move() -> float:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            return _COPY

        return best_rate(move)
    source = torch.ones(_COPY, dtype=torch.uint8)

    def copy() -> float:
        with mapped():
            fresh = torch.empty(_COPY, dtype=torch.uint8)
        advise_huge(fresh.data_ptr(), _COPY)
        fresh.copy_(source)
        return _COPY

    return best_rate(copy)


def adam_rate(threads: int) -> float:
    """elements/s of the streamed step's arithmetic on so many threads: float32 state, bfloat16 gradients and
    parameters.
    """
    count = CHUNK_MAX
    states = torch.zeros(_BLOCKS, 3, count)
    grads, copies = (torch.zeros(_BLOCKS, count, dtype=torch.bfloat16) for _ in range(2))

    def native() -> float:
        assert NATIVE is not None
        for block, grad, copy in zip(states, grads, copies, strict=True):
            NATIVE.adamw(block[0], block[1], block[2], grad, copy, _SCALARS, threads)
        return _BLOCKS * count

    def plain() -> float:
        params = [torch.nn.Parameter(block[0]) for block in states]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.float()
        torch.optim.AdamW(params, fused=True).step()
        return _BLOCKS * count

    return best_rate(native if NATIVE is not None else plain)


def norm_rate() -> float:
    """bytes/s of gradient norms, on one thread."""
    grads = torch.zeros(_COPY // 2, dtype=torch.bfloat16)

    def norm() -> float:
        if NATIVE is not None:
            NATIVE.l2_norms([grads], threads=1)
        else:
            torch.linalg.vector_norm(grads.float())
        return _COPY

    return best_rate(norm)


def compute_rate(device: torch.device, hidden: int, tokens: int, dtype: torch.dtype) -> float:
    """FLOP/s of forward and backward through a decoder's feed-forward block of `hidden` features on a micro-batch of
    `tokens` tokens, both cut down to what takes about a second here.
    """
    width = min(hidden, 8192 if device.type == "cuda" else 1024)
    rows = min(tokens, 8192 if device.type == "cuda" else 512)
    up = torch.ones(4 * width, width, dtype=dtype, device=device, requires_grad=True)
    down = torch.ones(width, 4 * width, dtype=dtype, device=device, requires_grad=True)
    x = torch.ones(rows, width, dtype=dtype, device=device, requires_grad=True)

    def run() -> float:
        out = torch.nn.functional.silu(x @ up.t()) @ down.t()
        out.backward(torch.ones_like(out))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 3 * 2 * (up.numel() + down.numel()) * rows

    return best_rate(run, 5 * SECONDS)


def this_machine(
    directories: Sequence[Path],
    device: torch.device,
    *,
    hidden: int = 4096,
    tokens: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    drive: DriveRates | None = None,
    flops: float | None = None,
    threads: int = 1,
) -> Machine:
    """Measure it, in about two seconds, with `threads` for the streamed step. `drive` and `flops` are taken as given
    where they are; else drives have the
    rates of their profiles, and the compute device is timed on a block of `hidden` features. ConfigError for drives
    that were never measured.
    """
    sources = {}
    if drive is None and directories:
        drive = drive_rates(directories)
        sources["drives"] = "measured by tierzero bench nvme"
    inline = device.type == "cpu"
    copy = copy_rate(device)
    adam = adam_rate(threads)
    sources["compute"] = "given" if flops is not None else f"measured on {device.type}"
    if flops is None:
        flops = compute_rate(device, hidden, tokens, dtype)
    sources["compute"] = f"{flops / 1e12:.3g} TFLOP/s, {sources['compute']}"
    sources["bus"] = f"{copy / 1e9:.1f} GB/s, measured"
    sources["host"] = f"{adam / 1e9:.2f} G elements/s of Adam on {threads} thread{'s' if threads > 1 else ''}, measured"
    return Machine(Rates(copy, copy, adam, norm_rate(), drive, inline=inline), flops, None, sources)
