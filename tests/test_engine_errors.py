"""Exceptions in forward, backward and around the step: nothing is lost, and what follows equals the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Block, Net
from oracle import assert_same, batches, collected, loss_of, make, same, tiers_for, train_both
from pairs import pair
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class Trap(nn.Module):
    """Raises `error` when its countdown reaches zero, in forward or (through a hook) in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_in, self.backward_in = -1, -1
        self.error: type[BaseException] = ValueError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_in -= 1
        if self.forward_in == 0:
            raise self.error("trap in forward")
        if x.requires_grad:
            x.register_hook(self.backwards)
        return x

    def backwards(self, grad: torch.Tensor) -> None:
        self.backward_in -= 1
        if self.backward_in == 0:
            raise self.error("trap in backward")


class TrappedBlock(Block):
    """Has the trap in its middle."""

    trap: Trap

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + self.down(self.trap(F.gelu(self.up(self.trap(self.norm(x))))))


class Trapped(Net):
    """Can fail between and inside of blocks; `layers` under checkpointing if `checkpointed`."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__(block=TrappedBlock)
        self.trap = Trap()
        self.checkpointed = checkpointed
        for layer in self.layers:
            layer.trap = self.trap

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False) if self.checkpointed else layer(h)
            h = self.trap(h)
        return h


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_exceptions_at_every_position(
    checkpointed: bool, where: str, error: type[BaseException], tmp_path: Path
) -> None:
    """An exception anywhere in forward or backward; the gradients so far, and everything after, are the plain loop's
    (N5).
    """
    positions = 9 if not checkpointed else 18
    with pair(tmp_path, lambda: Trapped(checkpointed), "nvme") as (plain, run):
        for position in range(1, positions + 1):
            raised = []
            for each in (plain, run):
                trap: Any = each.model.trap
                trap.error = error
                setattr(trap, f"{where}_in", position)
                try:
                    loss_of(each.model, next(batches(1, seed=position))).backward()
                    raised.append(False)
                except error:
                    raised.append(True)
                trap.forward_in = trap.backward_in = -1
            assert raised[0] == raised[1]
            assert raised[0] or position > 9
            if position % 2:
                tz.reset(run.model)
            elif error is KeyboardInterrupt:  # what it left behind is in other models' way until the next forward
                with torch.no_grad():
                    loss_of(run.model, next(batches(1)))
            if where == "backward":
                assert_same(run, plain, f"position {position}", grads=True)  # what had arrived stays
            if position % 3 == 0:
                plain.zero_grad()
                run.model.zero_grad()
            if position % 4 == 0:
                with torch.no_grad():
                    assert same(loss_of(run.model, next(batches(1))), loss_of(plain.model, next(batches(1))))
            train_both([(f"after position {position}", run)], plain, 1, seed=100 + position)
        run.check_pools()


def test_the_next_forward_repairs_what_an_interrupt_left(tmp_path: Path) -> None:
    """After Ctrl-C no call to reset is needed: the next forward finds stale frames, and saved-tensor hooks do not pile
    up.
    """
    with pair(tmp_path, Trapped) as (plain, run):
        for position in (1, 4, 7):
            run.model.trap.error, run.model.trap.forward_in = KeyboardInterrupt, position
            with pytest.raises(KeyboardInterrupt):
                loss_of(run.model, next(batches(1)))
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        tz.reset(run.model)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        run.model.trap.forward_in = 5
        with pytest.raises(KeyboardInterrupt):
            loss_of(run.model, next(batches(1)))
        train_both([("", run)], plain, 2)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_parameters_are_at_rest_after_an_exception(tmp_path: Path) -> None:
    """After a failed forward or backward the model holds its rest parameters again: zero_grad, state_dict and clipping
    see them.
    """
    with pair(tmp_path, Trapped) as (plain, run):
        at_rest = [id(param) for param in run.model.parameters()]
        for where in ("forward", "backward"):
            setattr(run.model.trap, f"{where}_in", 4)
            run.model.trap.error = ValueError
            with pytest.raises(ValueError, match="trap"):
                loss_of(run.model, next(batches(1))).backward()
            assert [id(param) for param in run.model.parameters()] == at_rest
        run.model.zero_grad()
        assert all(param.grad is None for param in run.model.parameters())
        train_both([("", run)], plain, 1)


def test_a_failed_step_in_a_scheduler_or_closure(tmp_path: Path) -> None:
    """A closure that raises leaves the optimizer as it was."""
    with pair(tmp_path) as (plain, run):

        def closure() -> float:
            loss_of(run.model, next(batches(1))).backward()
            raise ValueError("in the closure")

        with pytest.raises(ValueError, match="in the closure"):
            run.optimizer.step(closure)
        run.zero_grad()
        train_both([("", run)], plain, 2)


def test_dropping_a_model_without_close(tmp_path: Path) -> None:
    """A model that is simply dropped takes its threads and files with it."""
    import weakref

    model = make(Net)
    tz.offload(model, tiers_for(model, "nvme", tmp_path))
    optimizer = tz.AdamW(model.parameters())
    loss_of(model, next(batches(1)))
    loss_of(model, next(batches(1))).backward()
    tz.synchronize(model)
    gone = weakref.ref(model)
    del model, optimizer
    assert collected(gone)
