"""Loss scaling: torch.amp.GradScaler drives the optimizers of an offloaded model as it drives torch's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from oracle import Plain, Tiered, assert_same, batches, loss_of, same
from other_optimizers import assert_same_states, other_pair, states_of
from pairs import pair
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")

Scaler = torch.amp.GradScaler
SCALE = {"init_scale": 2.0**12, "growth_interval": 2}


def spoil(model: nn.Module) -> None:
    """Make the gradient of the last parameter infinite."""
    list(model.parameters())[-1].grad.view(-1)[-1] = float("inf")


def step(
    each: Plain | Tiered,
    scaler: Any,
    ids: torch.Tensor,
    *,
    clip: float | None = None,
    unscale: bool = False,
    after: Callable[[nn.Module], None] = lambda model: None,
    accumulate: int = 1,
) -> list[torch.Tensor]:
    """One step with a GradScaler; the loss and the clip norm."""
    found = []
    for _ in range(accumulate):
        loss = loss_of(each.model, ids)
        found.append(loss.detach())
        scaler.scale(loss / accumulate).backward()
    after(each.model)
    if isinstance(each, Plain):
        each.take_grads()
    if clip is not None or unscale:
        scaler.unscale_(each.optimizer)
    if clip is not None:
        found.append(each.clip(clip) if isinstance(each, Plain) else tz.clip_grad_norm_(each.model.parameters(), clip))
    scaler.step(each.optimizer)
    scaler.update()
    if isinstance(each, Plain):
        with torch.no_grad():
            for param, master in each.masters.items():
                param.copy_(master)
    each.zero_grad()
    return found


def step_both(both: Any, scalers: Any, ids: torch.Tensor, **options: Any) -> None:
    plain, own = (step(each, scaler, ids, **options) for each, scaler in zip(both, scalers, strict=True))
    assert all(map(same, plain, own))
    assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("placement", "mode"), [("host", "auto"), ("nvme", "auto"), ("nvme", "eager")])
def test_step_without_unscale(placement: str, mode: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Growing scales, accumulation, and a step that overflows: skipped, and the scale is halved."""
    with pair(tmp_path, placement=placement, dtype=dtype) as both:
        scalers = Scaler("cpu", **SCALE), (Scaler if dtype != torch.bfloat16 else tz.GradScaler)("cpu", **SCALE)
        both[1].optimizer.overlap.mode = mode  # guesses are wrong, whatever they are
        for index, ids in enumerate(batches(6)):
            step_both(both, scalers, ids, accumulate=1 + index % 2, after=spoil if index == 3 else lambda model: None)
            if index in (2, 3):
                assert_same(both[1], both[0])
        assert tz.stats(both[1].model)["skipped_steps"] == 1
        assert scalers[1].get_scale() == 2.0**13


