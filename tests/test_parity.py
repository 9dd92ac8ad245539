"""Twenty steps equal to the plain loop bit by bit, for every shape, placement, accumulation and clipping, in float32
and bfloat16: every three of these together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from crossed import crossed
from models import SHAPES
from oracle import PLACEMENTS, Plain, assert_same, make, tiered, tiers_for, train_both

import tierzero as tz

STEPS = 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLIPS: dict[str, Callable[[int, float], float | None]] = {
    "off": lambda step, norm: None,
    "always": lambda step, norm: 0.3 * norm,
    "sometimes": lambda step, norm: norm * (0.6 if step % 3 == 1 else 2.0),
}

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.mark.parametrize(("shape", "dtype", "clip", "accumulate"), crossed(SHAPES, DTYPES, CLIPS, two=(1, 3)))
def test_parity(shape: str, dtype: str, clip: str, accumulate: int, tmp_path: Path) -> None:
    """Losses and clip norms of every step, and all parameters, masters and moments (C1, C2, C3, C13, M12, M15, M20,
    M23): whatever lies where, it trains (S18).
    """
    model = make(SHAPES[shape], DTYPES[dtype])
    with ExitStack() as stack:
        runs = []
        for placement in PLACEMENTS:
            offloaded = copy.deepcopy(model)
            tiers = tiers_for(offloaded, placement, tmp_path / placement)
            runs.append((placement, stack.enter_context(tiered(offloaded, tiers))))
        plain = Plain(model)
        train_both(runs, plain, STEPS, accumulate=accumulate, clip=CLIPS[clip])
        for placement, run in runs:
            assert_same(run, plain, placement)
            stats = tz.stats(run.model)
            assert stats["steps"] == STEPS
            assert stats["skipped_steps"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_placements_are_what_they_say(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Host uses no drive, NVMe caches nothing in host memory, mixed has records in both."""
    model = make(SHAPES[shape], dtype)
    plans = {placement: tz.plan(model, tiers_for(model, placement, tmp_path)) for placement in PLACEMENTS}
    records = {
        name: (plan.param_host + plan.state_host, plan.param_nvme + plan.state_nvme) for name, plan in plans.items()
    }
    assert records["host"][0] > 0
    assert records["host"][1] == 0
    assert records["nvme"][0] == 0
    assert records["nvme"][1] > 0
    assert min(records["mixed"]) > 0


@pytest.mark.parametrize("name", ["moments", "weights", "frozen"])
def test_everything_trainable_moves_and_nothing_else(name: str, tmp_path: Path) -> None:
    """Every trained parameter's value and moments change, and no frozen one's (C1, M15)."""
    model = make(SHAPES["lora"], torch.bfloat16)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        plain = Plain(make(SHAPES["lora"], torch.bfloat16))
        train_both([("nvme", run)], plain, 3)
        for key, param in model.named_parameters():
            state = run.optimizer.state.get(param)
            if name == "frozen" and not param.requires_grad:
                assert state is None
                assert torch.equal(param.read(), before[key])  # type: ignore[operator]
            elif name == "weights" and param.requires_grad:
                assert not torch.equal(param.read(), before[key]), key  # type: ignore[operator]
            elif name == "moments" and param.requires_grad:
                assert state is not None
                assert all(float(state[part].read().norm()) > 0 for part in ("exp_avg", "exp_avg_sq")), key
