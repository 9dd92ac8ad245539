"""Reading and changing values at rest: state_dict, unsharded, initialize, safetensors, copies, meta models."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import DIM, VOCAB, Net
from oracle import PLACEMENTS, Plain, assert_same, batches, loss_of, make, same, tiered, tiers_for, train_both
from pairs import pair
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_survive(dtype: torch.dtype, placement: str, tmp_path: Path) -> None:
    """state_dict, torch.save, pickle, clone and casts give the values; load_state_dict takes others."""
    plain, model = make(models.Odd, dtype), make(models.Odd, dtype)
    with tiered(model, tiers_for(model, placement, tmp_path)):
        state, expected = model.state_dict(), plain.state_dict()
        assert list(state) == list(expected)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        for name, value in torch.load(io.BytesIO(buffer.getvalue())).items():
            assert type(value) is torch.Tensor
            assert same(value, expected[name])
        for name, value in state.items():
            assert value.shape == expected[name].shape
            assert value.stride() == expected[name].stride()
            assert value.device.type == "cpu"
            assert same(value.clone(), expected[name])
            assert same(value.cpu().detach().clone(), expected[name])
            assert same(value.to(torch.float64), expected[name].to(torch.float64))
            assert same(pickle.loads(pickle.dumps(value)), expected[name])
            assert same(torch.empty_like(expected[name]).copy_(value), expected[name])
        other = make(models.Odd, dtype, seed=5)
        model.load_state_dict(other.state_dict())
        assert all(
            same(param.read(), theirs) for param, theirs in zip(model.parameters(), other.parameters(), strict=True)
        )
        ids = next(batches(1))
        assert same(loss_of(model, ids), loss_of(other, ids))


def test_loading_other_dtypes_and_wrong_shapes(tmp_path: Path) -> None:
    """Values are cast as copy_ casts them; wrong shapes are refused by torch's own check."""
    model, other = make(Net, torch.bfloat16), make(Net, torch.float32, seed=3)
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        model.load_state_dict(other.state_dict())
        assert all(
            same(param.read(), theirs.bfloat16())
            for param, theirs in zip(model.parameters(), other.parameters(), strict=True)
        )
        wrong = {**other.state_dict(), "head.weight": torch.zeros(VOCAB + 1, DIM)}
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(wrong)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unsharded(placement: str, tmp_path: Path) -> None:
    """Live, whole parameters inside; written back only with write=True, and training goes on from the new values."""
    with pair(tmp_path, placement=placement, dtype=torch.bfloat16) as (plain, run):
        train_both([("", run)], plain, 2)
        with tz.unsharded(run.model.layers[1]):
            weight = run.model.layers[1].up.weight
            assert isinstance(weight, nn.Parameter)
            assert same(weight, plain.model.layers[1].up.weight)
            with torch.no_grad():
                weight.zero_()  # not written back
        with torch.no_grad():
            plain.model.layers[1].up.weight.mul_(0.5)
            plain.masters[plain.model.layers[1].up.weight].copy_(plain.model.layers[1].up.weight)
        with tz.unsharded(run.model.layers[1], write=True), torch.no_grad():
            run.model.layers[1].up.weight.copy_(plain.model.layers[1].up.weight)
        assert_same(run, plain)
        train_both([("", run)], plain, 2)


def zero_and_fail(module: nn.Module) -> None:
    with tz.unsharded(module, write=True), torch.no_grad():
        module.weight.zero_()  # type: ignore[operator]
        raise ValueError("on purpose")


def test_what_unsharded_discards(tmp_path: Path) -> None:
    """Without write, or after an exception inside, the values at rest are what the next forward uses."""
    for placement in PLACEMENTS:
        with pair(tmp_path / placement, placement=placement) as (plain, run):
            with tz.unsharded(run.model.head), torch.no_grad():
                run.model.head.weight.zero_()
            train_both([(placement, run)], plain, 1)
            with pytest.raises(ValueError, match="on purpose"):
                zero_and_fail(run.model.head)
            train_both([(placement, run)], plain, 1)


