"""The end of the self-test: a few training steps through a store on the drive, against plain PyTorch, bit by bit."""

from __future__ import annotations

import copy
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierzero as tz
from tierzero.native import NATIVE

_WIDTH, _BLOCKS, _BATCH, _STEPS = 96, 6, 4, 4
_CLIP = 0.5


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH)) for _ in "x" * _BLOCKS
    ]
    model = nn.Sequential(*blocks)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * _WIDTH**-0.5)
    return model


def exact() -> bool:
    """Whether this machine's arithmetic is torch's own to the last bit."""
    if NATIVE is None:
        return True  # it is torch's own
    return platform.machine() == "x86_64" and str(NATIVE.adam_isa()) in ("avx2", "avx512")


def compare(store: Path) -> dict[str, Any]:
    """Train twice and compare. Raises ArithmeticError where losses or weights differ, and whatever training raises."""
    torch.set_num_threads(1)
    plain = _model()
    tiered = copy.deepcopy(plain)
    ample = tz.plan(tiered, tz.Tiers(nvme=store, host="1GiB", device="1GiB", compute="cpu"))
    tz.offload(tiered, tz.Tiers(nvme=store, host=ample.host_min, device=ample.device_needed, compute="cpu"))
    try:
        wanted = _train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), nn.utils.clip_grad_norm_)
        got = _train(tiered, tz.AdamW(tiered.parameters(), lr=1e-2), tz.clip_grad_norm_)
        weights = []
        for block in tiered.children():  # one at a time fits the budget
            with tz.unsharded(block):
                weights += [param.detach().clone() for param in block.parameters()]
        moved = tz.stats(tiered)
    finally:
        tz.close(tiered)
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True), 1):
        if not _same(torch.tensor(ours), torch.tensor(theirs)):
            raise ArithmeticError(f"the loss of step {step} is {ours!r}, plain PyTorch has {theirs!r}")
    for (name, param), weight in zip(plain.named_parameters(), weights, strict=True):
        if not _same(weight, param.detach()):
            raise ArithmeticError(f"{name} differs from plain PyTorch after {_STEPS} steps")
    how = "bit for bit" if exact() else "to 1e-4"
    note = f"{_STEPS} steps equal plain PyTorch {how}"
    return {"notes": [note], "verified": int(moved["nvme_read"]), "written": int(moved["nvme_written"])}


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours, theirs) if exact() else torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(_STEPS):
        inputs = torch.randn(_BATCH, _WIDTH, generator=generator)
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        clip(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
