"""Bytes written are counted as they are transferred, and what they mean for the drives is told."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import batches, loss_of, make, tiered, tiers_for
from torch import nn

import tierzero as tz
from tierzero.api import engine_of
from tierzero.cli.config import load
from tierzero.cli.memory import disk_bytes
from tierzero.cli.summary import rows
from tierzero.errors import ConfigError
from tierzero.hardware.endurance import DAY, days_left, per_day, steps_left
from tierzero.native import NATIVE
from tierzero.sizes import format_decimal, parse_size

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


# -- arithmetic --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**17), st.integers(0, 10**15), st.floats(1e-3, 1e9))
def test_days_are_those_that_the_rate_takes(rating: int, written: int, seconds: float) -> None:
    rate, days = per_day(written, seconds), days_left(rating, written, seconds)
    assert days is not None
    if not written:
        assert (rate, days) == (0.0, math.inf)
    elif rating > written:
        assert written + rate * days == pytest.approx(rating)
    else:
        assert days == 0.0
    assert days_left(None, written, seconds) is None


def test_plain_numbers() -> None:
    assert per_day(1e12, DAY) == 1e12
    assert per_day(5, 0.0) == 0.0
    assert days_left(100 * 10**12, 10**12, DAY) == 99.0
    assert steps_left(10**15, 14 * 10**9) == 71_428
    assert steps_left(None, 1) is None
    assert steps_left(10, 0) is None


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1.2PB", 12 * 10**14), ("600TB", 6 * 10**14), ("1PiB", 1 << 50), ("2p", 2 * 10**15)]
)
def test_ratings_as_drives_have_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert tz.Tiers(nvme="x", nvme_tbw=text).rated_bytes() == nbytes


def test_decimal_sizes() -> None:
    assert [format_decimal(n) for n in (999, 1500, 6e14, 1.2e15, 1e18)] == [
        "999 B",
        "1.50 kB",
        "600.00 TB",
        "1.20 PB",
        "1000.00 PB",
    ]


@pytest.mark.parametrize("value", ["lots", "-1TB", 0, "0", "50%", True, math.nan])
def test_a_rating_that_cannot_be(value: object) -> None:
    with pytest.raises(ConfigError, match="nvme_tbw"):
        tz.Tiers(nvme="x", nvme_tbw=value).check()  # type: ignore[arg-type]


# -- what users see ----------------------------------------------------------------------------------------------------


def steps(run: object, count: int, seed: int = 1) -> None:
    for ids in batches(count, seed):
        loss_of(run.model, ids).backward()  # type: ignore[attr-defined]
        run.step()  # type: ignore[attr-defined]
        run.zero_grad()  # type: ignore[attr-defined]


def test_stats_say_how_long_the_drives_last(tmp_path: Path) -> None:
    model = make(models.Net)
    tiers = dataclasses.replace(tiers_for(model, "nvme", tmp_path), nvme_tbw="1GB")
    with tiered(model, tiers) as run:
        steps(run, 2)
        tz.synchronize(model)
        stats = tz.stats(model)
        assert stats["nvme_written"] > 0
        assert stats["nvme_written_per_day"] > stats["nvme_written"]  # the test takes less than a day
        expected = (10**9 - stats["nvme_written"]) / stats["nvme_written_per_day"]
        assert stats["drive_days_left"] == pytest.approx(expected)


def test_without_a_rating_and_without_drives(tmp_path: Path) -> None:
    model = make(models.Net)
    with tiered(model, tiers_for(model, "host", tmp_path)):
        stats = tz.stats(model)
        assert (stats["nvme_written_per_day"], stats["drive_days_left"]) == (0.0, None)
    plan = tz.plan(make(models.Net), tz.Tiers(host="1GiB", device="1GiB", compute="cpu", nvme_tbw="1PB"))
    assert plan.steps_to_tbw is None


def test_a_plan_says_how_many_steps_the_drives_stand(tmp_path: Path) -> None:
    model = make(models.Net)
    tiers = tiers_for(model, "nvme", tmp_path)
    plain, rated = (tz.plan(model, dataclasses.replace(tiers, nvme_tbw=tbw)) for tbw in (None, "1TB"))
    assert plain.steps_to_tbw is None
    assert rated.steps_to_tbw == 10**12 // rated.step_nvme_written
    assert "rating" not in str(plain.table())
    assert ("steps to rating", "-", "-", f"{rated.steps_to_tbw:,}") in rated.table()
    lines = str(rated).splitlines()  # what print() shows
    assert [line.split("  ")[0] for line in lines] == ["", *(row[0] for row in rated.table())]
    assert all(cell in line for line, row in zip(lines[1:], rated.table(), strict=True) for cell in row)


def test_a_plan_writes_what_a_step_writes(tmp_path: Path) -> None:
    model = make(models.Net, torch.bfloat16)
    tiers = tiers_for(model, "nvme", tmp_path)
    step = tz.plan(model, tiers).step_nvme_written
    with tiered(model, tiers) as run:
        steps(run, 1)
        tz.synchronize(model)
        before = run.engine.metrics.nvme_written_expected
        steps(run, 3, seed=2)
        tz.synchronize(model)
        assert run.engine.metrics.nvme_written_expected - before == 3 * step


@pytest.mark.skipif(NATIVE is None, reason="O_DIRECT needs the native extension")
def test_the_counter_is_the_kernels(tmp_path: Path) -> None:
    """Bytes counted as written are those that the kernel has counted, within 2 % (N21)."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(torch.bfloat16)
    tiers = tz.Tiers(nvme=tmp_path, host="48MiB", device="16MiB", compute="cpu")
    tz.offload(model, tiers)
    try:
        optimizer = tz.AdamW(model.parameters())
        engine = engine_of(model)
        if not engine.store.file.direct:  # type: ignore[union-attr]
            pytest.skip("this file system has no O_DIRECT")
        tz.synchronize(model)
        before = disk_bytes()
        if before is None:
            pytest.skip("this kernel does not count")
        start = tz.stats(model)["nvme_written"]
        for _ in range(4):
            model(torch.randn(4, 512, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            tz.snapshot(model, optimizer, "s")
        after = disk_bytes()
        counted = tz.stats(model)["nvme_written"] - start
        assert after is not None
        assert counted > 64 << 20
        assert counted == pytest.approx(after[1] - before[1], rel=0.02)
    finally:
        tz.close(model)


def summary(**values: object) -> dict[str, object]:
    sizes = ("device_peak", "device_budget", "host_peak", "host_budget", "rss_peak", "rss_before", "activation_bytes")
    moved = ("nvme_read", "nvme_written", "nvme_read_expected", "nvme_written_expected")
    base = dict.fromkeys((*sizes, *moved, "seconds", "steps"), 1)
    return {
        **base,
        "first_loss": None,
        "guesses": 0,
        "stall_s": {},
        "checkpoints": None,
        "proc_io_read": None,
        "proc_io_written": None,
        **values,
    }


@pytest.mark.parametrize(
    ("tbw", "days", "text"),
    [
        (None, None, "1.50 TB/day; set tiers.nvme_tbw to see how long the drives last"),
        (12 * 10**14, 799.6, "1.50 TB/day, 800 days to the rated 1.20 PB"),
        (10**15, None, "1.50 TB/day, no wear"),
    ],
)
def test_the_summary_tells_the_wear(tbw: int | None, days: float | None, text: str) -> None:
    found = dict(rows(summary(nvme_written_per_day=1.5e12, nvme_tbw=tbw, drive_days_left=days)))
    assert found["drive wear"] == text


# -- the command's configuration ---------------------------------------------------------------------------------------


def test_several_directories_and_a_rating_in_the_configuration(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    config = load(None, [f'tiers.nvme=["{one}", "{two}"]', 'tiers.nvme_tbw="1.2PB"'])
    assert (config.stores, config.store) == ([one, two], one)
    two.mkdir()
    (two / "manifest.json").touch()
    assert config.store == two
    assert load(None, [f"tiers.nvme={one}"]).stores == [one]
    for setting, sentence in (
        ("tiers.nvme=[]", "tiers.nvme must name at least one directory"),
        ("tiers.nvme=[1]", "tiers.nvme must be a path, got 1"),
        ("tiers.nvme_tbw=0", "tiers.nvme_tbw must be more than zero bytes"),
        ("tiers.nvme_tbw=much", "tiers.nvme_tbw 'much' is not a size"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(None, [setting])
        assert sentence in str(caught.value)