@pytest.mark.parametrize("own", [False, True], ids=["torch", "tierzero"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unscale_and_clip(dtype: torch.dtype, own: bool, tmp_path: Path) -> None:
    """Clipping needs unscaled gradients; torch's class refuses that for float16, ours does not."""
    with pair(tmp_path, dtype=dtype) as both:
        scalers = Scaler("cpu", **SCALE), (tz.GradScaler if own else Scaler)("cpu", **SCALE)
        if dtype == torch.float16 and not own:
            with pytest.raises(ValueError, match="Attempting to unscale FP16"):
                step(both[1], scalers[1], next(batches(1)), clip=0.1)
            both[1].zero_grad()
            return
        for index, ids in enumerate(batches(6)):
            options: dict[str, Any] = {"clip": 0.1} if index % 2 else {"unscale": True}
            step_both(both, scalers, ids, after=spoil if index == 3 else lambda model: None, **options)


def test_gradients_that_float16_cannot_hold_unscaled(tmp_path: Path) -> None:
    """They would underflow if they were unscaled where they are."""
    with pair(tmp_path, dtype=torch.float16) as both:
        scalers = [cls("cpu", init_scale=2.0**20, growth_interval=100) for cls in (Scaler, tz.GradScaler)]

        def tiny(model: nn.Module) -> None:
            for param in model.parameters():
                param.grad.fill_(2.0**-12)

        for ids in batches(3):
            step_both(both, scalers, ids, after=tiny, clip=1e-9)


def test_a_gradient_that_is_looked_at_is_unscaled(tmp_path: Path) -> None:
    """What is seen is what is stepped."""
    with pair(tmp_path, dtype=torch.float16) as (plain, run):
        scaler = tz.GradScaler("cpu", **SCALE)
        ids = next(batches(1))
        scaler.scale(loss_of(run.model, ids)).backward()
        (loss_of(plain.model, ids) * SCALE["init_scale"]).backward()
        scaler.unscale_(run.optimizer)
        for param, expected in zip(run.model.parameters(), plain.model.parameters(), strict=True):
            expected.grad.div_(SCALE["init_scale"])
            assert torch.equal(param.grad, expected.grad)
        scaler.step(run.optimizer)
        scaler.update()
        plain.step()
        for each in (plain, run):
            each.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("fused", [False, True])
def test_wrapped_optimizers(fused: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """The same for SGD, with and without torch's own scaling inside it."""
    with other_pair(tmp_path, torch.optim.SGD, dtype=dtype, lr=0.05, momentum=0.9, fused=fused) as both:
        scalers = Scaler("cpu", **SCALE), tz.GradScaler("cpu", **SCALE)
        for index, ids in enumerate(batches(6)):
            options: dict[str, Any] = {"clip": 0.1} if index % 2 else {}
            step_both(both, scalers, ids, after=spoil if index in (2, 3) else lambda model: None, **options)
        assert_same_states(both[1], both[0])


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_skipped_step_changes_no_byte(placement: str, kind: str, tmp_path: Path) -> None:
    """However many there are in a row: the scale is still being found, and that is no error (C16, C17)."""
    chosen = (
        pair(tmp_path, placement=placement, dtype=torch.float16)
        if kind == "AdamW"
        else other_pair(tmp_path, torch.optim.Adam, placement=placement, dtype=torch.float16)
    )
    with chosen as both:
        scalers = Scaler("cpu", **SCALE), Scaler("cpu", **SCALE)
        both[1].optimizer.max_skipped_steps = 2
        step_both(both, scalers, next(batches(1)))
        before = states_of(both[1])
        for ids in batches(4):
            step_both(both, scalers, ids, after=spoil)
            after = states_of(both[1])
            assert all(same(before[key], after[key]) for key in before)
        step_both(both, scalers, next(batches(1)))


def test_any_scale_for_float32_parameters_and_powers_of_two_for_others(tmp_path: Path) -> None:
    """float32 gradients are unscaled in place with torch's rounding."""
    odd = {"init_scale": 1000.0, "growth_factor": 3.0, "growth_interval": 1}
    with pair(tmp_path / "a") as both:
        scalers = Scaler("cpu", **odd), Scaler("cpu", **odd)
        for index, ids in enumerate(batches(4)):
            step_both(both, scalers, ids, clip=0.1 if index % 2 else None)
    with pair(tmp_path / "b", dtype=torch.float16) as (_, run):
        with pytest.raises(tz.TierzeroError, match=r"1000\.0 of the GradScaler is not a power of two"):
            step(run, Scaler("cpu", **odd), next(batches(1)))
        run.zero_grad()


def test_a_scaler_that_is_off(tmp_path: Path) -> None:
    with pair(tmp_path) as both:
        for ids in batches(2):
            step_both(both, [cls("cpu", enabled=False) for cls in (Scaler, tz.GradScaler)], ids, clip=0.1)


def test_parameters_that_are_not_offloaded(tmp_path: Path) -> None:
    """tierzero's scaler is torch's for other optimizers."""
    both = [Plain(nn.Linear(3, 3)) for _ in range(2)]
    both[1].model.load_state_dict(both[0].model.state_dict())
    for each, scaler in zip(both, (Scaler("cpu"), tz.GradScaler("cpu")), strict=True):
        param = each.model.weight
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler.scale(each.model(torch.ones(1, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert same(both[0].model.weight, both[1].model.weight)
    assert isinstance(Net(), nn.Module)
