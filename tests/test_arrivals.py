"""Parameters that come, go or change places after offload(): adopted nowhere, always named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIM, VOCAB, Block, LoRALinear, Net
from oracle import Plain, assert_same, batches, loss_of, make, same, tiered, tiers_for, train_both
from pairs import pair
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


def new_head(model: Any) -> None:
    model.head = nn.Linear(DIM, VOCAB, bias=False)


def one_more_block(model: Any) -> None:
    model.layers.append(Block())


def adapter_inside(model: Any) -> None:
    model.layers[1].add_module("adapter", LoRALinear())


def one_more_parameter(model: Any) -> None:
    model.layers[1].register_parameter("gain", nn.Parameter(torch.ones(1)))


def larger_vocabulary(model: Any) -> None:
    model.embed = nn.Embedding(VOCAB + 4, DIM)


CHANGES = {
    new_head: r"head\.weight came into the Net after offload",
    one_more_block: r"layers\.3\.norm\.weight, .* and 2 more came into",
    adapter_inside: r"layers\.1\.adapter\.a\.weight",
    one_more_parameter: r"layers\.1\.gain came into",
    larger_vocabulary: r"embed\.weight came into",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_parameters_that_came_later(change: Any, tmp_path: Path) -> None:
    """The next training forward names them and says what to do; so do commit and the optimizer (M3, M4)."""
    model = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        loss_of(model, next(batches(1))).backward()
        run.step()
        run.zero_grad()
        change(model)
        for _ in range(2):
            with pytest.raises(tz.TierzeroError, match=rf"{CHANGES[change]}.*build the model first"):
                loss_of(model, next(batches(1)))
        with pytest.raises(tz.TierzeroError, match=CHANGES[change]):
            tz.snapshot(model, run.optimizer, "a")
        with pytest.raises(tz.TierzeroError, match="not one of an offloaded model"):
            tz.AdamW(model.parameters())


def test_taking_them_out_again(tmp_path: Path) -> None:
    """Once what came is gone, training goes on."""
    with pair(tmp_path) as (plain, run):
        old = run.model.head
        train_both([("", run)], plain, 1)
        new_head(run.model)
        with pytest.raises(tz.TierzeroError, match=r"head\.weight came"):
            loss_of(run.model, next(batches(1)))
        run.model.head = old
        train_both([("", run)], plain, 2)


def test_frozen_ones_and_evaluation(tmp_path: Path) -> None:
    """What gets no gradient may come and be used; a commit, which would lack it, names it."""
    model: Any = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        new_head(model)
        with torch.no_grad():
            expected = loss_of(model, next(batches(1)))
        model.head.requires_grad_(False)
        assert same(loss_of(model, next(batches(1))), expected)
        with pytest.raises(tz.TierzeroError, match=r"head\.weight came"):
            tz.snapshot(model, run.optimizer, "a")


def test_a_module_around_the_offloaded_one(tmp_path: Path) -> None:
    """A new head outside the offloaded model trains under an optimizer of its own, as the error advises (M4)."""

    class Around(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.head = nn.Linear(VOCAB, VOCAB)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.base(ids))

    with pair(tmp_path) as (plain, run):
        torch.manual_seed(5)
        mine = Around(run.model)
        torch.manual_seed(5)
        theirs = Around(plain.model)
        optimizers = [torch.optim.SGD(each.head.parameters(), lr=0.1) for each in (mine, theirs)]
        for ids in batches(3):
            losses = [loss_of(each, ids) for each in (mine, theirs)]
            assert same(*losses)
            for loss, optimizer, each in zip(losses, optimizers, (run, plain), strict=True):
                loss.backward()
                optimizer.step()
                each.step()
                optimizer.zero_grad()
                each.zero_grad()
        assert same(mine.head.weight, theirs.head.weight)


def resized(model: Any, rows: int) -> None:
    """As libraries resize embeddings: a new module with the old rows, in the old one's place."""
    old = model.embed
    new = nn.Embedding(rows, DIM)
    kept = min(rows, old.weight.shape[0])
    new.weight.data[:kept] = old.weight.data[:kept]
    model.embed, model.head = new, nn.Linear(DIM, rows, bias=False)
    model.head.weight = new.weight


def test_resizing_the_vocabulary(tmp_path: Path) -> None:
    """Before offload() it is a plain resize; afterwards it is refused by name, and shapes stay true (M3)."""
    model, plain_model = make(Net), make(Net)
    for each in (model, plain_model):
        torch.manual_seed(3)
        resized(each, VOCAB + 5)
    plain = Plain(plain_model)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        assert model.embed.weight.shape == (VOCAB + 5, DIM)
        train_both([("", run)], plain, 2)
        assert_same(run, plain)
        with pytest.raises(tz.TierzeroError, match=r"embed\.weight.*unsharded"):
            resized(model, VOCAB + 9)
        train_both([("", run)], plain, 1)
        with tz.unsharded(model.embed, write=True):
            bigger = torch.zeros(VOCAB + 9, DIM)
            with pytest.raises(tz.TierzeroError, match=r"embed\.weight is torch\.float32 \(29, 8\).*cannot become"):
                model.embed.weight.data = bigger
            with torch.no_grad():
                model.embed.weight[VOCAB:] = 0.5
        with torch.no_grad():
            plain_model.embed.weight[VOCAB:] = 0.5
            plain.masters[plain_model.embed.weight][VOCAB:] = 0.5
        train_both([("", run)], plain, 2)
        assert_same(run, plain)


def test_tying_afterwards(tmp_path: Path) -> None:
    """A parameter of the model in another place of it is refused by the name of the one that it replaced (M4)."""
    model: Any = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        model.head.weight = model.embed.weight
        with pytest.raises(tz.TierzeroError, match=r"head\.weight was replaced after offload"):
            loss_of(model, next(batches(1)))


def test_other_models_come_and_go(tmp_path: Path) -> None:
    """Modules that are built elsewhere meanwhile change nothing, offloaded or not (M11)."""
    with pair(tmp_path) as (plain, run):
        for step in range(3):
            Net()
            train_both([("", run)], plain, 1, seed=step)
        other = make(Net, seed=3)
        with tiered(other, tiers_for(other, "host", tmp_path / "other")):
            loss_of(other, next(batches(1))).backward()
            train_both([("", run)], plain, 1)
            other.zero_grad()


def test_two_models_share_modules(tmp_path: Path) -> None:
    """A model with blocks of an offloaded one is refused as a whole, and may use them unoffloaded (M11)."""
    with pair(tmp_path) as (plain, run):
        second, plain_second = make(Net, seed=1), make(Net, seed=1)
        second.layers, plain_second.layers = run.model.layers, plain.model.layers
        with pytest.raises(tz.TierzeroError, match="a part of it, is offloaded already"):
            tz.offload(second, tz.Tiers(host="64MiB", device="64MiB", compute="cpu"))
        for ids in batches(3):
            losses = [loss_of(each, ids) for each in (second, plain_second)]
            assert same(*losses)
            for loss in losses:
                loss.backward()
            plain.step()
            run.step()
            plain.zero_grad()
            run.zero_grad()
        for mine, theirs in ((second.embed, plain_second.embed), (second.head, plain_second.head)):
            assert same(mine.weight.grad, theirs.weight.grad)
