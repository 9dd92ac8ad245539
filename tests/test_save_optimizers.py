"""save and load with every kind of optimizer state: what it is kept in does not show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net, Tied
from oracle import HYPER, Tiered, batches, loss_of, make, same, tiered
from other_optimizers import Lion
from saves import step, weights
from test_state_formats import FORMATS, tiers

import tierzero as tz
from tierzero.native import NATIVE

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
BF16 = torch.bfloat16
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Lion": (Lion, {"lr": 1e-3, "decay": 0.1}),
}


def bits(run: Any) -> dict[str, Any]:
    """Parameters and everything that the optimizer keeps."""
    found: dict[str, Any] = dict(weights(run.model))
    for name, param in run.model.named_parameters():
        for part, value in run.optimizer.state.get(param, {}).items():
            plain = value.read() if hasattr(value, "read") else value
            found[f"{name} {part}"] = plain.clone() if isinstance(plain, torch.Tensor) else plain
    return found


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        right = same(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        assert right, key


@pytest.mark.skipif(NATIVE is None, reason="other formats than float32 need the native extension")
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path: Path) -> None:
    """Rounded moments and split masters, with another placement, where some masters are not split: what is loaded is
    what was saved, and steps on from there are the same.
    """
    model, data = make(Net, BF16), batches(12)
    with tiered(model, tiers(model, "cached", tmp_path / "one", name), **FORMATS[name]) as run:
        for _ in range(3):
            step(run, data)
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        saved = bits(run)
        step(run, data)
        end = bits(run)
    model = make(Net, BF16, seed=5)
    with tiered(model, tiers(model, "nvme", tmp_path / "two", name), **FORMATS[name]) as run:
        tz.load(run.model, tmp_path / "save", run.optimizer)
        assert_equal(bits(run), saved)
        data = batches(12)
        for _ in range(6):
            next(data)
        step(run, data)
        assert_equal(bits(run), end)


def test_amsgrad(tmp_path: Path) -> None:
    """max_exp_avg_sq too; an optimizer without it is refused."""
    model, data = make(Net), batches(12)
    big = tz.Tiers(nvme=tmp_path / "one", host="1GiB", device="1GiB", compute="cpu")
    with tiered(model, big, amsgrad=True) as run:
        for _ in range(3):
            step(run, data)
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        saved = bits(run)
    big = tz.Tiers(host="1GiB", device="1GiB", compute="cpu")
    with tiered(make(Net, seed=5), big, amsgrad=True) as run:
        tz.load(run.model, tmp_path / "save", run.optimizer)
        assert_equal(bits(run), saved)
    with tiered(make(Net, seed=5), tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as run:
        before = bits(run)
        with pytest.raises(ValueError, match="amsgrad"):
            tz.load(run.model, tmp_path / "save", run.optimizer)
        assert_equal(bits(run), before)


@contextmanager
def other(cls: Any, hyper: dict[str, Any], dtype: torch.dtype, nvme: Path | None, seed: int) -> Iterator[Tiered]:
    model = make(Tied, dtype, seed)
    tz.offload(model, tz.Tiers(nvme=nvme, host="64MiB", device="64MiB", compute="cpu"))
    run = Tiered.__new__(Tiered)
    run.model, run.optimizer = model, tz.wrap_optimizer(cls, model.parameters(), **hyper)  # type: ignore[assignment]
    try:
        yield run
    finally:
        tz.close(model)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_wrapped_optimizers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whatever they keep: tensors of other shapes and dtypes, numbers, nothing; and float32 masters."""
    cls, hyper = OTHERS[name]
    data = batches(12)
    with other(cls, hyper, dtype, tmp_path / "one", 0) as run:
        for _ in range(2):
            step(run, data)
        step(run, data, micro=(0, 1), stop=False)
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        saved = bits(run)
        step(run, data, micro=(1, 2))
        end = bits(run)
    with other(cls, hyper, dtype, None, 5) as run:
        data = batches(12)
        step(run, data)
        tz.load(run.model, tmp_path / "save", run.optimizer)
        assert_equal(bits(run), saved)
        for _ in range(3):
            next(data)
        step(run, data, micro=(1, 2))
        assert_equal(bits(run), end)


