"""save and load: ten steps and ten more are twenty, bit for bit, whatever changes in between."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import BatchNormed, Dropout, LoRA, Net, Tied
from oracle import Plain, Tiered, assert_same, batches, loss_of, make, same, tiered, tiers_for
from saves import step, weights
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
BF16 = torch.bfloat16


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


@contextlib.contextmanager
def built(factory: Any, dtype: torch.dtype, placement: str, directory: Path, **options: Any) -> Iterator[Tiered]:
    """An offloaded model with other values than those that are saved."""
    model = make(factory, dtype, seed=99)
    with tiered(model, tiers_for(model, placement, directory, spare=int(options.pop("spare", 0))), **options) as run:
        yield run


@pytest.mark.parametrize(
    ("factory", "dtype", "first", "second", "middle"),
    [
        (Dropout, torch.float32, "nvme", "host", False),
        (Dropout, BF16, "host", "mixed", True),
        (Tied, BF16, "mixed", "nvme", True),
        (Tied, torch.float32, "host", "host", True),
        (LoRA, torch.float32, "mixed", "nvme", False),
        (BatchNormed, torch.float32, "nvme", "mixed", False),
    ],
)
def test_ten_and_ten_are_twenty(
    factory: Any, dtype: torch.dtype, first: str, second: str, middle: bool, tmp_path: Path
) -> None:
    """With dropout, a scheduler and accumulation, saved between steps or between micro-batches; another placement, a
    larger device budget and other drives afterwards.
    """
    data, losses = batches(60), []
    plain = Plain(make(factory, dtype))
    plain_sched = cosine(plain.optimizer)
    torch.manual_seed(7)
    for _ in range(20):
        losses += step(plain, data, scheduler=plain_sched)
    data, mine = batches(60), []
    model = make(factory, dtype)
    with tiered(model, tiers_for(model, first, tmp_path / "one")) as run:
        scheduler = cosine(run.optimizer)
        torch.manual_seed(7)
        for _ in range(10):
            mine += step(run, data, scheduler=scheduler)
        if middle:
            mine += step(run, data, micro=(0, 1), stop=False)
        saving = tz.save(run.model, tmp_path / "save", run.optimizer, states={"sched": scheduler}, meta={"at": 10})
        assert saving.result() == tmp_path / "save"
    torch.manual_seed(1234)
    with built(factory, dtype, second, tmp_path / "two", spare=1 << 16) as run:
        scheduler = cosine(run.optimizer)
        assert tz.load(run.model, tmp_path / "save", run.optimizer, states={"sched": scheduler}) == {"at": 10}
        if middle:
            mine += step(run, data, micro=(1, 2), scheduler=scheduler)
        for _ in range(9 if middle else 10):
            mine += step(run, data, scheduler=scheduler)
        assert all(same(one, other) for one, other in zip(mine, losses, strict=True))
        assert_same(run, plain, f"{first} and {second}")


def test_after_saving_the_run_goes_on_as_if_nothing_was(tmp_path: Path) -> None:
    """A save that is under way while the next steps are taken changes nothing, and holds the moment it began."""
    plain = Plain(make(Tied, BF16))
    data = batches(60)
    for _ in range(8):
        step(plain, data)
    data = batches(60)
    model = make(Tied, BF16)
    with tiered(model, tiers_for(model, "mixed", tmp_path / "one")) as run:
        for _ in range(4):
            step(run, data)
        before = weights(run.model)
        saving = tz.save(run.model, tmp_path / "save", run.optimizer)
        for _ in range(4):
            step(run, data)
        saving.result()
        assert saving.done()
        assert_same(run, plain)
    with built(Tied, BF16, "host", tmp_path) as run:
        tz.load(run.model, tmp_path / "save")
        assert all(same(value, before[name]) for name, value in weights(run.model).items())


def test_a_clip_that_waits_for_its_step_is_saved(tmp_path: Path) -> None:
    """Between clip_grad_norm_ and step()."""
    model = make(Net, BF16)
    ends = []
    with tiered(model, tiers_for(model, "nvme", tmp_path / "one")) as run:
        loss_of(run.model, next(batches(1))).backward()
        tz.clip_grad_norm_(run.model.parameters(), 0.01)
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        run.optimizer.step()
        ends.append(weights(run.model))
    with built(Net, BF16, "host", tmp_path) as run:
        tz.load(run.model, tmp_path / "save", run.optimizer)
        run.optimizer.step()
        ends.append(weights(run.model))
    assert all(same(value, ends[1][name]) for name, value in ends[0].items())


def test_random_generators_and_values_come_back(tmp_path: Path) -> None:
    """torch's, Python's and NumPy's; and states of every kind."""
    ema = nn.Linear(3, 2)
    kept = {"position": 3, "inner": {"a": (1, 2.5), "none": None}, "empty": {}, "bits": torch.tensor([1, 2])}

    class Loader:
        def __init__(self, state: Any) -> None:
            self.state = state

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    with built(Net, torch.float32, "host", tmp_path) as run:
        tz.save(run.model, tmp_path / "save", run.optimizer, states={"data": Loader(kept), "ema": ema}, wait=True)
        drawn = torch.rand(3), random.random(), np.random.rand()
        loader, other = Loader(None), nn.Linear(3, 2)
        tz.load(run.model, tmp_path / "save", run.optimizer, states={"data": loader, "ema": other})
        again = torch.rand(3), random.random(), np.random.rand()
        assert same(drawn[0], again[0])
        assert drawn[1:] == again[1:]
        assert str(loader.state) == str(kept)
        assert same(other.weight, ema.weight)
        tz.load(run.model, tmp_path / "save", run.optimizer, random=False)
        assert not same(torch.rand(3), drawn[0])


