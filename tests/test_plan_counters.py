"""What a plan says against the engine's own counters, phase by phase: bytes and peaks, no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierzero as tz
from tierzero.api import engine_of
from tierzero.cli.decoder import DecoderConfig, build_decoder, init_decoder
from tierzero.native import NATIVE
from tierzero.planning.planned import Plan

SHAPE = DecoderConfig(hidden=128, layers=6, heads=4, vocab=512)
STEPS = 3
ACTIVATIONS = 1 << 20


def decoder(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return init_decoder(build_decoder(SHAPE, "cpu", dtype))


def tiers_of(model: torch.nn.Module, placement: str, directory: Path, pieces: int = 1) -> tz.Tiers:
    """Room for about three blocks on the device; in host memory for no records, all parameters, or all of everything
    but some states. Where the batch is cut, some more for activations.
    """
    ample = tz.plan(model, tz.Tiers(nvme=directory, host="1GiB", device="1GiB", compute="cpu"), micro_batches=pieces)
    kept = ACTIVATIONS if pieces > 1 else 0
    least = ample.grad_bytes + ample.buffer_bytes
    host = {
        "drive": ample.host_min,
        "cached": least + ample.param_host,
        "mixed": least + ample.param_host + ample.state_host // 2,
    }
    device = ample.device_needed + ample.param_bytes // 3
    budget = host[placement] + (64 << 10) + kept
    return tz.Tiers(nvme=directory, host=budget, device=device, activations=kept, compute="cpu")


def counted(model: torch.nn.Module) -> dict[str, float]:
    tz.synchronize(model)
    stats: dict[str, Any] = tz.stats(model)
    return {
        "read": stats["nvme_read_expected"],
        "written": stats["nvme_written_expected"],
        "h2d": stats["h2d"],
        "d2h": stats["d2h"],
    }


def check(plan: Plan, name: str, before: dict[str, float], after: dict[str, float], times: int = 1) -> None:
    """The phase's bytes within 2 %."""
    phase = next(phase for phase in plan.phases if phase.name == name)
    for key, value in before.items():
        assert getattr(phase, key) == pytest.approx((after[key] - value) / times, rel=0.02, abs=1), (name, key)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(0, SHAPE.vocab, (2, 16), generator=torch.Generator().manual_seed(seed))
    model(ids, ids).backward()
    tz.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.skipif(NATIVE is None, reason="the portable tier counts no bytes to speak of")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("placement", "pieces"), [("drive", 1), ("cached", 1), ("mixed", 1), ("cached", 2)])
def test_bytes_and_peaks(placement: str, pieces: int, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = decoder(dtype)
    tiers = tiers_of(model, placement, tmp_path, pieces)
    plan = tz.plan(model, tiers, micro_batches=pieces)
    assert plan.activation_bytes == tiers.activation_bytes()
    assert [phase.name for phase in plan.phases] == ["load", "step", "save", "resume"]
    nothing = dict.fromkeys(("read", "written", "h2d", "d2h"), 0.0)
    tz.offload(model, tiers, micro_batches=pieces)
    optimizer = tz.AdamW(model.parameters(), lr=1e-3, overlap="deferred")
    check(plan, "load", nothing, counted(model))
    for seed in range(2):
        step(model, optimizer, seed)
    before = counted(model)
    for seed in range(STEPS):
        step(model, optimizer, seed)
    check(plan, "step", before, counted(model), STEPS)
    peak = next(phase for phase in plan.phases if phase.name == "step")
    stats = tz.stats(model)
    assert peak.device == pytest.approx(stats["device_peak"], rel=0.1)
    assert peak.device <= tiers.device_bytes()
    engine = engine_of(model)
    assert peak.host == pytest.approx(engine.placement.host_needed, rel=0.1)
    before = counted(model)
    tz.snapshot(model, optimizer, "here")
    check(plan, "save", before, counted(model))
    assert engine.store is not None
    held = next(phase for phase in plan.phases if phase.name == "resume").drives
    assert sum(held) == pytest.approx(live(engine), rel=0.02)
    tz.close(model)
    again = decoder(dtype)
    tz.offload(again, tiers, resume=True, micro_batches=pieces)
    engine = engine_of(again)
    read = engine.moved()[0]
    resume = next(phase for phase in plan.phases if phase.name == "resume")
    assert resume.read == pytest.approx(read, rel=0.02)
    tz.close(again)


def live(engine: Any) -> int:
    """Bytes of what the last snapshot holds."""
    records = [record for snapshot in engine.store._snapshots.values() for record in snapshot.records.values()]
    return sum(extent.capacity for extent, _ in records)
