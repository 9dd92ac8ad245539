"""Weights from files into units that have optimizer states: masters follow, moments stay, training goes on exactly."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from oracle import Plain, Tiered, assert_same, batches, make, same, tiered, tiers_for
from pairs import step_both
from safetensors.torch import save_file

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
PLACES = ("nvme", "mixed", "host")
CASES = [(dtype, place, "float32") for dtype in (torch.float32, torch.bfloat16) for place in PLACES]


def values_of(run: Tiered) -> list[torch.Tensor]:
    return [param.read() for param in run.model.parameters()]  # type: ignore[operator]


@pytest.mark.parametrize("part", [1 << 12, 2 << 20])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dtype", "placement", "master"), [*CASES, (torch.bfloat16, "host", "split")])
def test_between_steps(
    dtype: torch.dtype,
    placement: str,
    master: str,
    stored: torch.dtype,
    part: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the plain loop with the same values put into parameters and masters: before the first step, after some,
    and while a snapshot pins what is there, which stays what it was.
    """
    monkeypatch.setattr("tierzero.checkpoint.refill.PART", part)
    plain, model, pinned = Plain(make(models.Tied, dtype)), make(models.Tied, dtype), []
    with tiered(model, tiers_for(model, placement, tmp_path / "store"), master=master) as run:
        for seed in (5, 6, 7):
            if seed == 7 and placement != "host":
                tz.snapshot(run.model, run.optimizer)
                pinned = values_of(run)
            values = {name: value.to(stored) for name, value in make(models.Tied, seed=seed).state_dict().items()}
            save_file({name: one for name, one in values.items() if name != "head.weight"}, tmp_path / "w.safetensors")
            tz.load(run.model, tmp_path / "w.safetensors")
            plain.model.load_state_dict(values)
            with torch.no_grad():
                for param, own in plain.masters.items():
                    own.copy_(param)
            assert_same(run, plain)
            for ids in batches(2, seed):
                step_both(plain, run, ids, 0.5)
            assert_same(run, plain)
        if pinned:
            tz.rollback(run.model, run.optimizer)
            assert all(same(one, other) for one, other in zip(values_of(run), pinned, strict=True))


def test_nothing_goes_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that lie in one run are read once, whole units at a time, also where there are states."""
    from tierzero.tiers.readonly import ReadOnlyFile

    def refused(*_: object) -> None:
        raise AssertionError("a part of its own")

    read, close = [0], ReadOnlyFile.close

    def counted(file: ReadOnlyFile) -> None:
        read[0] += file.bytes_read
        file.bytes_read = 0
        close(file)

    monkeypatch.setattr("tierzero.checkpoint.weights.write_part", refused)
    monkeypatch.setattr(ReadOnlyFile, "close", counted)
    for dtype in (torch.float32, torch.bfloat16):
        layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
        plain = torch.nn.Sequential(*layers).to(dtype)
        values = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
        save_file(values, tmp_path / "w.safetensors")
        tiers = tz.Tiers(nvme=tmp_path / str(dtype), host="64MiB", device="64MiB", compute="cpu")
        with tiered(plain, tiers) as run:
            read[0] = 0
            tz.load(run.model, tmp_path / "w.safetensors")
            assert all(same(one.read(), values[name]) for name, one in run.model.named_parameters())  # type: ignore[operator]
        size = (tmp_path / "w.safetensors").stat().st_size
        assert size * 0.99 < read[0] < size * 1.05
