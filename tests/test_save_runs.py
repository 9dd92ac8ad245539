"""Checkpoints of several runs in one place, and what load() and save() say to mistaken arguments."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from models import Net
from oracle import batches, loss_of, make, tiered, tiers_for

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_keep_counts_the_checkpoints_of_its_own_run(tmp_path: Path) -> None:
    """A run that begins anew in the directory of another deletes nothing there; one that goes on from it does."""
    saves = tmp_path / "saves"
    with tiered(make(Net), tiers_for(make(Net), "host", tmp_path)) as first:
        for step in (1, 2):
            tz.save(first.model, saves / f"a-{step}", first.optimizer, keep=2, wait=True)
    with tiered(make(Net), tiers_for(make(Net), "host", tmp_path)) as other:
        for step in (1, 2, 3):
            tz.save(other.model, saves / f"b-{step}", other.optimizer, keep=2, wait=True)
    assert names(saves) == ["a-1", "a-2", "b-2", "b-3"]
    with tiered(make(Net), tiers_for(make(Net), "host", tmp_path)) as again:
        tz.load(again.model, saves / "a-2", again.optimizer)
        tz.save(again.model, saves / "a-3", again.optimizer, keep=2, wait=True)
    assert names(saves) == ["a-2", "a-3", "b-2", "b-3"]


def test_a_run_that_goes_on_from_a_snapshot_is_the_same(tmp_path: Path) -> None:
    """Its `keep` counts what it saved before."""
    saves, tiers = tmp_path / "saves", tiers_for(make(Net), "nvme", tmp_path / "store")
    with tiered(make(Net), tiers) as first:
        for step in (1, 2):
            tz.save(first.model, saves / f"a-{step}", first.optimizer, keep=2, wait=True)
        tz.snapshot(first.model, first.optimizer)
    model = tz.offload(make(Net), tiers, resume=True)
    optimizer = tz.AdamW(model.parameters())
    tz.restore(model, optimizer)
    tz.save(model, saves / "a-3", optimizer, keep=2, wait=True)
    tz.close(model)
    assert names(saves) == ["a-2", "a-3"]


def test_mistaken_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A path that is not there, the directory above, states that nobody asks for, arguments in another order."""
    with tiered(make(Net), tiers_for(make(Net), "nvme", tmp_path / "store")) as run:
        schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)
        tz.save(run.model, tmp_path / "saves" / "one", run.optimizer, states={"schedule": schedule}, wait=True)
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            tz.load(run.model, tmp_path / "saves" / "two", run.optimizer)
        with pytest.raises(tz.TierzeroError, match="contains some: name one of one"):
            tz.load(run.model, tmp_path / "saves", run.optimizer)
        with caplog.at_level(logging.WARNING, logger="tierzero"):
            tz.load(run.model, tmp_path / "saves" / "one", run.optimizer)
        assert "also has the states schedule" in caplog.text
        with pytest.raises(TypeError, match=r"save\(model, path, optimizer\)"):
            tz.save(run.model, run.optimizer, tmp_path / "two")  # type: ignore[arg-type]
        with pytest.raises(tz.StoreBusyError, match="another model of this process"):
            tz.offload(make(Net), tiers_for(make(Net), "nvme", tmp_path / "store"))
        model = run.model
    with pytest.raises(tz.TierzeroError, match=r"was closed by tierzero\.close"):
        tz.offload(model, tiers_for(make(Net), "nvme", tmp_path / "store"))


def test_going_back_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    """snapshot and rollback are refused in a forward, which goes on."""
    with tiered(make(Net), tiers_for(make(Net), "nvme", tmp_path)) as run:
        tz.snapshot(run.model, run.optimizer)
        said: list[str] = []

        def attempt(*_: object) -> None:
            for action in (tz.snapshot, tz.rollback):
                with pytest.raises(tz.TierzeroError, match="outside of it"):
                    action(run.model, run.optimizer)
                said.append(action.__name__)

        handle = run.model.layers[1].register_forward_hook(attempt)  # type: ignore[union-attr]
        loss_of(run.model, next(batches(1))).backward()
        handle.remove()
        assert said == ["snapshot", "rollback"]
        run.optimizer.zero_grad()
        tz.rollback(run.model, run.optimizer)
        del attempt
