"""torch.compile around blocks and around whole models: the engine's hooks run outside of the compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import DIM, Block, Net
from oracle import Plain, batches, loss_of, make, same, tiered, tiers_for
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread")
no_leaks = pytest.mark.usefixtures("no_leaks")  # inductor leaves threads of its own


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(1))  # starts the threads that it keeps
    yield
    torch._dynamo.reset()


def wrapped(model: Any, backend: str) -> None:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=backend)


def in_place(model: Any, backend: str) -> None:
    for layer in model.layers:
        layer.compile(backend=backend)


def inside(model: Any, backend: str) -> None:
    for layer in model.layers:
        layer.up.compile(backend=backend)
        layer.inner = torch.compile(layer.inner, backend=backend)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): param for name, param in model.named_parameters()}


def both(plain: Plain, run: Any, ids: torch.Tensor, calls: tuple[Any, Any] | None = None) -> None:
    losses = [loss_of(call, ids) for call in calls or (plain.model, run.model)]
    assert same(*losses)
    for loss, each in zip(losses, (plain, run), strict=True):
        loss.backward()
        each.step(0.5)
        each.zero_grad()


def check_values(plain: Plain, run: Any) -> None:
    mine = values(run.model)
    for name, param in values(plain.model).items():
        assert same(mine[name].read(), param), name  # type: ignore[operator]


@no_leaks
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", [wrapped, in_place, inside], ids=lambda how: how.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(backend: str, how: Any, when: str, tmp_path: Path) -> None:
    """Blocks compiled before or after offload() train as the compiled plain loop does, and are compiled (M18)."""
    plain, model = Plain(make(Net)), make(Net)
    how(plain.model, backend)
    if when == "before":
        how(model, backend)
    counters = torch._dynamo.utils.counters
    counters.clear()
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        if when == "after":
            how(model, backend)
        for ids in batches(3):
            both(plain, run, ids)
        check_values(plain, run)
    assert counters["stats"]["unique_graphs"] >= 2  # the plain blocks' and ours


def test_inductor(tmp_path: Path) -> None:
    """The same with the default backend, whose kernels read the weights that were fetched (M18)."""
    small = lambda: Net(blocks=1, block=lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()))
    plain, model = Plain(make(small)), make(small)
    for each in (plain.model, model):
        in_place(each, "inductor")
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        for ids in batches(2):
            both(plain, run, ids)
        check_values(plain, run)


@no_leaks
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_model(backend: str, tmp_path: Path) -> None:
    """torch.compile(model) after offload() breaks the graph at every unit and is right all the same (M18)."""
    plain, model = Plain(make(Net)), make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        calls = (torch.compile(plain.model, backend=backend), torch.compile(model, backend=backend))
        for ids in batches(3):
            both(plain, run, ids, calls)
            with torch.no_grad():
                assert same(*(loss_of(call, ids) for call in calls))
        check_values(plain, run)


class Reads(Block):
    """Reads a weight of another block."""

    other: Any = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + self.inner(x) + F.linear(x, self.other[0].down.weight[:, :DIM])


class Readers(Net):
    """Blocks that read the first one's weight."""

    def __init__(self) -> None:
        super().__init__(block=Reads)
        for layer in self.layers:
            layer.__dict__["other"] = (self.layers[0],)


@no_leaks
def test_compiled_blocks_that_read_others(tmp_path: Path) -> None:
    """A weight of another unit in compiled code breaks the graph there and is right (M2, M18)."""
    plain, model = Plain(make(Readers)), make(Readers)
    for each in (plain.model, model):
        in_place(each, "eager")  # other backends round otherwise where the graph is broken otherwise
    with tiered(model, tiers_for(model, "nvme", tmp_path, spare=1 << 15)) as run:
        for ids in batches(3):
            both(plain, run, ids)
        check_values(plain, run)


@no_leaks
def test_micro_batches(tmp_path: Path) -> None:
    """Compiled blocks inside units that run in pieces equal eager ones with the same backend's arithmetic."""
    models = [make(Net), make(Net)]
    in_place(models[1], "eager")
    tiers = [tz.Tiers(nvme=tmp_path / str(n), host="64MiB", device="64MiB", compute="cpu") for n in range(2)]
    with tiered(models[0], tiers[0], micro_batches=2) as eager, tiered(models[1], tiers[1], micro_batches=2) as run:
        for ids in batches(2, shape=(4, 5)):
            losses = [loss_of(each.model, ids) for each in (eager, run)]
            assert same(*losses)
            for loss, each in zip(losses, (eager, run), strict=True):
                loss.backward()
                each.step()
                each.zero_grad()
        mine = dict(run.model.named_parameters())
        for name, param in eager.model.named_parameters():
            assert same(mine[name].read(), param.read()), name  # type: ignore[operator]
