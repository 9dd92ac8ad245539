"""Signal handlers that raise at random moments: nothing is lost, torn or leaked, and training equals the plain loop."""

from __future__ import annotations

import asyncio
import faulthandler
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from oracle import Plain, Tiered, assert_same, batches, loss_of, same
from pairs import pair

import tierzero as tz

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_leaks"),
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here"),
    # an exception inside another's handling is torch's or Python's to report
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
]


class Alarm(Exception):
    """What most handlers raise: module hooks run for it."""


class Interrupt(BaseException):
    """Passes module hooks by, as KeyboardInterrupt does."""


@pytest.fixture
def raising() -> Iterator[Callable[[type[BaseException]], None]]:
    """Choose what the SIGALRM handler raises."""
    chosen: list[type[BaseException]] = [Alarm]

    def handler(*_: object) -> None:
        raise chosen[0]

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda kind: chosen.__setitem__(0, kind)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(work: Callable[[], Any], delay: float) -> bool:
    """Run `work` with an alarm after `delay` seconds; whether its exception ended it."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (Alarm, Interrupt):
        torch.set_grad_enabled(True)  # torch's own contexts (checkpointing's) may leave it off
        return True
    return False


def step_of(run: Tiered, ids: torch.Tensor) -> None:
    loss_of(run.model, ids).backward()
    run.step(0.5)
    run.zero_grad()


def again(run: Tiered, ids: torch.Tensor, expected: torch.Tensor) -> None:
    """The same step from the start; its loss must be the expected one."""
    run.zero_grad()
    loss = loss_of(run.model, ids)
    assert same(loss, expected)
    loss.backward()
    run.step(0.5)
    run.zero_grad()


def counts(run: Tiered) -> list[list[int]]:
    return [list(unit.steps) for unit in run.engine.units]


def repair(run: Tiered, ids: torch.Tensor, choice: int) -> None:
    """What a user may do next: reset, evaluate, or clear the gradients and start a forward that is then given up."""
    if choice == 0:
        tz.reset(run.model)
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
            assert top[0].__module__ == "torch.utils.checkpoint"  # torch's own, interrupted as it was entered
            torch._C._autograd._pop_saved_tensors_default_hooks()
    elif choice == 1:
        with torch.no_grad():
            loss_of(run.model, ids)
    else:
        run.model.zero_grad()
        loss_of(run.model, ids)
        tz.reset(run.model)


def trial(plain: Plain, run: Tiered, ids: torch.Tensor, delay: float, choice: int) -> bool:
    """One step of both, the offloaded one with an alarm after `delay`; whether it was interrupted."""
    expected = loss_of(plain.model, ids)
    expected.backward()
    before = counts(run)
    cut = interrupted(lambda: step_of(run, ids), delay)
    if cut:
        repair(run, ids, choice)
        if counts(run) == before:
            again(run, ids, expected)
        run.zero_grad()
        # all or none: a step that was taken was taken for every parameter
        assert counts(run) == [[count + 1 for count in unit] for unit in before]
    plain.step(0.5)
    plain.zero_grad()
    run.check_pools()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    return cut


@pytest.mark.parametrize("shape", ["plain", "checkpoint", "checkpoint reentrant", "block twice"])
@pytest.mark.parametrize("placement", ["nvme", "host"])
def test_alarms_at_random_moments(
    placement: str, shape: str, raising: Callable[[type[BaseException]], None], tmp_path: Path
) -> None:
    """Forty alarms per shape and placement, anywhere in forward, backward, clipping, step and zero_grad."""
    rng = random.Random(f"{shape} {placement}")
    with pair(tmp_path, models.SHAPES[shape], placement) as (plain, run):
        data = batches(1000)
        usual = 0.0
        for ids in (next(data), next(data), next(data)):  # torch loads some of its parts in the first steps
            loss_of(plain.model, ids).backward()
            plain.step(0.5)
            plain.zero_grad()
            start = time.perf_counter()
            step_of(run, ids)
            usual = time.perf_counter() - start
        repairs = [0] if "checkpoint" in shape else [0, 1, 2]  # see repair: torch's own hooks may be left
        hits = 0
        for number in range(200):
            raising(rng.choice([Alarm, Interrupt]))
            hits += trial(plain, run, next(data), rng.uniform(1e-5, usual), rng.choice(repairs))
            if number % 20 == 0:
                assert_same(run, plain, f"after trial {number}")
            if hits == 40:
                break
        assert hits > 10


def test_a_long_wait_is_interrupted_and_loses_nothing(
    raising: Callable[[type[BaseException]], None], tmp_path: Path
) -> None:
    """Ctrl-C gets through while the main thread waits for an update on a stuck drive; the update is made all the
    same.
    """
    faulthandler.dump_traceback_later(50, exit=False)
    with pair(tmp_path, placement="nvme") as (plain, run):
        (first, second) = batches(2)
        stuck = threading.Event()
        update = run.engine.streamed.compute

        async def slow(*args: Any) -> Any:
            while not stuck.is_set():
                await asyncio.sleep(0.001)
            return await update(*args)

        run.engine.streamed.compute = slow  # type: ignore[method-assign]
        loss_of(plain.model, first).backward()
        step_of(run, first)
        plain.step(0.5)
        plain.zero_grad()
        for kind in (Interrupt, Alarm):
            raising(kind)
            for wait in (
                lambda: loss_of(run.model, second),
                lambda: tz.synchronize(run.model),
                lambda: run.model.head.weight.clone(),
                lambda: tz.reset(run.model),
            ):
                assert interrupted(wait, 0.05)
        stuck.set()
        expected = loss_of(plain.model, second)
        expected.backward()
        again(run, second, expected)
        plain.step(0.5)
        run.check_pools()
    faulthandler.cancel_dump_traceback_later()
