"""Modules that read the weights of others: fetched at the first use, foreseen from the next step on, always equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import DIM, VOCAB, Net
from oracle import Plain, assert_same, batches, loss_of, make, same, tiered, tiers_for, train_both
from pairs import pair
from readers import SHAPES, Kept, Neighbours, RootReads
from torch import nn
from torch.utils.checkpoint import checkpoint

import tierzero as tz
from tierzero.units.homes import Homes

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_reading_the_weights_of_others(shape: str, tmp_path: Path) -> None:
    """`F.linear(x, other.weight)`, with its gradient, in forward, backward and recomputation (M2)."""
    for dtype in [torch.float32] if shape == "normed" else [torch.float32, torch.bfloat16]:
        placement = "nvme" if dtype == torch.float32 else "mixed"
        with pair(tmp_path / str(dtype), SHAPES[shape], placement, dtype, spare=1 << 15) as (plain, run):
            train_both([(shape, run)], plain, 3, accumulate=2, clip=lambda step, norm: 0.7 * norm if step else None)


@pytest.mark.parametrize("shape", ["root", "tied", "regularised"])
def test_in_the_smallest_budget(shape: str, tmp_path: Path) -> None:
    """What is read by itself needs no more memory than its unit alone, once nothing else of the model is in use."""
    with pair(tmp_path, SHAPES[shape], dtype=torch.bfloat16) as (plain, run):
        train_both([(shape, run)], plain, 3)


@pytest.mark.parametrize("shape", ["root", "tied", "blocks"])
def test_the_whole_model_checkpointed(shape: str, tmp_path: Path) -> None:
    """What the root reads from others is kept out of a checkpoint around it in recomputation as in forward (M2)."""

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits = checkpoint(model, ids, use_reentrant=False)
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    with pair(tmp_path, SHAPES[shape], dtype=torch.bfloat16, spare=1 << 15) as (plain, run):
        train_both([(shape, run)], plain, 3, accumulate=2, loss=loss)


def test_too_small_a_budget_for_two(tmp_path: Path) -> None:
    """A block and what it is seen to read must fit together: said before anything runs, with both names and a budget,
    which works.
    """
    model = make(Neighbours)
    with pytest.raises(
        tz.BudgetError, match=r"\(layers\.0\), with the weights .* of layers\.2 .* more are needed"
    ) as caught:
        tz.offload(model, tz.Tiers(nvme=tmp_path / "a", host="64MiB", device=1, compute="cpu"))
    budget = int(str(caught.value).partition("works is ")[2].split()[0])
    again, plain = make(Neighbours), Plain(make(Neighbours))
    tiers = tz.Tiers(nvme=tmp_path / "b", host="64MiB", device=budget, compute="cpu")
    with tiered(again, tiers) as run:
        train_both([("", run)], plain, 2)
        assert_same(run, plain)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_budget_that_a_run_needed(shape: str, tmp_path: Path) -> None:
    """What a step recorded is enough for the same one, and a byte less is not: the error names what is lent."""

    def stepped(budget: int | str, name: str) -> int:
        tiers = tz.Tiers(nvme=tmp_path / name, host="64MiB", device=budget, compute="cpu")
        with tiered(make(SHAPES[shape]), tiers) as run:
            loss_of(run.model, next(batches(1))).backward()
            run.step()
            run.zero_grad()
            return int(tz.stats(run.model)["device_needed"])

    needed = stepped("64MiB", "a")
    assert stepped(needed, "b") == needed
    with pytest.raises(tz.BudgetError, match=r"lent to modules|is too small for the largest unit"):
        stepped(needed - 1, "c")


def test_the_next_step_foresees_it(tmp_path: Path) -> None:
    """From the second step on, what is read is fetched ahead: it has its place in the trace, which holds (M2)."""
    with pair(tmp_path, RootReads, spare=1 << 14) as (plain, run):
        train_both([("", run)], plain, 2)
        trace = run.engine.pager.trace
        before = trace.departures
        train_both([("", run)], plain, 4, seed=2)
        assert trace.departures == before
        (embed,) = (unit for unit in run.engine.units if unit.name == "embed")
        assert trace._train.step.uses.count(embed.uid) >= 2  # the embedding's own forward, and the model's


def test_outside_a_forward_it_stays_an_error(tmp_path: Path) -> None:
    """Between the model's forwards a weight is not lent, before or after one that used it (M1, M2)."""
    with pair(tmp_path, RootReads, spare=1 << 14) as (plain, run):
        x = torch.ones(2, DIM)
        for _ in range(2):
            with pytest.raises(tz.TierzeroError, match=r"embed\.weight.*unsharded"):
                F.linear(x, run.model.embed.weight)
            with pytest.raises(tz.TierzeroError, match=r"layers\.0\.up\.weight.*unsharded"):
                F.linear(run.model.embed(torch.tensor([1, 2])), run.model.layers[0].up.weight)
            train_both([("", run)], plain, 1)


def test_writing_is_not_lent(tmp_path: Path) -> None:
    """Changing another module's parameter in place is refused in forward too, naming it."""

    class Writes(Net):
        on = False

        def body(self, h: torch.Tensor) -> torch.Tensor:
            if self.on:
                with torch.no_grad():
                    self.layers[1].up.weight.mul_(0.5)
            return super().body(h)

    with pair(tmp_path, Writes) as (plain, run):
        run.model.on = True
        with pytest.raises(tz.TierzeroError, match=r"layers\.1\.up\.weight.*write=True"):
            loss_of(run.model, next(batches(1)))
        run.model.on = False
        train_both([("", run)], plain, 1)


