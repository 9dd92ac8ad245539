"""The schedule at work: hits where a step is like the last one, and departures that cost time only."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIM, Block, Experts, Net, RandomBranch
from oracle import Plain, Tiered, _arrived, assert_same, batches, loss_of, make, same, tiered, tiers_for
from torch import nn

import tierzero as tz
from tierzero.paging.states import State

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class _Long(torch.autograd.Function):
    """The identity, which takes until all that was to be fetched has arrived, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: Any) -> torch.Tensor:
        ctx.wait = wait
        wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.wait()
        return grad, None


class LongBlock(Block):
    """Computes for as long as the link needs."""

    wait: Any = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(_Long.apply(x, self.wait))


def settle(run: Tiered) -> None:
    """Let everything arrive that is on its way, updates too."""
    tz.synchronize(run.model)
    run.engine.run(_arrived(run.engine.units))


@pytest.mark.parametrize("prefetch", ["auto", 2])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_every_use_is_a_hit_from_the_third_step(placement: str, prefetch: int | str, tmp_path: Path) -> None:
    """A static model whose link is not the bottleneck: nothing is ever waited for, behind a slow link too."""
    model = make(lambda: Net(blocks=8, block=LongBlock))
    least = tiers_for(model, placement, tmp_path, spare=8192)  # two blocks fit
    tiers = tz.Tiers(least.nvme, least.host, least.device, prefetch=prefetch, compute="cpu", link_limit="4MB/s")
    plain = Plain(make(lambda: Net(blocks=8, block=LongBlock)))
    with tiered(model, tiers, overlap="deferred") as run:
        for layer in model.layers:
            layer.wait = lambda: run.engine.run(_arrived(run.engine.units))
        misses = []
        for ids in batches(6):
            expected = loss_of(plain.model, ids)
            expected.backward()
            plain.step()
            plain.zero_grad()
            before = tz.stats(model)["misses"]
            loss = loss_of(model, ids)
            loss.backward()
            assert same(loss, expected)
            misses.append(tz.stats(model)["misses"] - before)
            run.step()
            run.zero_grad()
            settle(run)
        assert misses[2:] == [0] * 4
        assert tz.stats(model)["prefetch_wasted"] == tz.stats(model)["departures"] == 0
        assert tz.stats(model)["prefetched"] > 4 * len(run.engine.units)
        assert_same(run, plain)


class Optional(Net):
    """Leaves its second block out when told."""

    left_out = False

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            h = h if index == 1 and self.left_out else layer(h)
        return h


def test_what_was_prefetched_in_vain_goes_at_the_end_of_the_step(tmp_path: Path) -> None:
    """A branch that is not taken leaves its unit prefetched: it is released at step end and counted (M8)."""
    model = make(Optional)
    with tiered(model, tiers_for(model, "nvme", tmp_path, spare=1 << 20), overlap="deferred") as run:
        for ids in batches(3):
            settle(run)
            loss_of(model, ids).backward()
            run.step()
            run.zero_grad()
        settle(run)
        unit = next(unit for unit in run.engine.units if unit.module is model.layers[1])
        model.left_out = True
        loss_of(model, next(batches(1))).backward()
        assert unit.prefetched
        assert unit.residency is State.READY
        wasted = tz.stats(model)["prefetch_wasted"]
        run.step()
        assert not unit.prefetched
        assert unit.residency is State.REST
        assert tz.stats(model)["prefetch_wasted"] == wasted + 1
        assert tz.stats(model)["departures"] == 2  # in forward and in backward
        run.zero_grad()
        for ids in batches(2):  # recorded anew
            loss_of(model, ids).backward()
            run.step()
            run.zero_grad()
        assert tz.stats(model)["departures"] == 2


class Trouble:
    """A hook for everything, which raises when its count is up."""

    left = 0

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise ValueError("trouble in a hook")


class Wild(RandomBranch):
    """Random blocks, and experts that the batch chooses."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.experts = Experts(5)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        return self.experts(super().body(h))


def hooked(model: nn.Module) -> Trouble:
    """Hooks of the user's on all modules and parameters."""
    trouble = Trouble()
    for module in model.modules():
        module.register_forward_pre_hook(trouble)
        module.register_forward_hook(trouble)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(trouble)
    return trouble


