"""Published gradients: read, edited, kept, assigned and hooked, as torch's own."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from oracle import batches, same, train_both
from pairs import backward_both, pair

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


def test_zero_grad_right_after_step(tmp_path: Path) -> None:
    """Zeroing in place, by the model or the optimizer, does not change the step that is queued."""
    ways = [
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: [param.grad.zero_() for param in model.parameters()],
        lambda model, optimizer: [param.grad.copy_(torch.ones_like(param.grad)) for param in model.parameters()],
    ]
    for placement in ("host", "nvme"):
        for index, way in enumerate(ways):
            with pair(tmp_path / f"{placement}{index}", placement=placement) as (plain, run):
                for ids in batches(3):
                    backward_both(plain, run, ids)
                    plain.step(0.5)
                    run.step(0.5)
                    for each in (plain, run):
                        way(each.model, each.optimizer)


def test_gradients_edited_and_assigned(tmp_path: Path) -> None:
    """What the user does to `.grad` is what is clipped and stepped (C14)."""
    edits = {
        "halved": lambda p: p.grad.mul_(0.5),
        "through data": lambda p: p.grad.data.add_(0.25),
        "through numpy": lambda p: p.grad.numpy().__imul__(2.0) if p.dtype == torch.float32 else p.grad.mul_(2.0),
        "assigned": lambda p: setattr(p, "grad", torch.full_like(p.grad, 0.125).contiguous()),
        "assigned transposed": lambda p: setattr(
            p, "grad", (p.grad.t() * 2).contiguous().t() if p.dim() == 2 else p.grad * 2
        ),
        "swapped in": lambda p: setattr(p, "grad", p.grad.clone()),
        "removed": lambda p: setattr(p, "grad", None),
        "noise by slices": lambda p: p.grad.view(-1)[::2].sub_(0.5),
        "clamped": lambda p: p.grad.clamp_(-0.01, 0.01),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for name, edit in edits.items():
            where = f"{name} {dtype}"
            with pair(tmp_path / where, dtype=dtype) as (plain, run):
                for ids in batches(2):
                    backward_both(plain, run, ids)
                    plain.norm()
                    tz.clip_grad_norm_(run.model.parameters(), 1e9)  # the norms are known before the edit
                    for each in (plain, run):
                        for param in list(each.model.parameters())[1::2]:
                            edit(param)
                    max_norm = plain.norm() * 0.5
                    expected, total = plain.step(max_norm), run.step(max_norm)
                    assert same(expected, total), where
                    plain.zero_grad()
                    run.zero_grad()


def test_gradients_assigned_while_a_step_is_queued(tmp_path: Path) -> None:
    """New gradients put in right after step() do not disturb the step that is still on its way."""
    for placement in ("host", "nvme"):
        with pair(tmp_path / placement, placement=placement) as (plain, run):
            generator = torch.Generator().manual_seed(2)
            for _ in range(12):
                values = [torch.randn(param.shape, generator=generator) for param in plain.model.parameters()]
                for each in (plain, run):
                    for param, value in zip(each.model.parameters(), values, strict=True):
                        param.grad = value.clone()
                plain.step(0.5)
                run.step(0.5)
                plain.zero_grad()
                run.zero_grad()


def test_gradients_stay_readable(tmp_path: Path) -> None:
    """Published gradients look like torch's: values, type, arithmetic, copies and pickles."""
    with pair(tmp_path) as (plain, run):
        backward_both(plain, run, next(batches(1)))
        for mine, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
            assert isinstance(mine.grad, torch.Tensor)
            assert mine.grad.device == theirs.grad.device
            for view in (
                lambda g: g.clone(),
                lambda g: g * 2 + 1,
                lambda g: g.norm(),
                lambda g: torch.stack([g, g]),
                copy.deepcopy,
            ):
                assert same(view(mine.grad), view(theirs.grad))
            buffer = io.BytesIO()
            torch.save(mine.grad, buffer)
            assert same(torch.load(io.BytesIO(buffer.getvalue())), theirs.grad)
            assert repr(mine.grad) == repr(theirs.grad)
            assert mine.grad.tolist() == theirs.grad.tolist()
        run.zero_grad()
        plain.zero_grad()


def test_a_clipped_gradient_assigned_to_itself(tmp_path: Path) -> None:
    """`p.grad = p.grad.detach()` after clipping changes nothing."""
    with pair(tmp_path) as (plain, run):
        for ids in batches(3):
            backward_both(plain, run, ids)
            max_norm = plain.norm() * 0.3
            tz.clip_grad_norm_(run.model.parameters(), max_norm)
            for param in list(run.model.parameters())[::2]:
                param.grad = param.grad.detach()
            for param in list(run.model.parameters())[1::2]:
                param.grad = param.grad
            plain.step(max_norm)
            run.step()
            plain.zero_grad()
            run.zero_grad()


def test_gradients_that_are_kept(tmp_path: Path) -> None:
    """A gradient that somebody keeps stays what it was when the next one arrives, and is assigned back as it is."""
    with pair(tmp_path) as (plain, run):
        backward_both(plain, run, next(batches(1)))
        kept = [[param.grad for param in each.model.parameters()] for each in (plain, run)]
        for each in (plain, run):
            each.zero_grad()
        backward_both(plain, run, next(batches(1, seed=2)))
        assert all(same(mine + 0, theirs + 0) for mine, theirs in zip(*kept, strict=True))
        assert all(a.grad is not b for a, b in zip(run.model.parameters(), kept[1], strict=True))
        plain.step()
        run.step()
        for each, grads in zip((plain, run), kept, strict=True):
            for param, grad in zip(each.model.parameters(), grads, strict=True):
                param.grad = grad
        plain.step(0.5)
        run.step(0.5)
        plain.zero_grad()
        run.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_parameter_hooks(accumulate: int, tmp_path: Path) -> None:
    """register_hook and register_post_accumulate_grad_hook on parameters run as in torch."""
    with pair(tmp_path) as (plain, run):
        calls: dict[str, list[str]] = {"plain": [], "run": []}
        handles = []
        for label, each in (("plain", plain), ("run", run)):
            for name, param in list(each.model.named_parameters())[::2]:
                handles.append(
                    param.register_hook(lambda grad, label=label, name=name: (calls[label].append(name), grad * 0.5)[1])
                )
                handles.append(
                    param.register_post_accumulate_grad_hook(
                        lambda p, label=label, name=name: (calls[label].append(f"after {name}"), p.grad.mul_(2.0))[0]
                    )
                )
        train_both([("", run)], plain, 3, accumulate=accumulate)
        assert calls["plain"] == calls["run"]
        assert calls["run"]
        for handle in handles:
            handle.remove()
        train_both([("", run)], plain, 2)
        assert len(calls["run"]) == len(calls["plain"])


def test_requires_grad_toggled(tmp_path: Path) -> None:
    """Parameters frozen for a while and trained again."""
    with pair(tmp_path) as (plain, run):
        for step in range(6):
            for each in (plain, run):
                each.model.layers[1].requires_grad_(step % 3 != 1)
                each.model.embed.weight.requires_grad_(step % 2 == 0)
            train_both([(f"step {step}", run)], plain, 1, seed=step)
