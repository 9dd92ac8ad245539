"""Steps without zero_grad and clipping in every way: equal to torch bit by bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from models import Net
from oracle import Plain, batches, loss_of, make, same, tiered, tiers_for
from pairs import backward_both, pair
from torch import nn

import tierzero as tz
from tierzero.native import NATIVE
from tierzero.optim import norms

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_twice_without_zero_grad(dtype: torch.dtype, tmp_path: Path) -> None:
    """The same gradient is used again, clipped as it was."""
    with pair(tmp_path, dtype=dtype) as (plain, run):
        for ids in batches(3):
            backward_both(plain, run, ids)
            max_norm = plain.norm() * 0.4
            assert same(plain.step(max_norm), run.step(max_norm))
            plain.update()
            run.step()
            plain.zero_grad()
            run.zero_grad()


def test_clip_again_and_accumulate_after_a_step(tmp_path: Path) -> None:
    """Clipping twice, and going on accumulating into clipped gradients that a queued step still reads."""
    with pair(tmp_path) as (plain, run):
        for ids in batches(4):
            backward_both(plain, run, ids)
            plain.take_grads()
            first = plain.norm() * 0.5
            totals = []
            for each, params in ((plain, list(plain.model.parameters())), (run, list(run.model.parameters()))):
                clip = torch.nn.utils.clip_grad_norm_ if each is plain else tz.clip_grad_norm_
                totals.append([clip(params, first), clip(params, first * 0.7), clip(params, first * 5)])
            assert all(map(same, *totals))
            plain.step()
            run.step()
            totals = [
                torch.nn.utils.clip_grad_norm_(list(plain.model.parameters()), first * 0.1),
                tz.clip_grad_norm_(run.model.parameters(), first * 0.1),
            ]
            assert same(*totals)
            backward_both(plain, run, ids)  # accumulates into what was clipped
            plain.step()
            run.step()
            plain.zero_grad()
            run.zero_grad()


@pytest.mark.parametrize("which", ["a list", "one tensor", "a generator", "nothing", "part of the model"])
def test_what_is_clipped(which: str, tmp_path: Path) -> None:
    """clip_grad_norm_ takes what torch's takes; parameters outside keep their gradients."""
    with pair(tmp_path) as (plain, run):
        backward_both(plain, run, next(batches(1)))
        totals = []
        for each, clip in ((plain, torch.nn.utils.clip_grad_norm_), (run, tz.clip_grad_norm_)):
            params = list(each.model.parameters())
            chosen = {
                "a list": params,
                "one tensor": params[3],
                "a generator": iter(params),
                "nothing": [],
                "part of the model": params[2:7],
            }[which]
            totals.append(clip(chosen, 0.01))
        assert same(*totals)
        plain.step()
        run.step()


def test_clipping_with_other_parameters(tmp_path: Path) -> None:
    """Parameters of a plain module are clipped together with the offloaded ones."""
    extra, twin = (make(lambda: nn.Linear(3, 3)) for _ in range(2))
    with pair(tmp_path) as (plain, run):
        backward_both(plain, run, next(batches(1)))
        for module in (extra, twin):
            module(torch.ones(2, 3)).pow(2).sum().backward()
        totals = [
            torch.nn.utils.clip_grad_norm_([*plain.model.parameters(), *extra.parameters()], 0.3),
            tz.clip_grad_norm_([*run.model.parameters(), *twin.parameters()], 0.3),
        ]
        assert same(*totals)
        assert all(same(a.grad, b.grad) for a, b in zip(extra.parameters(), twin.parameters(), strict=True))
        plain.step()
        run.step()


def test_clip_arguments(tmp_path: Path) -> None:
    """What is refused says so."""
    with pair(tmp_path) as (_, run):
        params = list(run.model.parameters())
        with pytest.raises(tz.TierzeroError, match="2-norm"):
            tz.clip_grad_norm_(params, 1.0, norm_type=1.0)
        for wrong in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="zero or more"):
                tz.clip_grad_norm_(params, wrong)
        assert float(tz.clip_grad_norm_(params, 1.0)) == 0.0
        loss_of(run.model, next(batches(1))).backward()
        params[2].grad.fill_(float("inf"))
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            tz.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        run.zero_grad()


def test_torch_clips_published_gradients(tmp_path: Path) -> None:
    """torch's own clip_grad_norm_ works on what is published, and clip_grad_value_ and get_total_norm too."""
    with pair(tmp_path) as (plain, run):
        for ids in batches(3):
            backward_both(plain, run, ids)
            lists = [list(each.model.parameters()) for each in (plain, run)]
            assert same(*(torch.nn.utils.clip_grad_norm_(params, 0.05) for params in lists))
            assert same(*(torch.nn.utils.clip_grad_norm_(params, 0.04, foreach=False) for params in lists))
            for params in lists:
                torch.nn.utils.clip_grad_value_(params, 0.001)
            assert same(*(torch.nn.utils.get_total_norm([p.grad for p in params]) for params in lists))
            plain.step()
            run.step()
            plain.zero_grad()
            run.zero_grad()


@pytest.mark.skipif(NATIVE is None, reason="without the extension norms are computed when they are asked for")
@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("overlap", ["deferred", "eager"])
def test_norms_are_computed_once(overlap: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward; clipping only combines them, whatever other units' gradients have done since."""
    plain, model = Plain(make(Net)), make(Net)
    with tiered(model, tiers_for(model, placement, tmp_path), overlap=overlap) as run:
        for ids in batches(3):
            backward_both(plain, run, ids)
            run.engine.loop.do(lambda: None)  # all have begun

            def no_more(tensors: object, threads: int | None = None) -> list[float]:
                raise AssertionError("computed again")

            for unit in run.engine.units:
                if unit.norming is not None:
                    run.engine.run(asyncio.wait([unit.norming]))
            with monkeypatch.context() as patch:
                patch.setattr(norms, "_norms", no_more)
                total = tz.clip_grad_norm_(run.model.parameters(), 0.1)
            assert same(plain.step(0.1), total)
            run.optimizer.step()
            plain.zero_grad()
            run.zero_grad()
