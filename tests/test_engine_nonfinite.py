"""Gradients that are infinite or not a number: the step is skipped whole."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from oracle import Tiered, batches, loss_of, make, same, train_both
from pairs import pair

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


def snapshot_of(run: Tiered) -> dict[str, torch.Tensor]:
    """Every byte of parameters and states."""
    found = {name: param.read() for name, param in run.model.named_parameters()}
    for name, param in run.model.named_parameters():
        for part, value in run.optimizer.state[param].items():
            found[f"{name} {part}"] = value.read() if hasattr(value, "read") else value.clone()
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_non_finite_gradients(
    placement: str, dtype: torch.dtype, value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step with one bad element anywhere changes no byte, is counted, logged with the parameter's name, and training
    goes on (C16).
    """
    with pair(tmp_path, placement=placement, dtype=dtype) as (plain, run):
        train_both([("", run)], plain, 2)
        names = [name for name, _ in run.model.named_parameters()]
        for index in (0, len(names) // 2, len(names) - 1):
            before = snapshot_of(run)
            loss_of(run.model, next(batches(1))).backward()
            param = list(run.model.parameters())[index]
            param.grad.view(-1)[-1] = value
            tz.clip_grad_norm_(run.model.parameters(), 1.0)
            with caplog.at_level(logging.WARNING, "tierzero"):
                run.optimizer.step()
            assert f"the gradient of {names[index]} is not finite" in caplog.text
            run.zero_grad()
            after = snapshot_of(run)
            assert all(same(before[key], after[key]) for key in before)
        assert tz.stats(run.model)["skipped_steps"] == 3
        train_both([("", run)], plain, 2)


def test_an_error_after_too_many_skipped_steps(tmp_path: Path) -> None:
    """N in a row are an error that names the parameter; a good step in between starts the count again (C17)."""
    with pair(tmp_path) as (plain, run):
        run.optimizer.max_skipped_steps = 3

        def bad() -> None:
            loss_of(run.model, next(batches(1))).backward()
            run.model.head.weight.grad[0, 0] = float("nan")
            try:
                run.optimizer.step()
            finally:
                run.zero_grad()

        for _ in range(2):
            bad()
        train_both([("", run)], plain, 1)
        for _ in range(2):
            bad()
        with pytest.raises(tz.NonFiniteGradientError, match=r"3 steps in a row.*head\.weight"):
            bad()
        train_both([("", run)], plain, 1)


def halves(params: list[torch.nn.Parameter], kind: str) -> tuple[Any, Any]:
    """Optimizers over every other parameter, so that units hold parameters of both."""
    if kind == "plain":
        return tuple(torch.optim.AdamW(half, lr=1e-2, fused=True) for half in (params[::2], params[1::2]))  # type: ignore[return-value]
    if kind == "wrapped":
        adamw = torch.optim.AdamW
        return tuple(tz.wrap_optimizer(adamw, half, lr=1e-2, fused=True) for half in (params[::2], params[1::2]))  # type: ignore[return-value]
    return tuple(tz.AdamW(half, lr=1e-2, overlap=kind) for half in (params[::2], params[1::2]))  # type: ignore[return-value,arg-type]


@pytest.mark.parametrize("kind", ["eager", "deferred", "wrapped"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_bad_gradient_that_is_not_the_optimizers(placement: str, kind: str, tmp_path: Path) -> None:
    """What an optimizer does not step, in the same unit too, does not keep it from stepping; with a norm that is NaN
    nothing that was clipped by it is stepped.
    """
    plain, model = make(Net), make(Net)
    budget = "16MiB"
    tz.offload(
        model, tz.Tiers(nvme=None if placement == "host" else tmp_path, host=budget, device="1MiB", compute="cpu")
    )
    try:
        theirs, mine = halves(list(plain.parameters()), "plain"), halves(list(model.parameters()), kind)
        for step, ids in enumerate(batches(6)):
            for each, optimizers in ((plain, theirs), (model, mine)):
                loss_of(each, ids).backward()
                bad = list(each.parameters())[2 * step + 1]  # of the second optimizer
                bad.grad.view(-1)[0] = float("nan")  # type: ignore[union-attr]
                optimizers[0].step()
            mine[1].step()
            tz.clip_grad_norm_(model.parameters(), 1.0)
            mine[0].step()
            for optimizer in (*theirs, *mine):
                optimizer.zero_grad()
            for param, own in zip(plain.parameters(), model.parameters(), strict=True):
                assert same(own.read(), param)  # type: ignore[operator]
        for step, ids in enumerate(batches(3)):  # the other half goes on where it was
            for each, optimizers in ((plain, theirs), (model, mine)):
                loss_of(each, ids).backward()
                for optimizer in optimizers[step % 2 :]:
                    optimizer.step()
                    optimizer.zero_grad()
            for param, own in zip(plain.parameters(), model.parameters(), strict=True):
                assert same(own.read(), param)  # type: ignore[operator]
    finally:
        tz.close(model)


def test_large_but_finite_gradients_are_stepped(tmp_path: Path) -> None:
    """A norm that overflows float32 is no reason to skip when every element is finite."""
    with pair(tmp_path) as (plain, run):
        for each in (plain, run):
            for param in each.model.parameters():
                param.grad = torch.full(param.shape, 3e38)
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()
        assert tz.stats(run.model)["skipped_steps"] == 0
