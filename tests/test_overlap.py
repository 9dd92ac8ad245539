"""Updates that begin in backward: whatever a loop does between backward and step, the bits are those of the plain loop,
and no byte of a wrong guess is ever seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed
from models import SHAPES, Net
from oracle import Plain, Tiered, assert_same, batches, collected, loss_of, make, same, tiered, tiers_for, train_both
from test_engine_nonfinite import snapshot_of

import tierzero as tz
from tierzero.api import engine_of
from tierzero.native import NATIVE

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_leaks"),
    pytest.mark.skipif(NATIVE is None, reason="updates begin in backward only with the native extension"),
]

CLIPS: dict[str, Callable[[int, float], float | None]] = {
    "never": lambda step, norm: None,
    "sometimes": lambda step, norm: norm * (0.6 if step % 3 == 1 else 2.0),
    "always": lambda step, norm: 0.3 * norm,
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
DTYPES = pytest.mark.parametrize("dtype", PRECISIONS.values(), ids=PRECISIONS)
PLACEMENTS = ("nvme", "cached")
PLACES = pytest.mark.parametrize("placement", PLACEMENTS)


def tiers_of(model: Any, placement: str, directory: Path) -> tz.Tiers:
    """ "cached": states on the drive, parameters in host memory; else as tiers_for."""
    if placement != "cached":
        return tiers_for(model, placement, directory)
    least = tiers_for(model, "nvme", directory)
    for spare in range(1 << 12, 1 << 20, 1 << 12):
        tiers = tz.Tiers(nvme=directory, host=int(least.host) + spare, device=least.device, compute="cpu")
        plan = tz.plan(model, tiers)
        if plan.param_host and plan.state_nvme and not plan.param_nvme:
            return tiers
    raise AssertionError("no budget holds the parameters and not the states")


def counts(run: Tiered) -> tuple[int, int, int, int]:
    """(guesses begun, right, done again, given up)."""
    stats = tz.stats(run.model)
    return tuple(int(stats[key]) for key in ("guesses", "guesses_right", "guesses_redone", "guesses_dropped"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("shape", "precision", "clip", "accumulate"),
    crossed(["tied", "lora", "block twice", "checkpoint", "odd sizes"], PRECISIONS, CLIPS, two=(1, 3)),
)
def test_parity_of_all_modes(shape: str, precision: str, clip: str, accumulate: int, tmp_path: Path) -> None:
    """In lockstep: eager on the drive and with parameters cached in host memory, auto, deferred."""
    dtype = PRECISIONS[precision]
    plain = Plain(make(SHAPES[shape], dtype))
    from contextlib import ExitStack

    with ExitStack() as stack:
        runs = []
        for placement, mode in (("nvme", "eager"), ("mixed", "eager"), ("nvme", "auto"), ("nvme", "deferred")):
            model = make(SHAPES[shape], dtype)
            name = f"{placement}-{mode}"
            tiers = tiers_of(model, placement, tmp_path / name)
            runs.append((name, stack.enter_context(tiered(model, tiers, overlap=mode))))
        train_both(runs, plain, 6, accumulate=accumulate, clip=CLIPS[clip])
        for name, run in runs:
            assert_same(run, plain, name)
        begun, right, redone, dropped = counts(runs[0][1])
        assert begun == right + redone + dropped > 0
        assert (right > 0) == (clip != "always")
        assert counts(runs[3][1]) == (0, 0, 0, 0)


def pair_of(placement: str, dtype: torch.dtype, directory: Path) -> tuple[Plain, Any]:
    model = make(Net, dtype)
    return Plain(make(Net, dtype)), tiered(model, tiers_of(model, placement, directory), overlap="eager")


def both(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    for each in (plain, run):
        loss_of(each.model, ids).backward()


def step(plain: Plain, run: Tiered) -> None:
    plain.step()
    run.step()
    plain.zero_grad()
    run.zero_grad()


def lower_rate(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    for each in (plain, run):
        each.optimizer.param_groups[0]["lr"] *= 0.5


def evaluate(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    with torch.no_grad():
        assert same(loss_of(plain.model, ids), loss_of(run.model, ids))


def backward_again(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    both(plain, run, ids.flip(1))


def edit_gradients(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    for each in (plain, run):
        for param in each.model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


def replace_gradient(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    for each in (plain, run):
        param = next(iter(each.model.parameters()))
        param.grad = torch.full(param.shape, 0.25, dtype=param.dtype)


def remove_gradient(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    for each in (plain, run):
        next(iter(each.model.parameters())).grad = None


def no_step(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    plain.zero_grad()
    run.zero_grad()
    both(plain, run, ids.flip(1))


def read_everything(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    assert_same(run, plain, "between backward and step", grads=True)


def snapshot(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    tz.snapshot(run.model, run.optimizer, "between")


def load_weights(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    values = {name: value.detach() * 1.5 for name, value in plain.model.state_dict().items()}
    for each in (plain, run):
        each.model.load_state_dict(values)
    with torch.no_grad():
        for param, master in plain.masters.items():
            master.copy_(param)


def edit_master(plain: Plain, run: Tiered, ids: torch.Tensor) -> None:
    """A master that is not what the parameter shows: the parameter must not be made from it."""
    own = dict(run.model.named_parameters())
    for name, param in plain.model.named_parameters():
        state = run.optimizer.state[own[name]]
        if "master" in state:
            with torch.no_grad():
                plain.masters[param].mul_(1.25)
                state["master"].copy_(plain.masters[param])


BETWEEN = {
    work.__name__: work
    for work in (
        lower_rate,
        evaluate,
        backward_again,
        edit_gradients,
        replace_gradient,
        remove_gradient,
        no_step,
        read_everything,
        snapshot,
        load_weights,
        edit_master,
    )
}


@pytest.mark.parametrize(("name", "placement", "precision"), crossed(BETWEEN, PLACEMENTS, two=tuple(PRECISIONS)))
def test_anything_between_backward_and_step(name: str, placement: str, precision: str, tmp_path: Path) -> None:
    between, dtype = BETWEEN[name], PRECISIONS[precision]
    plain, opened = pair_of(placement, dtype, tmp_path)
    with opened as run:
        for number, ids in enumerate(batches(6)):
            both(plain, run, ids)
            if number % 2:
                between(plain, run, ids)
                evaluate(plain, run, ids) if between is edit_master else None
            step(plain, run)
            assert_same(run, plain, f"step {number}") if number == 3 else None
        assert_same(run, plain)
        begun, right, redone, dropped = counts(run)
        assert begun == right + redone + dropped
        assert right > 0


@PLACES
@DTYPES
def test_no_step_at_all(placement: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Backwards whose gradients are thrown away, again and again, then a look at every byte."""
    plain, opened = pair_of(placement, dtype, tmp_path)
    with opened as run:
        train_both([("", run)], plain, 2)
        for ids in batches(4):
            loss_of(run.model, ids).backward()
            run.zero_grad()
            assert same(loss_of(run.model, ids), loss_of(plain.model, ids))
        assert_same(run, plain)
        train_both([("", run)], plain, 2, seed=5)


