"""Split masters when things go wrong, when somebody writes them, and beside other optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from oracle import Plain, assert_same, batches, loss_of, make, same, tiered, train_both
from test_state_formats import BF16, FORMATS, assert_equal, contents, tiers, train

import tierzero as tz
from tierzero.native import NATIVE
from tierzero.units.records import HostRecord

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_leaks"),
    pytest.mark.skipif(NATIVE is None, reason="split masters need the native extension"),
]


@pytest.mark.parametrize("name", ["split", "split 8bit amsgrad"])
def test_an_update_that_fails_is_done_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native step has overwritten what it could when the drive fails: nothing of it is seen."""
    runs = []
    for fails in (False, True):
        model = make(Net, BF16)
        with tiered(model, tiers(model, "cached", tmp_path / str(fails), name), **FORMATS[name]) as run:
            train(run, 2)
            tz.synchronize(model)
            wait, broken = run.engine.io.wait, [fails]

            async def waits(ticket: Any, wait: Any = wait, broken: list[bool] = broken) -> Any:
                done = await wait(ticket)
                if broken[0] and isinstance(done, tuple) and done != (None, None):  # a state record's sums
                    raise OSError(5, "Input/output error", "data.bin")
                return done

            monkeypatch.setattr(run.engine.io, "wait", waits)
            before = {name: param.read() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
            loss_of(model, next(batches(1, seed=5))).backward()
            run.optimizer.step()
            if fails:
                with pytest.raises(OSError, match="Input/output"):
                    tz.synchronize(model)
                unit = next(unit for unit in run.engine.units if unit.pending is not None)
                record = unit.records["param"]
                assert isinstance(record, HostRecord)
                for unit_name, place in zip(unit.names, unit.layout.places, strict=True):
                    part = record.data[place.offset : place.offset + place.spec.nbytes]
                    assert torch.equal(part, before[unit_name].view(-1).view(torch.uint8))
                broken[0] = False
            tz.synchronize(model)
            run.zero_grad()
            train(run, 2, seed=6)
            runs.append(contents(run))
    assert_equal(*runs)


def test_changes_of_split_parameters(tmp_path: Path) -> None:
    """A value that is written becomes the master whole."""
    plain, model = Plain(make(Net, BF16)), make(Net, BF16)
    with tiered(model, tiers(model, "cached", tmp_path, "split"), master="split") as run:
        train_both([("", run)], plain, 3)
        head, theirs = model.get_submodule("head"), plain.model.get_parameter("head.weight")
        with torch.no_grad():
            value = torch.randn_like(theirs)
            theirs.copy_(value)
            plain.masters[theirs].copy_(value)
            with tz.unsharded(head, write=True):
                head.get_parameter("weight").copy_(value)
        train_both([("", run)], plain, 3, seed=4)
        assert_same(run, plain)


def test_beside_a_wrapped_optimizer(tmp_path: Path) -> None:
    """It steps masters in records of any format, but not split ones."""
    halves = lambda m: (list(m.parameters())[::2], list(m.parameters())[1::2])
    plain, model = Plain(make(Net, BF16)), make(Net, BF16)
    theirs = torch.optim.SGD([plain.masters[p] for p in halves(plain.model)[1]], lr=0.1, momentum=0.9)
    tz.offload(model, tiers(model, "nvme", tmp_path, "8bit"))
    try:
        adam = tz.AdamW(halves(model)[0], lr=0.0, weight_decay=0.0, state_dtype="8bit")
        with pytest.raises(tz.TierzeroError, match="cannot have split masters"):
            tz.AdamW(halves(model)[0], master="split")
        sgd = tz.wrap_optimizer(torch.optim.SGD, halves(model)[1], lr=0.1, momentum=0.9)
        for ids in batches(3):
            for each in (plain.model, model):
                loss_of(each, ids).backward()
            plain.take_grads()
            theirs.step()
            with torch.no_grad():
                for param in plain.params:
                    param.copy_(plain.masters[param])
            adam.step()
            sgd.step()
            plain.zero_grad()
            model.zero_grad()
        assert all(same(a.read(), b) for a, b in zip(model.parameters(), plain.params, strict=True))  # type: ignore[attr-defined]
    finally:
        tz.close(model)
    split = make(Net, BF16)
    with tiered(split, tiers(split, "cached", tmp_path / "b", "split"), master="split"):
        with pytest.raises(tz.TierzeroError, match="masters of this model are split"):
            tz.wrap_optimizer(torch.optim.SGD, split.parameters(), lr=0.1)