def test_a_view_that_leaves_the_model(tmp_path: Path) -> None:
    """Rows of another module's weight among the results are copies, and have their gradient."""

    class Rows(Net):
        def forward(self, ids: torch.Tensor) -> Any:
            return super().forward(ids), self.embed.weight[:3], self.layers[0].up.weight

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits, rows, whole = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + rows.pow(2).sum() + whole.pow(2).mean()

    with pair(tmp_path, Rows, spare=1 << 14) as (plain, run):
        train_both([("", run)], plain, 3, loss=loss)


@pytest.mark.parametrize("reentrant", [True, False])
def test_as_an_argument_of_a_checkpoint(reentrant: bool, tmp_path: Path) -> None:
    """There the gradient would be lost: refused by name."""

    class Passes(Net):
        passes = True

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.body(self.embed(ids))
            return checkpoint(F.linear, h, self.embed.weight, use_reentrant=reentrant) if self.passes else self.head(h)

    with pair(tmp_path, Passes, spare=1 << 14) as (plain, run):
        with pytest.raises(tz.TierzeroError, match=r"copy of embed\.weight would be lost.*inside the function"):
            loss_of(run.model, next(batches(1))).backward()
        run.zero_grad()
        for model in (plain.model, run.model):
            model.passes = False
        train_both([("", run)], plain, 2)


def test_in_pieces(tmp_path: Path) -> None:
    """A unit that runs in pieces may read what is frozen; what is trained is refused by name."""
    model = make(Neighbours)
    tiers = tz.Tiers(nvme=tmp_path / "a", host="64MiB", device="64MiB", compute="cpu")
    with tiered(model, tiers, micro_batches=2):
        with pytest.raises(tz.TierzeroError, match=r"in pieces uses layers\.2\.up\.weight.*micro_batches at 1"):
            loss_of(model, next(batches(1, shape=(4, 5))))

    class Reads(Neighbours):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].requires_grad_(False)
            self.layers[2].__dict__["other"] = (self.layers[2],)
            self.layers[1].__dict__["other"] = (self.layers[2],)

    model = make(Reads)
    tiers = tz.Tiers(nvme=tmp_path / "b", host="64MiB", device="64MiB", compute="cpu")
    with tiered(model, tiers, micro_batches=2) as run:
        for ids in batches(2, shape=(4, 5)):
            loss_of(model, ids).backward()
            assert all(param.grad is not None for param in model.layers[0].parameters())
            run.step()
            run.zero_grad()


def test_functional_call(tmp_path: Path) -> None:
    """torch.func.functional_call's values are read where other modules read the parameter (M2)."""
    override = {"embed.weight": torch.full((VOCAB, DIM), 0.25), "layers.1.up.weight": torch.full((2 * DIM, DIM), 0.5)}
    with pair(tmp_path, RootReads, spare=1 << 14) as (plain, run):
        ids = next(batches(1))
        results = [torch.func.functional_call(each.model, override, (ids,)) for each in (plain, run)]
        assert same(*results)
        train_both([("", run)], plain, 2)


def test_kept_in_a_closure(tmp_path: Path) -> None:
    """A parameter that a function has kept from before offload() is an error that names it, not an old value (M1)."""
    model: Any = make(Net)
    weight = model.layers[0].up.weight
    model.layers[1].register_forward_hook(lambda module, args, output: output + F.linear(output, weight).mean())
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        with pytest.raises(tz.TierzeroError, match=r"layers\.0\.up\.weight as it was before offload"):
            loss_of(model, next(batches(1)))
        assert weight.shape == (2 * DIM, DIM)
        assert "ReplacedParameter" in repr(weight)


def test_an_offload_that_fails_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in plain lists, and the hooks on gradients, are the model's own again; old ones stay refused."""
    plain, model = make(Kept), make(Kept)
    seen: list[int] = []
    for each in (plain, model):
        each.layers[0].up.weight.register_hook(lambda grad: seen.append(1))  # type: ignore[union-attr]
    before = model.layers[0].up.weight
    first = Homes.write_first

    async def fails(homes: Homes, unit: Any, params: Any) -> None:
        if unit.name == "head":
            raise OSError(28, "no space left (injected)", str(tmp_path))
        await first(homes, unit, params)

    monkeypatch.setattr(Homes, "write_first", fails)
    with pytest.raises(OSError, match="injected"):
        tz.offload(model, tz.Tiers(nvme=tmp_path, host="64MiB", device="64MiB", compute="cpu"))
    assert model.kept[0] is model.layers[0].up.weight
    losses = [loss_of(each, next(batches(1))) for each in (plain, model)]
    assert same(*losses)
    for loss in losses:
        loss.backward()
    assert len(seen) == 2
    assert same(model.kept[0].grad, plain.kept[0].grad)
    with pytest.raises(tz.TierzeroError, match=r"layers\.0\.up\.weight as it was before"):
        before.sum()


def test_eager_updates_and_evaluation(tmp_path: Path) -> None:
    """Guesses, evaluation in between and a step without a reader are equal too (M16)."""

    class Sometimes(RootReads):
        calls = 0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(ids) if self.calls % 3 else Net.forward(self, ids)

    plain, model = Plain(make(Sometimes)), make(Sometimes)
    with tiered(model, tiers_for(model, "nvme", tmp_path, spare=1 << 14), overlap="eager") as run:
        for seed in range(6):
            for each in (plain, run):
                with torch.no_grad():
                    each.model(next(batches(1, seed=seed)))
            train_both([("", run)], plain, 1, seed=seed)
        assert_same(run, plain)