def test_weights_alone(tmp_path: Path) -> None:
    """Without an optimizer only weights come back, cast to the model's dtype; its states stay."""
    model = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "one")) as run:
        data = batches(10)
        step(run, data)
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        saved = weights(run.model)
    model = make(Net, BF16)
    with tiered(model, tiers_for(model, "mixed", tmp_path / "two")) as run:
        step(run, data)
        moments = {name: run.optimizer.state[p]["exp_avg"].read() for name, p in run.model.named_parameters()}
        assert tz.load(run.model, tmp_path / "save") == {}
        for name, param in run.model.named_parameters():
            assert same(param.read(), saved[name].to(BF16))  # type: ignore[operator]
            assert same(run.optimizer.state[param]["exp_avg"].read(), moments[name])
        with pytest.raises(tz.TierzeroError, match=r"embed.weight is torch.float32 there and torch.bfloat16"):
            tz.load(run.model, tmp_path / "save", run.optimizer)


def test_without_the_extension(tmp_path: Path, portable: None) -> None:
    """The same file by buffered I/O."""
    with tiered(make(Tied), tiers_for(make(Tied), "nvme", tmp_path / "one")) as run:
        step(run, batches(2))
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        saved = weights(run.model)
    with built(Tied, torch.float32, "host", tmp_path) as run:
        tz.load(run.model, tmp_path / "save", run.optimizer)
        assert all(same(value, saved[name]) for name, value in weights(run.model).items())


def test_on_a_meta_model(tmp_path: Path) -> None:
    """A model without values takes a checkpoint's, trains, and is saved again."""
    with built(Tied, BF16, "nvme", tmp_path / "one") as run:
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        saved = weights(run.model)
    with torch.device("meta"):
        model = Tied().to(BF16)
    tiers = tiers_for(make(Tied, BF16), "mixed", tmp_path / "two")
    with tiered(model, tiers) as run:
        with pytest.raises(tz.TierzeroError, match="never given a value"):
            tz.save(run.model, tmp_path / "other", run.optimizer)
        assert not (tmp_path / "other").exists()
        tz.load(run.model, tmp_path / "save", run.optimizer)
        assert all(same(value, saved[name]) for name, value in weights(run.model).items())
        step(run, batches(4))