def test_another_class(tmp_path: Path) -> None:
    """States of one class are not given to another."""
    with other(torch.optim.SGD, {"lr": 0.1}, torch.float32, None, 0) as run:
        step(run, batches(2))
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
    with other(torch.optim.Adagrad, {"lr": 0.1}, torch.float32, None, 0) as run:
        before = bits(run)
        with pytest.raises(tz.TierzeroError, match=r"group 0 was stepped by torch.optim.sgd.SGD, not by"):
            tz.load(run.model, tmp_path / "save", run.optimizer)
        assert_equal(bits(run), before)


def test_two_optimizers(tmp_path: Path) -> None:
    """Their groups one after the other; a parameter of neither has no state."""

    def halves(model: Any) -> list[Any]:
        params = list(model.parameters())
        return [tz.AdamW(params[:4], lr=0.01), tz.AdamW([{"params": params[4:8]}, {"params": params[8:-1]}], lr=0.02)]

    def train(model: Any, optimizers: list[Any], data: Any) -> None:
        loss_of(model, next(data)).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()

    ends: list[dict[str, torch.Tensor]] = []
    tiers = tz.Tiers(host="1GiB", device="1GiB", compute="cpu")
    model, data = tz.offload(make(Net), tiers), batches(8)
    pair = halves(model)
    for _ in range(2):
        train(model, pair, data)
    model.zero_grad()
    tz.save(model, tmp_path / "save", pair, wait=True)
    train(model, pair, data)
    ends.append(weights(model))
    tz.close(model)
    model, data = tz.offload(make(Net, seed=4), tiers), batches(8)
    pair = halves(model)
    tz.load(model, tmp_path / "save", pair)
    for _ in range(2):
        next(data)
    train(model, pair, data)
    ends.append(weights(model))
    tz.close(model)
    assert all(same(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, tz.GradScaler])
def test_grad_scaler(scaler: Any, tmp_path: Path) -> None:
    """Its scale comes back, and the gradients that it has scaled."""
    tiers = tz.Tiers(host="1GiB", device="1GiB", compute="cpu")
    ends = []
    with tiered(make(Net, BF16), tiers) as run:
        scale, data = scaler("cpu", init_scale=2.0**10, growth_interval=2), batches(12)
        for _ in range(2):
            step(run, data, scaler=scale)
        step(run, data, micro=(0, 1), stop=False, scaler=scale)
        tz.save(run.model, tmp_path / "save", run.optimizer, states={"scaler": scale}, wait=True)
        step(run, data, micro=(1, 2), scaler=scale)
        step(run, data, scaler=scale)
        ends.append(bits(run))
    with tiered(make(Net, BF16, seed=3), tiers) as run:
        scale, data = scaler("cpu", init_scale=2.0**3, growth_interval=2), batches(12)
        scale.scale(torch.ones(1))
        tz.load(run.model, tmp_path / "save", run.optimizer, states={"scaler": scale})
        assert scale.get_scale() == 2.0**11
        for _ in range(5):
            next(data)
        step(run, data, micro=(1, 2), scaler=scale)
        step(run, data, scaler=scale)
        ends.append(bits(run))
    assert_equal(*ends)


def test_hyper_parameters(tmp_path: Path) -> None:
    """Groups come back with all options, tensors among them."""
    tiers = tz.Tiers(host="1GiB", device="1GiB", compute="cpu")
    with tiered(make(Net), tiers, lr=torch.tensor(0.25), betas=(0.5, 0.75)) as run:
        run.optimizer.param_groups[0]["initial_lr"] = 3.0
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
    with tiered(make(Net), tiers, **{**HYPER, "lr": torch.tensor(0.5)}) as run:
        tz.load(run.model, tmp_path / "save", run.optimizer)
        (group,) = run.optimizer.param_groups
        assert float(group["lr"]) == 0.25
        assert group["betas"] == (0.5, 0.75)
        assert group["initial_lr"] == 3.0
        assert len(group["params"]) == len(list(run.model.parameters()))
