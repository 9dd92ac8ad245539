"""amsgrad, maximize and plain Adam's L2 through the tiers, bit by bit torch's fused optimizers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from oracle import (
    HYPER,
    PLACEMENTS,
    Plain,
    Tiered,
    assert_same,
    batches,
    loss_of,
    make,
    same,
    tiered,
    tiers_for,
    train_both,
)
from torch import nn

import tierzero as tz
from tierzero.native import NATIVE

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")

FLAGS: dict[str, dict[str, Any]] = {
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "l2": {"decoupled": False},
    "all": {"amsgrad": True, "maximize": True, "decoupled": False},
}
EACH = pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def roomy(model: nn.Module, placement: str, directory: Path, amsgrad: bool = True) -> tz.Tiers:
    """tiers_for with the room that amsgrad takes, as plan's errors name it."""
    tiers = tiers_for(model, placement, directory)
    host = int(tiers.host)
    for _ in range(20):
        tiers = tz.Tiers(nvme=tiers.nvme, host=host, device=tiers.device, compute="cpu")
        try:
            tz.plan(model, tiers, amsgrad=amsgrad)
        except tz.BudgetError as error:
            host = int(str(error).split("at least ")[1].split()[0])
        else:
            return tiers
    raise AssertionError(f"no budget up to {host} bytes works")


def sometimes(step: int, norm: float) -> float | None:
    return norm * (0.6 if step % 3 == 1 else 2.0)


