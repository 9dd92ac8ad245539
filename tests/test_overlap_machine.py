"""Any sequence of backward, step, clip, evaluation, edits, snapshot, rollback and resume against the plain loop."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from models import VOCAB, LoRA, Net, Tied
from oracle import HYPER, Plain, assert_same, loss_of, make, same
from test_overlap import tiers_of

import tierzero as tz
from tierzero.native import NATIVE
from tierzero.optim.base import home_of

MODELS = {"net": Net, "tied": Tied, "lora": LoRA}


class Loop(RuleBasedStateMachine):
    """`plain` and the offloaded `model` do the same; `saved` is what the last snapshot must bring back."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.directory = Path(tempfile.mkdtemp())
        self.model: Any = None
        self.saved: tuple[Plain, dict[str, Any]] | None = None

    @initialize(
        name=st.sampled_from(sorted(MODELS)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        placement=st.sampled_from(["nvme", "cached", "mixed"]),
        mode=st.sampled_from(["eager", "eager", "auto", "deferred"]),
    )
    def begin(self, name: str, dtype: torch.dtype, placement: str, mode: str) -> None:
        self.factory, self.dtype, self.mode = MODELS[name], dtype, mode
        self.plain = Plain(make(self.factory, dtype))
        model = make(self.factory, dtype)
        if placement == "cached" and name == "lora":
            placement = "mixed"
        self.tiers = tiers_of(model, placement, self.directory)
        self.open(model, False)

    def open(self, model: Any, resume: bool) -> None:
        self.model = tz.offload(model, self.tiers, resume=resume)
        self.optimizer = tz.AdamW(self.model.parameters(), **HYPER, overlap=self.mode)

    def ids(self, seed: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(seed))

    @property
    def has_grads(self) -> bool:
        return any(param.grad is not None for param in self.plain.params)

    @rule(seed=st.integers(0, 99), more=st.booleans())
    def backward(self, seed: int, more: bool) -> None:
        ids = self.ids(seed)
        expected = loss_of(self.plain.model, ids)
        expected.backward()
        if more:
            with tz.no_sync(self.model):
                self.own_backward(ids, expected)
        else:
            self.own_backward(ids, expected)

    def own_backward(self, ids: torch.Tensor, expected: torch.Tensor) -> None:
        value = loss_of(self.model, ids)
        assert same(value, expected)
        value.backward()

    @rule(clip=st.sampled_from([None, 0.5, 2.0]), zero=st.booleans())
    def step(self, clip: float | None, zero: bool) -> None:
        limit = None if clip is None or not self.has_grads else clip * self.plain.norm()
        expected = self.plain.step(limit)
        if limit is not None:
            assert same(tz.clip_grad_norm_(self.model.parameters(), limit), expected)
            for param, master in self.plain.masters.items():  # clipping scales what a later backward adds to
                if param.grad is not None and master.grad is not None:
                    param.grad.copy_(master.grad)
        self.optimizer.step()
        if zero or self.dtype is not torch.float32:  # in 16 bits plain PyTorch rounds the scaled gradient, we must not
            self.zero()

    @rule()
    def zero(self) -> None:
        self.plain.zero_grad()
        self.optimizer.zero_grad()

    @rule(seed=st.integers(0, 99))
    def evaluate(self, seed: int) -> None:
        with torch.no_grad():
            assert same(loss_of(self.model, self.ids(seed)), loss_of(self.plain.model, self.ids(seed)))

    @rule(factor=st.sampled_from([0.5, 2.0]))
    def change_rate(self, factor: float) -> None:
        for optimizer in (self.plain.optimizer, self.optimizer):
            optimizer.param_groups[0]["lr"] *= factor

    @precondition(lambda self: self.has_grads)
    @rule(factor=st.sampled_from([0.5, -2.0]), index=st.integers(0, 20))
    def edit_gradient(self, factor: float, index: int) -> None:
        for model in (self.plain.model, self.model):
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            grads[index % len(grads)].mul_(factor)

    @rule()
    def compare(self) -> None:
        assert_same(self, self.plain)  # type: ignore[arg-type]
        own = dict(self.model.named_parameters())
        for name, param in self.plain.model.named_parameters():
            grad = own[name].grad
            assert (grad is None) == (param.grad is None), name
            if grad is not None and param.grad is not None:
                unit, index = home_of(own[name])
                coefficient = unit.coef[index]  # of a clip, which `.grad` does not show before it is written to
                assert same(grad.plain if coefficient == 1.0 else grad.plain * coefficient, param.grad), name

    @rule()
    def snapshot(self) -> None:
        tz.snapshot(self.model, self.optimizer, "saved", {"lr": self.optimizer.param_groups[0]["lr"]})
        kept = copy.deepcopy(self.plain)
        self.saved = kept, {}

    @precondition(lambda self: self.saved is not None)
    @rule()
    def resume(self) -> None:
        assert self.saved is not None
        tz.close(self.model)
        self.plain = copy.deepcopy(self.saved[0])
        self.plain.zero_grad()
        self.open(make(self.factory, self.dtype, seed=9), True)
        meta = tz.restore(self.model, self.optimizer)
        assert meta["lr"] == self.plain.optimizer.param_groups[0]["lr"]

    @precondition(lambda self: self.saved is not None)
    @rule()
    def rollback(self) -> None:
        assert self.saved is not None
        self.plain = copy.deepcopy(self.saved[0])
        self.plain.zero_grad()
        meta = tz.rollback(self.model, self.optimizer)
        assert meta["lr"] == self.plain.optimizer.param_groups[0]["lr"]

    def teardown(self) -> None:
        if self.model is not None:
            try:
                tz.synchronize(self.model)
                assert_same(self, self.plain)  # type: ignore[arg-type]
            finally:
                tz.close(self.model)
                shutil.rmtree(self.directory)


@pytest.mark.skipif(NATIVE is None, reason="updates begin in backward only with the native extension")
class TestLoop(Loop.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
