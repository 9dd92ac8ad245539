"""tierzero.AdamW where torch.optim.AdamW is expected: state dicts both ways, hooks, options, copies."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from oracle import HYPER, assert_same, batches, make, same, tiered, tiers_for, train_both
from pairs import in_groups, pair, step_both

import tierzero as tz

pytestmark = pytest.mark.usefixtures("profiled_once", "one_thread", "no_leaks")


@pytest.fixture(scope="session")
def profiled_once() -> None:
    """The profiler's threads stay once they are there."""
    with torch.profiler.profile():
        torch.zeros(1).add(1)


@pytest.mark.parametrize("saved", [False, True], ids=["as it is", "through torch.save"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_into_torch_and_back(dtype: torch.dtype, saved: bool, tmp_path: Path) -> None:
    """torch.optim.AdamW goes on from our state dict with equal steps, and we from its."""
    with pair(tmp_path / "a", dtype=dtype, placement="mixed", groups=in_groups) as (plain, run):
        train_both([("", run)], plain, 3)
        state = run.optimizer.state_dict()
        if saved:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            state = torch.load(io.BytesIO(buffer.getvalue()))
        groups = [
            {**group, "params": [plain.masters[param] for param in group["params"]]} for group in in_groups(plain.model)
        ]
        before = {id(master): dict(plain.optimizer.state[master]) for master in plain.masters.values()}
        plain.optimizer = torch.optim.AdamW(groups, fused=True, **HYPER)
        plain.optimizer.load_state_dict(state)
        for master in plain.masters.values():
            for key, value in before[id(master)].items():
                assert type(plain.optimizer.state[master][key]) is torch.Tensor
                assert same(plain.optimizer.state[master][key], value)
        assert_same(run, plain)
        train_both([("", run)], plain, 2, seed=2)
        fresh = make(Net, dtype)
        with tiered(fresh, tiers_for(fresh, "nvme", tmp_path / "b"), groups=in_groups) as other:
            fresh.load_state_dict(run.model.state_dict())
            state = plain.optimizer.state_dict()
            other.optimizer.load_state_dict(state)
            if dtype == torch.float32:
                assert_same(other, plain)
                train_both([("old", run), ("new", other)], plain, 2, seed=3)


def test_a_state_dict_without_a_parameters_state_resets_it(tmp_path: Path) -> None:
    """As torch's: what was never stepped there starts anew."""
    with pair(tmp_path) as (plain, run):
        fresh = copy.deepcopy(plain.optimizer.state_dict())
        train_both([("", run)], plain, 2)
        for each in (plain, run):
            each.optimizer.load_state_dict(copy.deepcopy(fresh))
        train_both([("", run)], plain, 2)


def test_options(tmp_path: Path) -> None:
    """Those of torch's class are accepted where they change no result, else refused with a sentence."""
    model = make(Net)
    tz.offload(model, tiers_for(model, "nvme", tmp_path))
    try:
        optimizer = tz.AdamW(model.parameters(), foreach=True, fused=False, amsgrad=False, capturable=False)
        torch_keys = set(torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).param_groups[0])
        assert torch_keys <= set(optimizer.param_groups[0])
        for option in ("capturable", "differentiable"):
            with pytest.raises(tz.TierzeroError, match=f"{option}=True is not supported"):
                tz.AdamW(model.parameters(), **{option: True})
            theirs = torch.optim.AdamW([torch.zeros_like(p.read(), requires_grad=True) for p in model.parameters()])
            state = theirs.state_dict()
            state["param_groups"][0][option] = True
            with pytest.raises(tz.TierzeroError, match=f"{option}=True is not supported"):
                optimizer.load_state_dict(state)
            assert not optimizer.param_groups[0][option]
    finally:
        tz.close(model)


def test_hooks(tmp_path: Path) -> None:
    """Of steps and state dicts, and the profiler's ranges."""
    with pair(tmp_path) as (plain, run):
        optimizer, seen = run.optimizer, []
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append("before the step"))
        optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append("after the step"))
        optimizer.register_state_dict_pre_hook(lambda opt: seen.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "note": 1})
        optimizer.register_load_state_dict_pre_hook(lambda opt, state: seen.append(f"loading {state['note']}"))
        optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
        with torch.profiler.profile() as profile:
            step_both(plain, run, next(batches(1)))
        names = {event.key for event in profile.key_averages()}
        assert {"Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"} <= names
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == ["before the step", "after the step", "before saving", "loading 1", "loaded"]


@pytest.mark.parametrize("foreach", [None, True])
def test_zero_grad_to_zeros(foreach: bool | None, tmp_path: Path) -> None:
    """Gradients that are zero are stepped, those that are None are not; a queued step keeps its own."""
    with pair(tmp_path, dtype=torch.bfloat16) as (plain, run):
        run.optimizer.defaults["foreach"] = foreach
        for ids in batches(3):
            for each in (plain, run):
                loss = each.model(ids).float().square().mean()
                loss.backward()
                each.step()
                if each is plain:
                    for param in plain.params:
                        param.grad.zero_()
                else:
                    run.optimizer.zero_grad(set_to_none=False)
                assert not any(param.grad.any() for param in each.model.parameters())
        for each in (plain, run):
            each.step()
            each.zero_grad()


def test_it_says_what_it_is_and_is_not_copied(tmp_path: Path) -> None:
    """repr as torch's; copies and pickles are refused with the way to do it."""
    with pair(tmp_path, groups=in_groups) as (_, run):
        text = repr(run.optimizer)
        assert text.startswith("AdamW (\nParameter Group 0\n    amsgrad: False\n    betas: (0.9, 0.99)\n")
        copying: list[Any] = [copy.deepcopy, copy.copy, pickle.dumps]
        for function in copying:
            with pytest.raises(tz.TierzeroError, match=r"AdamW cannot be copied or pickled.*state_dict\(\)"):
                function(run.optimizer)
