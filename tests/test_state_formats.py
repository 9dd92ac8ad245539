"""Optimizer states in other dtypes: split masters lose nothing, rounded moments are the same however they move."""

from __future__ import annotations

import io
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, Net
from oracle import HYPER, Plain, Tiered, assert_same, batches, loss_of, make, same, tiered, tiers_for, train_both
from test_overlap import tiers_of
from torch import nn

import tierzero as tz
from tierzero.native import NATIVE
from tierzero.units.layout import CHUNK_MAX
from tierzero.units.state_format import StateFormat, choose_format

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_leaks"),
    pytest.mark.skipif(NATIVE is None, reason="other formats than float32 need the native extension"),
]
FORMATS: dict[str, dict[str, Any]] = {
    "split": {"master": "split"},
    "split amsgrad": {"master": "split", "amsgrad": True},
    "bf16": {"state_dtype": torch.bfloat16},
    "8bit": {"state_dtype": "8bit"},
    "split 8bit amsgrad": {"master": "split", "state_dtype": torch.uint8, "amsgrad": True},
}
EXACT = ("split", "split amsgrad")
EACH = pytest.mark.parametrize("name", FORMATS)
BF16 = torch.bfloat16


def tiers(model: nn.Module, placement: str, directory: Path, name: str, units: Any = None) -> tz.Tiers:
    """As test_overlap's tiers_of ("cached": parameters in host memory, states on the drive), with room for the format;
    "host" has the store too.
    """
    least = "nvme" if placement == "host" else placement
    chosen = tiers_of(model, least, directory) if units is None else tiers_for(model, least, directory, units)
    if placement == "host":
        return tz.Tiers(nvme=directory, host="1GiB", device=chosen.device, compute="cpu")
    for _ in range(20):
        try:
            tz.plan(model, chosen, units=units, **FORMATS[name])
        except tz.BudgetError as error:
            host = int(str(error).split("at least ")[1].split()[0])
            chosen = tz.Tiers(nvme=directory, host=host, device=chosen.device, compute="cpu")
        else:
            return chosen
    raise AssertionError("no budget works")


def masters(run: Tiered) -> set[str]:
    return {unit.state.format.master for unit in run.engine.units if unit.state is not None}


def oracle_flags(name: str) -> dict[str, Any]:
    return {"amsgrad": FORMATS[name].get("amsgrad", False)}


def clip(step: int, norm: float) -> float | None:
    return norm * (0.6 if step % 3 == 1 else 2.0)


def test_sizes_mirror_the_extension() -> None:
    for options in FORMATS.values():
        chosen = choose_format(
            options.get("state_dtype", torch.float32),
            options.get("master", "float32"),
            options.get("amsgrad", False),
            native=True,
        )
        for elements in (1024, 3072, 10 * 1024, 97 * 1024):
            for chunk in (2048, 6144, CHUNK_MAX):
                assert chosen.record_bytes(elements, chunk) == NATIVE.state_bytes(chosen.native, elements, chunk)  # type: ignore[union-attr]
    assert StateFormat("split").record_bytes(CHUNK_MAX, CHUNK_MAX) == 10 * CHUNK_MAX
    assert StateFormat("f32", "u8").record_bytes(CHUNK_MAX, CHUNK_MAX) / CHUNK_MAX < 6.04
    assert StateFormat("split", "u8").record_bytes(CHUNK_MAX, CHUNK_MAX) / CHUNK_MAX < 4.2


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_split_masters_lose_nothing(name: str, accumulate: int, tmp_path: Path) -> None:
    """Masters, moments and parameters as in the plain loop, wherever the parameters lie."""
    plain = Plain(make(Net, BF16), **oracle_flags(name))
    with ExitStack() as stack:
        runs: list[tuple[str, Tiered]] = []
        for placement, mode in (("host", "auto"), ("cached", "eager"), ("cached", "deferred"), ("nvme", "eager")):
            model = make(Net, BF16)
            where = tiers(model, placement, tmp_path / f"{placement}-{mode}", name)
            run = stack.enter_context(tiered(model, where, overlap=mode, **FORMATS[name]))
            runs.append((f"{placement} {mode}", run))
        train_both(runs, plain, 7, accumulate=accumulate, clip=clip)
        for label, run in runs:
            assert_same(run, plain, label)
        assert masters(runs[0][1]) == masters(runs[1][1]) == {"split"}
        assert tz.stats(runs[1][1].model)["guesses"] == 0  # the high halves are nowhere else