@DTYPES
def test_no_sync_tells_which_backward_is_the_last(dtype: torch.dtype, tmp_path: Path) -> None:
    """With no_sync around all micro-batches but the last, no guess is in vain from the first step on."""
    plain, opened = pair_of("nvme", dtype, tmp_path)
    with opened as run:
        data = batches(9)
        for _ in range(3):
            with tz.no_sync(run.model):
                for _ in range(2):
                    both(plain, run, next(data))
            both(plain, run, next(data))
            step(plain, run)
        begun, right, redone, dropped = counts(run)
        assert begun == right > 0
        assert redone == dropped == 0
        assert_same(run, plain)


def test_auto_learns_and_unlearns(tmp_path: Path) -> None:
    """Nothing is guessed before a step has held, nor while clipping goes on; guessing comes back afterwards."""
    model = make(Net)
    plain = Plain(make(Net))
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        train_both([("", run)], plain, 1)
        assert counts(run)[0] == 0
        train_both([("", run)], plain, 3)
        right = counts(run)[1]
        assert right > 0
        train_both([("", run)], plain, 8, clip=CLIPS["always"])
        begun = counts(run)[0]
        assert counts(run)[2] > 0
        train_both([("", run)], plain, 4, clip=CLIPS["always"])
        assert counts(run)[0] == begun
        train_both([("", run)], plain, 8)
        assert counts(run)[1] > right
        assert_same(run, plain)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@PLACES
@DTYPES
def test_a_bad_gradient_in_the_last_arriving_unit(
    dtype: torch.dtype, placement: str, value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The guesses of all other units are computed by then: no state byte and no parameter changes (C16)."""
    plain, opened = pair_of(placement, dtype, tmp_path)
    with opened as run:
        train_both([("", run)], plain, 2)
        before = snapshot_of(run)
        first = next(iter(run.model.parameters()))  # the embedding: its gradient comes last
        handle = first.register_hook(lambda grad: torch.full_like(grad, value))
        loss_of(run.model, next(batches(1))).backward()
        handle.remove()
        guesses = [unit.guess for unit in run.engine.units if unit.guess is not None]
        assert guesses
        for guess in guesses:
            run.engine.run(guess.computed.wait())
        tz.clip_grad_norm_(run.model.parameters(), 1.0)
        with caplog.at_level(logging.WARNING, "tierzero"):
            run.optimizer.step()
        assert "is not finite" in caplog.text
        run.zero_grad()
        after = snapshot_of(run)
        assert [key for key in before if not same(before[key], after[key])] == []
        train_both([("", run)], plain, 2)
        assert_same(run, plain)


def test_a_drive_without_room_for_two_versions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said once, at construction; updates wait for their step, and all is exact."""
    from tierzero.storage.store import Store

    reserve = Store.reserve
    asked: list[int] = []

    def small(self: Store, nbytes: int) -> None:
        asked.append(nbytes)
        if len(asked) == 1:
            raise OSError(28, "No space left on device", "data.bin")
        reserve(self, nbytes)

    monkeypatch.setattr(Store, "reserve", small)
    model, plain = make(lambda: Net(6)), Plain(make(lambda: Net(6)))
    with (
        caplog.at_level(logging.WARNING, "tierzero"),
        tiered(model, tiers_for(model, "nvme", tmp_path), overlap="eager") as run,
    ):
        assert "no room for two versions" in caplog.text
        assert len(asked) == 2
        assert asked[1] < asked[0]
        assert not engine_of(model).room.shadows
        train_both([("", run)], plain, 3)
        assert counts(run)[0] == 0
        assert_same(run, plain)


def test_dropping_a_model_while_guesses_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model that is simply dropped, or closed, between backward and step takes everything with it."""
    import weakref

    for close in (False, True):
        model = make(Net)
        tz.offload(model, tiers_for(model, "nvme", tmp_path / str(close)))
        optimizer = tz.AdamW(model.parameters(), overlap="eager")
        loss_of(model, next(batches(1))).backward()
        assert any(unit.guess is not None for unit in engine_of(model).units)
        if close:
            tz.close(model)
        gone = weakref.ref(model)
        del model, optimizer
        assert collected(gone)
    assert capfd.readouterr().err == ""