@pytest.mark.parametrize("placement", ["host", "nvme", "mixed"])
def test_two_hundred_wild_steps(placement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Random branches, random experts, exceptions in random hooks (M8, M9): the bits are the plain ones, nothing is
    left in the pools, and no step is worth a warning (M10).
    """
    plain = Plain(make(Wild))
    model = copy.deepcopy(plain.model)
    random = torch.Generator().manual_seed(7)
    caplog.set_level(logging.INFO, logger="tierzero")
    spare = 3 * 4096
    units = [*model.layers, *model.experts.experts, model.embed, model.head]
    with (
        warnings.catch_warnings(),
        tiered(model, tiers_for(model, placement, tmp_path, units, spare=spare), units=units) as run,
    ):
        warnings.simplefilter("error")
        troubles = [hooked(each.model) for each in (plain, run)]
        raised = share = 0
        for step, ids in enumerate(batches(200)):
            count = int(torch.randint(1, 400, (), generator=random)) if step % 4 == 3 else 0
            ends: list[Any] = []
            for each, trouble in zip((plain, run), troubles, strict=True):
                trouble.left = count
                try:
                    loss = loss_of(each.model, ids)
                    loss.backward()
                    ends.append(loss)
                except ValueError as error:
                    ends.append(str(error))
                trouble.left = 0
            assert ends[0] == ends[1] if isinstance(ends[0], str) else same(*ends), f"step {step}"
            raised += isinstance(ends[0], str)
            if step % 5 != 4:  # else the gradients of two steps add up, whatever there is of them
                for each in (plain, run):
                    each.step()
                    each.zero_grad()
            if step == 20:
                share = run.engine.homes.share.left
        assert raised > 10
        assert_same(run, plain)
        settle(run)
        run.check_pools()
        engine, stats = run.engine, tz.stats(model)
        assert engine.homes.share.left == share
        assert not engine.updates._tasks
        assert not len(engine.updates._waiting)
        if engine.io is not None:
            assert not engine.io._waiting
        assert stats["departures"] > 100
        assert 0 < stats["prefetch_wasted"] <= stats["prefetched"]
    assert caplog.records == []


def alternating(run: Tiered, reference: nn.Module) -> Iterator[None]:
    """One training step of `run`, cut at every point where another model may come in between."""
    for ids in batches(4):
        with torch.no_grad():
            goal = reference(ids).softmax(-1)
        yield
        logits = run.model(ids)
        yield
        loss = -(goal * logits.log_softmax(-1)).sum(-1).mean()
        loss.backward()
        yield
        run.step(0.5)
        run.zero_grad()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_policy_and_reference(placement: str, tmp_path: Path) -> None:
    """A frozen reference with tiers of its own beside the policy (M16); a wholly frozen model has no updates at all."""
    policies = [make(Net), make(Net)]
    references = [make(Net, seed=1).requires_grad_(False) for _ in policies]
    plain: Any = Plain(policies[0])
    tiers = tz.Tiers(nvme=tmp_path / "b" if placement == "nvme" else None, host="64MiB", device="1MiB", compute="cpu")
    tz.offload(references[1], tiers)
    with tiered(policies[1], tiers_for(policies[1], placement, tmp_path / "a")) as run:
        both = alternating(plain, references[0]), alternating(run, references[1])
        for _ in zip(*both, strict=True):
            pass
        assert_same(run, plain)
        stats = tz.stats(references[1])
        assert stats["nvme_written"] <= sum(unit.layout.flat_bytes for unit in tz.api.engine_of(references[1]).units)
        assert stats["departures"] == 0
    tz.close(references[1])


class Second(nn.Module):
    """A model of its own around another's blocks."""

    def __init__(self, first: Net) -> None:
        super().__init__()
        self.trunk = first.layers
        self.first = nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.trunk:
            x = layer(x)
        return self.last(x).square().mean()


def test_a_second_model_shares_modules(tmp_path: Path) -> None:
    """The blocks belong to the first one's engine, whoever calls them; forwards and backwards in any order."""
    plain = Plain(make(Net))
    model = copy.deepcopy(plain.model)
    seconds = [make(lambda first=first: Second(first), seed=3) for first in (plain.model, model)]
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        with pytest.raises(tz.TierzeroError, match="a part of it, is offloaded already"):
            tz.offload(seconds[1], tz.Tiers(host="64MiB", device="1MiB", compute="cpu"))
        for step, ids in enumerate(batches(6)):
            x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(step))
            results = []
            for each, second in zip((plain, run), seconds, strict=True):
                value = second(x)
                loss = loss_of(each.model, ids)
                if step % 2:
                    value.backward()
                    loss.backward()
                else:
                    loss.backward()
                    value.backward()
                results.append(torch.stack([value, loss]))
                each.step()
                each.zero_grad()
                second.zero_grad()
            assert same(*results)
        departures = tz.stats(model)["departures"]
        for ids in batches(3):  # alone again: recorded once
            loss_of(model, ids).backward()
            run.step()
            run.zero_grad()
        assert tz.stats(model)["departures"] <= departures + len(model.layers)
        run.model.zero_grad()