def test_split_bytes_per_step(tmp_path: Path) -> None:
    """What the plan says moves: ten bytes an element each way."""
    model = make(Net, BF16)
    where = tiers(model, "cached", tmp_path, "split")
    plan = tz.plan(model, where, master="split")
    assert plan.state_bytes == 10 * plan.trainable
    with tiered(model, where, master="split") as run:
        for step, ids in enumerate(batches(3)):
            before = tz.stats(model)
            loss_of(model, ids).backward()
            run.optimizer.step()
            run.zero_grad()
            tz.synchronize(model)
            after = tz.stats(model)
            if step:
                assert after["nvme_read"] - before["nvme_read"] == plan.step_nvme_read == plan.state_nvme
                assert after["nvme_written"] - before["nvme_written"] == plan.step_nvme_written
        elements = sum(unit.layout.elements for unit in run.engine.units)
        assert 10 * elements <= plan.state_nvme < 12 * elements + 4096 * len(run.engine.units)


class MixedBlock(Block):
    """bfloat16 with a float32 norm."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(torch.relu(self.up(self.norm(x.float()).to(x.dtype))))
        return inner


def mixed() -> nn.Module:
    model = make(lambda: Net(block=MixedBlock), BF16)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.norm.float()
    return model


def test_units_with_other_parameters_keep_float32_masters(tmp_path: Path) -> None:
    plain, model = Plain(mixed()), mixed()
    with tiered(model, tiers(model, "cached", tmp_path, "split"), master="split") as run:
        train_both([("", run)], plain, 4, clip=clip)
        assert_same(run, plain)
        assert masters(run) == {"split", "f32"}


def train(run: Tiered, steps: int, seed: int = 1) -> None:
    for ids in batches(steps, seed):
        loss_of(run.model, ids).backward()
        tz.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.zero_grad()


def contents(run: Tiered) -> dict[str, torch.Tensor]:
    """Everything that training goes on from, decoded."""
    found = {}
    for name, param in run.model.named_parameters():
        found[name] = param.read()  # type: ignore[attr-defined]
        for key, value in run.optimizer.state[param].items():
            found[f"{name} {key}"] = value.clone() if key == "step" else value.read()
    return found


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not same(a[name], b[name])] == []


@EACH
def test_the_same_bits_wherever_it_runs(name: str, tmp_path: Path) -> None:
    """Placements, eager and deferred, units cut differently; only the seed makes a difference."""
    results = []
    leaves = lambda model: [module for module in model.modules() if not list(module.children())]
    cases = [("host", "auto", None), ("cached", "eager", None), ("nvme", "eager", None), ("nvme", "deferred", leaves)]
    for index, (placement, mode, cut) in enumerate(cases):
        model = make(Net, BF16)
        units = cut(model) if cut is not None else None
        where = tiers(model, placement, tmp_path / str(index), name, units)
        with tiered(model, where, units=units, overlap=mode, seed=3, **FORMATS[name]) as run:
            train(run, 6)
            results.append(contents(run))
    for result in results[1:]:
        assert_equal(results[0], result)
    model = make(Net, BF16)
    with tiered(model, tiers(model, "host", tmp_path / "seed", name), seed=4, **FORMATS[name]) as run:
        train(run, 6)
        other = contents(run)
    assert (name in EXACT) == all(same(results[0][key], other[key]) for key in other)


@pytest.mark.parametrize("name", ["bf16", "8bit"])
def test_rounded_moments_train_as_well(name: str, tmp_path: Path) -> None:
    plain, model = Plain(make(Net)), make(Net)
    start = [param.detach().clone() for param in plain.params]
    with tiered(model, tiers(model, "nvme", tmp_path, name), **FORMATS[name]) as run:
        for ids in batches(40):
            for each in (plain, run):
                loss_of(each.model, ids).backward()
                each.step()
                each.zero_grad()
        moved = torch.cat([(p.detach() - s).flatten() for p, s in zip(plain.params, start, strict=True)])
        theirs = zip(run.model.parameters(), plain.params, strict=True)
        apart = torch.cat([(mine.read() - p.detach()).flatten() for mine, p in theirs])  # type: ignore[attr-defined]
        assert 0 < apart.norm() < 0.2 * moved.norm()


@EACH
def test_state_dict_round_trip(name: str, tmp_path: Path) -> None:
    """Saved, loaded into a fresh model elsewhere, and trained on: the same bits."""
    model, fresh = make(Net, BF16), make(Net, BF16, seed=9)
    with (
        tiered(model, tiers(model, "cached", tmp_path / "a", name), **FORMATS[name]) as run,
        tiered(fresh, tiers(fresh, "nvme", tmp_path / "b", name), **FORMATS[name]) as other,
    ):
        train(run, 3)
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": run.optimizer.state_dict()}, buffer)
        saved = torch.load(io.BytesIO(buffer.getvalue()))
        fresh.load_state_dict(saved["model"])
        other.optimizer.load_state_dict(saved["optimizer"])
        assert_equal(contents(run), contents(other))
        model.load_state_dict(saved["model"])  # into split masters: their low halves go
        run.optimizer.load_state_dict(saved["optimizer"])  # and come back
        for each in (run, other):
            train(each, 3, seed=5)
        assert_equal(contents(run), contents(other))


@EACH
@pytest.mark.parametrize(("first", "second"), [("cached", "nvme"), ("nvme", "host")])
def test_snapshot_and_resume(name: str, first: str, second: str, tmp_path: Path) -> None:
    """Under another budget, where masters may have to be split or joined."""
    model = make(Net, BF16)
    with tiered(model, tiers(model, first, tmp_path, name), **FORMATS[name]) as run:
        train(run, 3)
        tz.snapshot(run.model, run.optimizer, "three")
        train(run, 3, seed=5)
        expected = contents(run)
    with again(tmp_path, second, name) as run:
        train(run, 3, seed=5)
        assert_equal(contents(run), expected)
        if "split" in name:
            cached = run.engine.placement.param_host
            assert masters(run) == {"split" if there else "f32" for there in cached}
            assert name != "split" or masters(run) == {"f32" if second == "nvme" else "split"}


@contextmanager
def again(directory: Path, placement: str, name: str) -> Any:
    """A Tiered over the snapshot in `directory`."""
    model = make(Net, BF16, seed=7)
    tz.offload(model, tiers(model, placement, directory, name), resume=True)
    run = Tiered.__new__(Tiered)
    run.model, run.engine = model, tz.api.engine_of(model)
    try:
        run.optimizer = tz.AdamW(model.parameters(), **HYPER, **FORMATS[name])
        tz.restore(model, run.optimizer)
        yield run
    finally:
        tz.close(model)


def test_what_is_refused(tmp_path: Path) -> None:
    model = make(Net, BF16)
    where = tiers_of(model, "cached", tmp_path)
    with tiered(model, tiers(model, "cached", tmp_path / "a", "8bit"), **FORMATS["8bit"]) as run:
        with pytest.raises(tz.TierzeroError, match=r"8-bit moments and cannot have split masters and float32 moments"):
            tz.AdamW(run.model.parameters(), master="split")
    for options, sentence in (({"state_dtype": torch.float64}, "state_dtype="), ({"master": "bf16"}, "master=")):
        with pytest.raises(ValueError, match=sentence):
            tz.AdamW([nn.Parameter(torch.zeros(1))], **options)
    with pytest.raises(tz.TierzeroError, match="native extension, which is not there"):
        choose_format("8bit", "float32", False, native=False)
    with pytest.raises(tz.BudgetError, match=r"split masters and float32 moments: give at least \d+ bytes"):
        tz.plan(make(Net, BF16), where, master="split")
