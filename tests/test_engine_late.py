"""A device whose copies take their time: what they bring is used only when it has arrived."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SHAPES
from oracle import Plain, assert_same, make, tiered, tiers_for, train_both

import tierzero as tz
from tierzero import engine
from tierzero.native import NATIVE
from tierzero.paging.transfer import Transfer
from tierzero.units.unit import Unit

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_leaks"),
    pytest.mark.skipif(NATIVE is None, reason="updates begin in backward only with the native extension"),
]


class LateTransfer(Transfer):
    """Gradients arrive when somebody waits for them, as late as can be; until then there is NaN in their place."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.late: dict[int, dict[int, list[Callable[[], Any]]]] = {}  # by unit and place
        self.lock = threading.Lock()

    def take_grad(self, unit: Unit, grad: torch.Tensor, view: torch.Tensor, accumulate: bool) -> None:
        with self.lock:
            waiting = self.late.setdefault(unit.uid, {}).setdefault(view.data_ptr(), [])
            if accumulate and not waiting:
                waiting.append(functools.partial(view.copy_, view.clone()))
            waiting.append(functools.partial(view.add_ if accumulate else view.copy_, grad.clone()))
            if accumulate or len(waiting) == 1:
                view.fill_(float("nan"))
        unit.finish_grads = functools.partial(self.finish, unit)

    def finish(self, unit: Unit) -> None:
        with self.lock, torch.no_grad():
            for copies in self.late.pop(unit.uid, {}).values():
                for copy in copies:
                    copy()

    async def landed(self, unit: Unit) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.finish, unit)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", ["eager", "deferred"])
@pytest.mark.parametrize("shape", ["plain", "tied", "checkpoint"])
def test_nobody_uses_gradients_that_have_not_arrived(
    shape: str, mode: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "make_transfer", lambda device, metrics, staging, limit: LateTransfer(device, metrics))
    plain, model = Plain(make(SHAPES[shape])), make(SHAPES[shape])
    with tiered(model, tiers_for(model, "nvme", tmp_path), overlap=mode) as run:
        train_both(
            [(mode, run)], plain, 5, accumulate=accumulate, clip=lambda step, norm: 2 * norm if step % 2 else None
        )
        assert_same(run, plain)
        assert (tz.stats(model)["guesses_right"] > 0) == (mode == "eager")
