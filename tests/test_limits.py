"""Limits of bytes per second: never faster, through every engine, and nothing else changes."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Plain, assert_same, make, tiered, tiers_for, train_both

import tierzero as tz
from tierzero.api import engine_of
from tierzero.cli.config import load
from tierzero.errors import ConfigError
from tierzero.native import NATIVE
from tierzero.pace import Pacer
from tierzero.sizes import parse_rate
from tierzero.tiers.base import BlockFile, aligned_empty, open_block_file

RATE = 20_000_000
SIZE = 1 << 20
needs_native = pytest.mark.skipif(NATIVE is None, reason="no native extension")


@pytest.fixture(params=["portable", pytest.param("pool", marks=needs_native), pytest.param("auto", marks=needs_native)])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockFile]:
    engine: Any = None
    if request.param != "portable":
        from tierzero.tiers.nvme import NativeEngine

        engine = NativeEngine(kind=request.param, block=1 << 16, limit=RATE)
        assert engine.native.describe()["limit"] == RATE
    opened = open_block_file(str(tmp_path / "file"), engine, limit=RATE)
    opened.preallocate(SIZE)
    yield opened
    opened.close()
    if engine is not None:
        engine.close()


def test_bytes_take_their_time(file: BlockFile) -> None:
    """A megabyte written and one read in sixteen requests at once: at least their bytes over the limit."""
    data, back = aligned_empty(SIZE), aligned_empty(SIZE)
    data.copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8))
    part = SIZE // 16

    async def move() -> float:
        start = time.monotonic()
        await file.write(0, data)
        await asyncio.gather(*(file.read(at, back[at : at + part]) for at in range(0, SIZE, part)))
        return time.monotonic() - start

    assert asyncio.run(move()) >= 2 * SIZE / RATE
    assert torch.equal(data, back)


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=20), st.sampled_from([1e6, 7e5, 1e9]))
def test_a_pacer_holds_its_rate(sizes: list[int], rate: float) -> None:
    async def pass_all() -> float:
        pacer, start = Pacer(rate), time.monotonic()
        await asyncio.gather(*map(pacer.pace, sizes))
        return time.monotonic() - start

    assert asyncio.run(pass_all()) >= sum(sizes) / rate * 0.999999  # the clock is a float


def test_a_cancelled_wait_for_the_limit_leaves_the_buffer_alone(tmp_path: Path) -> None:
    file = open_block_file(str(tmp_path / "file"), limit=1_000_000)
    file.preallocate(SIZE)

    async def cancel() -> None:
        task = asyncio.ensure_future(file.write(0, torch.ones(SIZE, dtype=torch.uint8)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert file.bytes_written == 0
    file.close()


def test_a_limited_run_is_the_plain_one_and_no_faster(tmp_path: Path) -> None:
    """Losses and weights of the plain loop; the drive's bytes and the link's each took their time."""
    model, plain = make(models.Net, torch.bfloat16), Plain(make(models.Net, torch.bfloat16))
    tiers = dataclasses.replace(tiers_for(model, "nvme", tmp_path), nvme_limit="5MB/s", link_limit=1_000_000)
    start = time.monotonic()
    with tiered(model, tiers) as run:
        train_both([("limited", run)], plain, 3, accumulate=2, clip=lambda step, norm: norm / 2)
        tz.synchronize(model)
        taken, stats = time.monotonic() - start, tz.stats(model)
        assert taken >= (stats["nvme_read"] + stats["nvme_written"]) / 5e6
        assert taken >= stats["h2d"] / 1e6
        assert stats["h2d"] > 0
        assert_same(run, plain)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1GB/s", 10**9), (" 1.5 GiB / s", 3 << 29), ("2e6", 2_000_000), (5_000_000, 5_000_000), (1e9, 10**9)],
)
def test_rates(text: int | float | str, rate: int) -> None:
    assert parse_rate(text) == rate
    tiers = tz.Tiers(nvme="x", nvme_limit=text, link_limit=text, compute="cpu")
    tiers.check()
    assert (tiers.drive_limit(), tiers.device_limit()) == (rate, rate)


def test_no_limit_by_default() -> None:
    assert (tz.Tiers().drive_limit(), tz.Tiers().device_limit()) == (0, 0)


@pytest.mark.parametrize("name", ["nvme_limit", "link_limit"])
@pytest.mark.parametrize("value", [0, -1, "fast", "1GB/h", "50%", "999999", True, float("nan"), [], "/s", "1GB/s/s"])
def test_what_is_no_rate_is_a_sentence(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        tz.Tiers(**{name: value, "compute": "cpu"}).check()


def test_the_keys_of_the_configuration() -> None:
    config = load(None, ["tiers.nvme_limit=1GB/s", "tiers.link_limit=2e9"])
    assert (config.tiers.nvme_limit, config.tiers.link_limit) == ("1GB/s", 2e9)
    with pytest.raises(ConfigError, match=r"^tiers\.nvme_limit 'slow' is not a rate"):
        load(None, ["tiers.nvme_limit=slow"])
    with pytest.raises(ConfigError, match=r"^tiers\.link_limit must be at least 1 MB/s, got 5"):
        load(None, ["tiers.link_limit=5"])


def test_the_block_of_the_io(tmp_path: Path) -> None:
    model = make(models.Net)
    tiers = dataclasses.replace(tiers_for(model, "nvme", tmp_path), nvme_block="64KiB")
    tz.offload(model, tiers)
    engine = engine_of(model)
    if engine.io is not None:
        assert engine.io.native.block == 1 << 16
    tz.close(model)


@pytest.mark.parametrize("value", [0, 4095, "1MB", "2GiB", "50%", True, "much"])
def test_what_is_no_block_is_a_sentence(value: Any) -> None:
    with pytest.raises(ConfigError, match="nvme_block"):
        tz.Tiers(nvme_block=value, compute="cpu").check()
    with pytest.raises(ConfigError, match=r"^tiers\.nvme_block "):
        load(None, [f"tiers.nvme_block={value!r}".lower()])