def test_forward_inside_unsharded(tmp_path: Path) -> None:
    """Parameters stay live after a forward inside; nesting is allowed."""
    with pair(tmp_path, spare=8192) as (plain, run):
        ids = next(batches(1))
        layer = run.model.layers[0]
        with tz.unsharded(layer):
            assert same(run.model(ids), plain.model(ids))
            assert same(layer.up.weight + 0, plain.model.layers[0].up.weight + 0)
            with tz.unsharded(layer.up, recurse=False):
                assert float(layer.up.weight.sum()) == float(plain.model.layers[0].up.weight.sum())
            assert float(layer.up.weight.sum()) == float(plain.model.layers[0].up.weight.sum())
            loss_of(run.model, ids).backward()
            assert float(layer.up.weight.sum()) == float(plain.model.layers[0].up.weight.sum())
        loss_of(plain.model, ids).backward()
        assert type(layer.up.weight).__name__ == "Paged"
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()
        train_both([("", run)], plain, 1)


def test_an_interrupt_inside_unsharded(tmp_path: Path) -> None:
    """A forward that is interrupted inside `unsharded` does not take its parameters away."""

    class Stops(Net):
        stop = False

        def body(self, h: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                h = layer(h)
                if self.stop and index == 1:
                    raise KeyboardInterrupt
            return h

    with pair(tmp_path, Stops, spare=8192) as (plain, run):
        with tz.unsharded(run.model.layers[0]):
            run.model.stop = True
            with pytest.raises(KeyboardInterrupt):
                loss_of(run.model, next(batches(1)))
            run.model.stop = False
            tz.reset(run.model)
            assert same(run.model.layers[0].up.weight + 0, plain.model.layers[0].up.weight + 0)
        train_both([("", run)], plain, 2)


def test_writing_into_a_retained_graph(tmp_path: Path) -> None:
    """Values changed between forward and backward are noticed, as torch notices in-place changes."""
    with pair(tmp_path) as (plain, run):
        loss = loss_of(run.model, next(batches(1)))
        with tz.unsharded(run.model.layers[1], write=True), torch.no_grad():
            run.model.layers[1].up.weight.mul_(1.0 + 1e-3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        run.model.zero_grad()
        with torch.no_grad():
            plain.model.layers[1].up.weight.mul_(1.0 + 1e-3)
            plain.masters[plain.model.layers[1].up.weight].copy_(plain.model.layers[1].up.weight)
        loss = loss_of(run.model, next(batches(1)))
        loss.backward(retain_graph=True)
        run.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        run.model.zero_grad()
        loss_of(plain.model, next(batches(1))).backward()
        plain.step()
        plain.zero_grad()


def test_in_place_changes_of_activations_are_noticed(tmp_path: Path) -> None:
    """Autograd's own check of saved tensors still works inside units."""

    class Wrong(Net):
        def body(self, h: torch.Tensor) -> torch.Tensor:
            h = torch.exp(self.layers[0](h))
            return self.layers[1](h.exp_()) + 0 * h

    class WrongInside(models.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            h = torch.exp(self.inner(x))
            y = h * 2
            h.add_(1.0)
            return y + h * h

    for factory in (Wrong, lambda: Net(block=WrongInside)):
        plain, model = make(factory), make(factory)
        with tiered(model, tiers_for(model, "host", tmp_path)):
            for each in (plain, model):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss_of(each, next(batches(1))).backward()
            model.zero_grad()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_models(dtype: torch.dtype, placement: str, tmp_path: Path) -> None:
    """Built on the meta device, offloaded, initialised unit by unit: the plain model's values for one seed (F8)."""
    with torch.device("meta"):
        model = Net().to(dtype)
    tiers = tiers_for(model, placement, tmp_path)
    tz.offload(model, tiers)
    try:
        with pytest.raises(tz.TierzeroError, match=r"never given a value.*initialize"):
            model(next(batches(1)))
        torch.manual_seed(11)
        tz.initialize(model)
        plain: Any = Net().to(dtype)
        torch.manual_seed(11)
        for module in plain.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.reset_parameters()
        assert all(same(a.read(), b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        ids = next(batches(1))
        assert same(loss_of(model, ids), loss_of(plain, ids))
    finally:
        tz.close(model)


def test_meta_model_filled_by_load_state_dict(tmp_path: Path) -> None:
    """A meta model takes a state dict instead."""
    plain = Plain(make(Net))
    with torch.device("meta"):
        model = Net()
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        model.load_state_dict(plain.model.state_dict())
        train_both([("", run)], plain, 2)
        assert_same(run, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    """Exported weights load strictly into the plain model and give its loss; loaded ones are used (S7)."""
    from safetensors.torch import load_file

    with pair(tmp_path / "run", models.Tied, dtype=dtype) as (plain, run):
        train_both([("", run)], plain, 2)
        path = tz.export(run.model, tmp_path / "out.safetensors", tied="copy")
        fresh = make(models.Tied, dtype, seed=4)
        fresh.load_state_dict(load_file(path), strict=True)
        ids = next(batches(1))
        assert same(loss_of(fresh, ids), loss_of(run.model, ids))
        other = make(models.Tied, dtype, seed=5)
        with tiered(other, tiers_for(other, "mixed", tmp_path / "other")):
            tz.load(other, path)
            assert same(loss_of(other, ids), loss_of(fresh, ids))


def test_ties_stay_ties(tmp_path: Path) -> None:
    """Shared parameters are one object at rest and in use, named as in the plain model."""
    model, plain = make(models.Tied), make(models.Tied)
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        assert model.head.weight is model.embed.weight
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert len(list(model.parameters())) == len(list(plain.parameters()))
        with tz.unsharded(model, recurse=False):
            assert model.head.weight is model.embed.weight


def test_metadata_at_rest(tmp_path: Path) -> None:
    """Shape, dtype, numel, strides, requires_grad, attributes of the parameter: as before."""
    plain: Any = make(models.LoRA)
    plain.embed.weight.tag = "kept"
    model = copy.deepcopy(plain)
    model.embed.weight.tag = "kept"
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(mine, nn.Parameter)
            assert mine.is_leaf
            assert (mine.shape, mine.dtype, mine.device, mine.stride(), mine.dim()) == (
                theirs.shape,
                theirs.dtype,
                theirs.device,
                theirs.stride(),
                theirs.dim(),
            )
            assert (mine.numel(), mine.element_size(), mine.nbytes, mine.requires_grad) == (
                theirs.numel(),
                theirs.element_size(),
                theirs.nbytes,
                theirs.requires_grad,
            )
            assert mine.is_contiguous()
            assert "Paged" in repr(mine)
            assert hash(mine) == hash(mine)
        assert model.embed.weight.tag == "kept"
        assert str(model) == str(plain)
        assert next(model.parameters()).device.type == "cpu"


def test_vocabulary_resize(tmp_path: Path) -> None:
    """Shapes are true outside, so that a resize reads them; inside `unsharded` it copies the values (M3)."""
    model: Any = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        old = model.embed
        larger = nn.Embedding(old.weight.shape[0] + 4, old.weight.shape[1])
        with tz.unsharded(old), torch.no_grad():
            larger.weight[: old.weight.shape[0]].copy_(old.weight)
        assert same(larger.weight[:VOCAB].detach(), old.weight.read())
    bigger: Any = make(Net)
    bigger.embed = larger
    plain = Plain(copy.deepcopy(bigger))
    with tiered(bigger, tiers_for(bigger, "nvme", tmp_path / "again")) as run:
        train_both([("", run)], plain, 2)
        assert_same(run, plain)


def test_buffers_and_modes(tmp_path: Path) -> None:
    """BatchNorm's buffers and train/eval modes are untouched by paging."""
    with pair(tmp_path, models.BatchNormed) as (plain, run):
        train_both([("", run)], plain, 3)
        for model in (plain.model, run.model):
            model.eval()
        ids = next(batches(1))
        assert same(run.model(ids), plain.model(ids))
        assert not any(module.training for module in run.model.modules())
        for model in (plain.model, run.model):
            model.train()
        train_both([("", run)], plain, 1)


def test_a_snapshot_holds_the_buffers(tmp_path: Path) -> None:
    """Running statistics come back with the snapshot; a model with other buffers is told so."""

    def build(width: int = 6) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))

    tiers = tz.Tiers(nvme=tmp_path / "store", host="64MiB", device="64MiB", compute="cpu")
    model = tz.offload(build(), tiers)
    opt = tz.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
    expected = {name: value.clone() for name, value in model.named_buffers()}
    assert float(expected["1.running_mean"].abs().sum()) > 0
    tz.snapshot(model, opt, "a", {})
    tz.close(model)
    again = tz.offload(build(), tiers, resume=True)
    tz.restore(again, tz.AdamW(again.parameters()))
    assert all(torch.equal(value, expected[name]) for name, value in again.named_buffers())
    with pytest.raises(TypeError, match="JSON"):
        tz.snapshot(again, None, "b", {"rng": torch.get_rng_state()})
    tz.close(again)
