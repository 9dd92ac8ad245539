"""What user code may do with a parameter that is not there, and what it is told when it may not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import DIM, Block, Net
from oracle import Plain, assert_same, batches, loss_of, make, tiered, tiers_for, train_both
from pairs import pair
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda w: w + 1,
    "add reflected": lambda w: 1 + w,
    "mul in place": lambda w: w.detach().mul_(2.0),
    "matmul": lambda w: torch.ones(3, w.shape[0]) @ w,
    "where": lambda w: torch.where(torch.ones(w.shape, dtype=torch.bool), w, torch.zeros(w.shape)),
    "linear": lambda w: F.linear(torch.ones(2, w.shape[1]), w),
    "embedding": lambda w: F.embedding(torch.tensor([0, 1]), w),
    "index": lambda w: w[0],
    "set item": lambda w: w.__setitem__(0, 0.0),
    "iterate": lambda w: list(w),
    "sum": lambda w: w.sum(),
    "norm": lambda w: w.norm(),
    "transpose": lambda w: w.t(),
    "view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(-1)[0],
    "stack": lambda w: torch.stack([w, w]),
    "cat": lambda w: torch.cat([w, w]),
    "equal": lambda w: torch.equal(w, w),
    "compare": lambda w: w == 0,
    "bool": lambda w: bool((w > 0).all()),
    "init": lambda w: nn.init.normal_(w),
    "zero": lambda w: w.data.zero_(),
    "to vector": lambda w: nn.utils.parameters_to_vector([w]),
    "einsum": lambda w: torch.einsum("ij,kj->ik", torch.ones(2, w.shape[1]), w),
    "foreach": lambda w: torch._foreach_add([w], 1.0),
    "detached": lambda w: w.detach() * 2,
    "into": lambda w: torch.add(torch.ones(w.shape), 1, out=w.detach()),
    "torch adamw": lambda w: _torch_step(w),
}


def _torch_step(weight: torch.Tensor) -> None:
    other = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(weight.shape)
    try:
        other.step()
    finally:
        weight.grad = None


@pytest.mark.parametrize("use", USES)
def test_using_a_paged_out_parameter(use: str, tmp_path: Path) -> None:
    """Any use of a parameter outside its unit raises, naming it and the way out; never a broadcast stand-in (M1)."""
    with pair(tmp_path) as (plain, run):
        weight = run.model.layers[1].up.weight
        assert tuple(weight.shape) == (2 * DIM, DIM)
        assert weight.numel() == 2 * DIM * DIM
        assert weight.dtype == torch.float32
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(tz.TierzeroError) as caught:
                USES[use](weight)
            assert type(caught.value).__name__ == "PagedOutError"
            assert "layers.1.up.weight" in str(caught.value)
            assert ("wrap_optimizer" if use == "torch adamw" else "unsharded") in str(caught.value)
        train_both([("", run)], plain, 1)


LEAKY: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda w: w.detach().numpy(),
    "tolist": lambda w: w.tolist(),
    "item": lambda w: w.item(),
    "storage": lambda w: bytes(w.untyped_storage()),
    "dlpack": lambda w: torch.from_dlpack(w.detach()),
    "array": lambda w: __import__("numpy").asarray(w.detach()),
    "as_strided": lambda w: w.as_strided((2,), (1,)).sum(),
    "set_": lambda w: torch.empty(0).set_(w),
    "float": lambda w: float(w),
    "rows": lambda w: list(w),
}


@pytest.mark.parametrize("use", LEAKY)
def test_no_use_crashes(use: str, tmp_path: Path) -> None:
    """Ways around torch's dispatcher raise something; they do not read memory that is not there."""
    with pair(tmp_path) as (_, run):
        with pytest.raises((tz.TierzeroError, RuntimeError, TypeError, ValueError, NotImplementedError, BufferError)):
            LEAKY[use](run.model.head.weight)


def test_a_weight_of_another_module(tmp_path: Path) -> None:
    """A module may read another's weight when both are one unit; see test_lending.py for two (M2)."""

    class Reader(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.linear(self.body(self.embed(ids)), self.embed.weight)

    plain = Plain(make(Reader))
    again = make(Reader)
    units = list(again.layers)
    with tiered(again, tiers_for(again, "nvme", tmp_path / "b", units), units=units) as run:
        train_both([("", run)], plain, 3)
        assert_same(run, plain)


class Keeps(Block):
    """Keeps the weight it sees in forward."""

    kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.__dict__["kept"] = self.up.weight
        return super().forward(x)


def test_tracebacks_can_be_printed(tmp_path: Path) -> None:
    """A traceback's locals may hold live parameters long after their bytes went: printing them is safe."""
    model = make(lambda: Net(block=Keeps))
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        loss_of(model, next(batches(1))).backward()
    for index, layer in enumerate(model.layers):
        assert repr(layer.kept) == (
            f"LiveParameter(layers.{index}.up.weight, shape=(16, 8), dtype=torch.float32, paged out)"
        )


@pytest.mark.parametrize("use", [*USES, *(use for use in LEAKY if use != "set_")])  # set_ aliases and reads nothing
def test_using_a_weight_kept_from_forward(use: str, tmp_path: Path) -> None:
    """A weight kept past its forward raises a sentence with its name, whether its bytes are still there or not."""
    with pair(tmp_path, lambda: Net(block=Keeps)) as (plain, run):
        for backward in (False, True):
            loss = loss_of(run.model, next(batches(1)))
            if backward:
                loss.backward()
            for index, layer in enumerate(run.model.layers):
                with pytest.raises(tz.TierzeroError, match=rf"layers\.{index}\.up\.weight, kept from.*unsharded"):
                    (USES | LEAKY)[use](layer.kept)
                assert layer.kept.shape == (16, 8)
        run.zero_grad()
        train_both([("", run)], plain, 2)


@pytest.mark.parametrize("shape", ["plain", "dicts", "checkpoint", "tied"])
def test_double_backward_is_refused(shape: str, tmp_path: Path) -> None:
    """create_graph=True is refused with a sentence, in backward and in autograd.grad, and training goes on."""
    with pair(tmp_path, models.SHAPES[shape]) as (plain, run):
        for attempt in (
            lambda loss, h: loss.backward(create_graph=True),
            lambda loss, h: torch.autograd.grad(loss, h, create_graph=True),
        ):
            h = (
                run.model.embed(next(batches(1))).detach().requires_grad_()
                if shape != "tied"
                else torch.randn(2, 5, DIM, requires_grad=True)
            )
            with pytest.raises(tz.TierzeroError, match="double backward"):
                attempt(run.model.body(h).pow(2).mean(), h)
        run.zero_grad()
        train_both([("", run)], plain, 2)
