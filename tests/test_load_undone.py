"""What a load that fails or is interrupted leaves to others: graphs made before, updates and saves that go on, other
optimizers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net, Odd, Tied
from oracle import Tiered, batches, loss_of, make, same, tiered, tiers_for
from other_optimizers import PlainOther, TieredOther
from saves import step, weights
from test_save_optimizers import assert_equal, bits

import tierzero as tz
from tierzero.checkpoint.frozen import freeze
from tierzero.checkpoint.index import read_index
from tierzero.checkpoint.reader import Reader
from tierzero.checkpoint.take import Units

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
BIG = tz.Tiers(host="1GiB", device="1GiB", compute="cpu")
BF16 = torch.bfloat16
LAST = "optimizer.state.embed.weight.exp_avg_sq"


def saved(folder: Path, dtype: torch.dtype, *, damaged: bool) -> Path:
    """A checkpoint of Tied with other values, in whose moments a byte may be wrong."""
    with tiered(make(Tied, dtype, seed=8), BIG) as run:
        step(run, batches(2))
        tz.save(run.model, folder, run.optimizer, wait=True)
    if damaged:
        data = folder / "__0_0.distcp"
        raw, at = bytearray(data.read_bytes()), read_index(folder).tensors[LAST].pieces[0].at
        raw[at] ^= 1
        data.write_bytes(raw)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("placement", ["nvme", "mixed", "host"])
@pytest.mark.parametrize("steps", [0, 1])
def test_graphs_made_before(steps: int, dtype: torch.dtype, placement: str, tmp_path: Path) -> None:
    """A backward goes on through a graph that a load, which failed, came after."""
    folder, model = saved(tmp_path / "save", dtype, damaged=True), make(Tied, dtype)
    found = []
    with tiered(model, tiers_for(model, placement, tmp_path / "store")) as run, tiered(make(Tied, dtype), BIG) as plain:
        for each in (run, plain):
            data = batches(6)
            for _ in range(steps):
                step(each, data)
            loss = loss_of(each.model, next(data))
            if each is run:
                with pytest.raises(tz.StoreCorruptError, match="exp_avg_sq"):
                    tz.load(run.model, folder, run.optimizer)
            loss.backward()
            each.step()
            each.zero_grad()
            step(each, data)
            found.append(bits(each))
    assert_equal(*found)


def when_wanted(run: Tiered, then: Callable[[], None]) -> threading.Thread:
    """Calls `then` in a thread once somebody waits for a save."""
    gates = [unit.gate for unit in run.engine.units]

    def watch() -> None:
        while not any(gate.wanted for gate in gates):
            time.sleep(0.001)
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("store", [False, True])
def test_interrupted_as_it_waits_for_a_save(store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was about to overwrite stays, also when the save is over."""
    folder = saved(tmp_path / "save", torch.float32, damaged=False)
    tiers = tz.Tiers(nvme=tmp_path / "store", host="1GiB", device="1GiB", compute="cpu") if store else BIG
    with tiered(make(Tied), tiers) as run:
        before, frozen = bits(run), freeze(run.engine)

        discard, given_up = Units.discard, threading.Event()

        def discarded(units: Units) -> None:
            given_up.set()
            discard(units)

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            given_up.wait(60)
            time.sleep(0.1)  # in which a load that does not wait for the save would go on to its end
            frozen.release()

        close = Reader.close

        def closed_late(reader: Reader) -> None:
            run.engine.loop.do(lambda: None)
            close(reader)

        monkeypatch.setattr(Units, "discard", discarded)
        monkeypatch.setattr(Reader, "close", closed_late)
        thread = when_wanted(run, interrupt)
        with pytest.raises(KeyboardInterrupt):
            tz.load(run.model, folder, run.optimizer)
        thread.join()
        run.engine.pager.synchronize()
        assert_equal(bits(run), before)
        tz.load(run.model, folder, run.optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_an_update_that_is_queued(dtype: torch.dtype, tmp_path: Path) -> None:
    """States that lie in host memory while the parameters do not are no more as they were made."""
    folder = saved(tmp_path / "save", dtype, damaged=True)
    tiers = tz.Tiers(nvme=tmp_path / "store", host="1GiB", device="1GiB", compute="cpu")
    with tiered(make(Tied, dtype), tiers) as run, tiered(make(Tied, dtype), BIG) as plain:
        for unit in run.engine.units:
            run.engine.pager.at_rest(unit, run.engine.homes.move_out(unit), writes=True)
        for each in (run, plain):
            loss_of(each.model, next(batches(1))).backward()
        frozen = freeze(run.engine, gradients=False)
        for each in (run, plain):
            each.step()
            each.zero_grad()
        thread = threading.Timer(0.3, frozen.release)  # the load has looked at the states before
        thread.start()
        with pytest.raises(tz.StoreCorruptError, match="exp_avg_sq"):
            tz.load(run.model, folder, run.optimizer)
        thread.join()
        assert_equal(bits(run), bits(plain))


def halves(model: Any) -> list[Any]:
    params = list(model.parameters())
    return [tz.AdamW(params[:4], lr=0.01), tz.AdamW(params[4:], lr=0.02)]


def test_hyper_parameters_of_the_second_optimizer(tmp_path: Path) -> None:
    """Where they do not fit, those of the first are as they were too."""
    model = tz.offload(make(Net), BIG)
    pair = halves(model)
    pair[0].param_groups[0]["lr"], pair[1].param_groups[0]["lr"] = 0.5, -1.0
    tz.save(model, tmp_path / "save", pair, wait=True)
    tz.close(model)
    model = tz.offload(make(Net, seed=4), BIG)
    pair, before = halves(model), weights(model)
    groups = [dict(one.param_groups[0]) for one in pair]
    with pytest.raises(tz.ConfigError, match="lr must be zero or more"):
        tz.load(model, tmp_path / "save", pair)
    assert [one.param_groups[0] for one in pair] == groups
    assert all(same(value, before[name]) for name, value in weights(model).items())
    tz.close(model)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("steps", [0, 1])
def test_adamw_beside_another_optimizer(steps: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """One that has yet to step gets no states from AdamW's records, and begins as it would have."""

    def build(seed: int) -> tuple[Any, list[Any]]:
        model = tz.offload(make(Net, dtype, seed), BIG)
        params = list(model.parameters())
        return model, [tz.AdamW(params[:8]), tz.wrap_optimizer(torch.optim.Adam, params[8:], lr=0.01)]

    def train(model: Any, optimizers: list[Any], data: Any) -> None:
        loss_of(model, next(data)).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        model.zero_grad()

    ends, (model, pair) = [], build(0)
    for _ in range(steps):
        train(model, pair, batches(1))
    tz.save(model, tmp_path / "save", pair, wait=True)
    keys = [key for key in read_index(tmp_path / "save").tensors if "head.weight" in key]
    assert any("exp_avg" in key for key in keys) == (steps > 0)
    train(model, pair, batches(1, 2))
    ends.append(weights(model))
    tz.close(model)
    model, pair = build(5)
    tz.load(model, tmp_path / "save", pair)
    train(model, pair, batches(1, 2))
    ends.append(weights(model))
    tz.close(model)
    assert all(same(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("store", [False, True])
def test_scalars_under_other_optimizers(store: bool, tmp_path: Path) -> None:
    """Parameters without dimensions have float32 masters as well, which are saved and loaded."""
    nvme = tmp_path / "store" if store else None
    tiers = tz.Tiers(nvme=nvme, host="64MiB", device="64MiB", compute="cpu")
    hyper = {"lr": 0.1, "momentum": 0.9}
    plain, run = (
        PlainOther(make(Odd, BF16), torch.optim.SGD, **hyper),
        TieredOther(make(Odd, BF16), tiers, torch.optim.SGD, **hyper),
    )
    data, own = batches(8), batches(8)
    for turn in range(4):
        for each, ids in ((plain, next(data)), (run, next(own))):
            loss_of(each.model, ids).backward()
            each.step()
            each.zero_grad()
        if turn == 1:
            tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
            then = bits(run)
    end, expected = weights(run.model), dict(plain.model.named_parameters())
    assert all(same(end[name], value) for name, value in expected.items())
    tz.load(run.model, tmp_path / "save", run.optimizer)
    assert_equal(bits(run), then)
    tz.close(run.model)