@EACH
@DTYPES
def test_every_placement_and_mode(flags: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """With accumulation and clipping; eager, deferred and auto."""
    plain = Plain(make(Net, dtype), **flags)
    with ExitStack() as stack:
        runs: list[tuple[str, Tiered]] = []
        for placement, mode in (*((p, "auto") for p in PLACEMENTS), ("nvme", "eager"), ("mixed", "deferred")):
            model = make(Net, dtype)
            tiers = roomy(model, placement, tmp_path / f"{placement}-{mode}")
            runs.append((f"{placement} {mode}", stack.enter_context(tiered(model, tiers, overlap=mode, **flags))))
        train_both(runs, plain, 7, accumulate=2, clip=sometimes)
        for name, run in runs:
            assert_same(run, plain, name)
        if NATIVE is not None:
            assert tz.stats(runs[3][1].model)["guesses_right"] > 0


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    state: dict[str, Any] = torch.load(io.BytesIO(buffer.getvalue()))
    return state


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    loss_of(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()


@EACH
def test_state_dicts_of_torch_and_back(flags: dict[str, Any], tmp_path: Path) -> None:
    """Torch's state is taken over, its flags with it, and taken back."""
    options = {key: value for key, value in flags.items() if key != "decoupled"}
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW if "decoupled" not in flags else torch.optim.Adam
    model = make(Net)
    theirs = kind(model.parameters(), fused=True, **HYPER, **options)
    for ids in batches(3):
        step_of(model, theirs, ids)
    ours = copy.deepcopy(model)
    with tiered(ours, roomy(ours, "nvme", tmp_path), amsgrad=flags.get("amsgrad", False)) as run:
        run.optimizer.load_state_dict(saved(theirs))
        for ids in batches(3, seed=4):
            step_of(model, theirs, ids)
            step_of(ours, run.optimizer, ids)
        back = kind(model.parameters(), fused=True, **HYPER, **options)
        back.load_state_dict(saved(run.optimizer))
        for param, mine in zip(model.parameters(), ours.parameters(), strict=True):
            assert same(mine.read(), param)  # type: ignore[attr-defined]
            for name, value in theirs.state[param].items():
                assert same(back.state[param][name], value), name


@DTYPES
@pytest.mark.parametrize(("first", "second"), [("nvme", "mixed"), ("mixed", "host")])
def test_snapshot_and_resume(first: str, second: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """amsgrad's states go on in another placement; another format is refused."""
    flags = FLAGS["all"]
    plain, model = Plain(make(Net, dtype), **flags), make(Net, dtype)
    with tiered(model, roomy(model, first, tmp_path), **flags) as run:
        train_both([("", run)], plain, 3)
        tz.snapshot(run.model, run.optimizer, "three")
    again = make(Net, dtype, seed=5)
    tiers = roomy(again, second, tmp_path)
    if second == "host":  # all in host memory, with the store to resume from
        tiers = tz.Tiers(nvme=tmp_path, host="1GiB", device=tiers.device, compute="cpu")
    tz.offload(again, tiers, resume=True)
    try:
        with pytest.raises(
            tz.TierzeroError, match=r"with amsgrad and cannot have float32 masters and float32 moments as"
        ):
            tz.AdamW(again.parameters())
        optimizer = tz.AdamW(again.parameters(), **{**HYPER, **flags})
        tz.restore(again, optimizer)
        for ids in batches(3, seed=8):
            loss_of(plain.model, ids).backward()
            plain.step()
            plain.zero_grad()
            step_of(again, optimizer, ids)
        for param, mine in zip(plain.params, again.parameters(), strict=True):
            assert same(mine.read(), param)  # type: ignore[attr-defined]
            state = plain.optimizer.state[plain.masters[param]]
            assert same(optimizer.state[mine]["max_exp_avg_sq"].read(), state["max_exp_avg_sq"])
    finally:
        tz.close(again)


def test_flags_by_group_and_in_time(tmp_path: Path) -> None:
    """maximize and the kind of weight decay may differ between groups and change between steps."""
    halves = lambda m: [
        {"params": list(m.parameters())[::2], "maximize": True},
        {"params": list(m.parameters())[1::2], "weight_decay": 0.3},
    ]
    plain, model = Plain(make(Net), halves), make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path), groups=halves, overlap="eager") as run:
        for step in range(4):
            train_both([("", run)], plain, 1, seed=step)
            for each in (plain, run):
                each.optimizer.param_groups[step % 2]["maximize"] ^= True
                each.optimizer.param_groups[1]["decoupled_weight_decay"] ^= True
        assert_same(run, plain)


def test_what_is_refused(tmp_path: Path) -> None:
    """Each with a sentence that says what to do."""
    model = make(Net)
    tiers = tiers_for(model, "host", tmp_path)
    with pytest.raises(tz.BudgetError, match=r"too small for float32 masters and float32 moments with amsgrad"):
        tz.plan(model, tiers, amsgrad=True)
    tz.offload(model, tiers)
    try:
        with pytest.raises(tz.BudgetError, match=r"give at least \d+ bytes .*Tiers\(nvme=DIRECTORY\)"):
            tz.AdamW(model.parameters(), amsgrad=True)
        optimizer = tz.AdamW(list(model.parameters())[:2])
        with pytest.raises(ValueError, match="amsgrad= is one for all groups"):
            optimizer.add_param_group({"params": list(model.parameters())[2:], "amsgrad": True})
        assert len(optimizer.param_groups) == 1
        with pytest.raises(tz.TierzeroError, match="cannot have float32 masters and float32 moments with amsgrad"):
            tz.AdamW(model.parameters(), amsgrad=True)
        theirs = torch.optim.AdamW([nn.Parameter(torch.zeros(1)) for _ in range(2)], amsgrad=True)
        with pytest.raises(ValueError, match="another amsgrad="):
            optimizer.load_state_dict(theirs.state_dict())
    finally:
        tz.close(model)


@EACH
def test_without_the_extension(flags: dict[str, Any], portable: None, tmp_path: Path) -> None:
    """torch's own functions on the portable path."""
    plain, model = Plain(make(Net, torch.bfloat16), **flags), make(Net, torch.bfloat16)
    with tiered(model, roomy(model, "mixed", tmp_path), **flags) as run:
        train_both([("", run)], plain, 3, clip=sometimes)
        assert_same(run, plain)
