"""Watching a model train: a step's parts, its trace, the profiler's ranges, Prometheus. None of it changes a bit."""

from __future__ import annotations

import json
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from oracle import Plain, Tiered, assert_same, batches, loss_of, make, tiered, tiers_for, train_both
from test_timeline import crossing
from torch.profiler import ProfilerActivity, profile

import tierzero as tz
from tierzero.errors import ConfigError, TierzeroError
from tierzero.monitoring.clock import PARTS
from tierzero.native import NATIVE

pytestmark = pytest.mark.usefixtures("profiler", "one_thread", "no_leaks")


@pytest.fixture(scope="session")
def profiler() -> None:
    """Its threads are made once and stay."""
    with profile(activities=[ProfilerActivity.CPU]):
        torch.zeros(2).add_(1)


def step(run: Tiered, ids: torch.Tensor, body: Any = loss_of) -> None:
    body(run.model, ids).backward()
    run.step(1.0)
    run.zero_grad()


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("factory", [models.Net, models.Checkpointed, models.Branch])
def test_the_parts_are_the_step(tmp_path: Path, factory: Any, placement: str) -> None:
    """They add up to its wall time; the step says what the totals say."""
    model = make(factory, torch.bfloat16)
    with tiered(model, tiers_for(model, placement, tmp_path)) as run:
        assert tz.stats(model)["last_step"] is None
        before, written = tz.stats(model), 0.0
        for number, ids in enumerate(batches(4), 1):
            step(run, ids)
            now = tz.stats(model)
            found = now["last_step"]
            assert found["number"] == number
            assert set(found["parts_s"]) == set(PARTS)
            assert sum(found["parts_s"].values()) == pytest.approx(found["wall_s"], rel=1e-9)
            assert found["parts_s"]["compute"] > 0
            assert found["parts_s"]["engine"] > 0
            assert found["parts_s"]["d2h"] > 0
            for name in ("hits", "misses"):
                assert found[name] == now[name] - before[name]
            assert found["links"]["d2h"]["bytes"] == now["d2h"] - before["d2h"]
            assert found["links"]["h2d"]["busy_s"] > 0
            assert 0 < found["device_peak"] <= now["device_budget"]
            if placement == "nvme":
                assert found["links"]["nvme_read"]["bytes"] > 0
                assert found["links"]["nvme_read"]["busy_s"] > 0
            written += found["links"]["nvme_written"]["busy_s"]
            before = now
        assert (written > 0) == (placement == "nvme")
        json.dumps(found)


def test_waiting_is_seen(tmp_path: Path) -> None:
    """Every wait of the counters is in the parts of some step, or in saving."""
    model = make(models.Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        waited = {"fetch": 0.0, "update": 0.0, "gradient": 0.0}
        for ids in batches(5):
            step(run, ids)
            found = tz.stats(model)["last_step"]["parts_s"]
            waited = {part: waited[part] + found[part] for part in waited}
        totals = tz.stats(model)
        assert totals["misses"] > 0
        for part in ("fetch", "update"):
            assert waited[part] == pytest.approx(totals[f"stall_{part}_s"], rel=1e-6)
        assert waited["gradient"] >= totals["stall_grad_s"] * (1 - 1e-6)
        tz.snapshot(model, run.optimizer, "s")
        step(run, next(batches(1)))
        assert tz.stats(model)["last_step"]["parts_s"]["save"] > 0


def test_a_skipped_step_and_a_closure(tmp_path: Path) -> None:
    model = make(models.Net)
    with tiered(model, tiers_for(model, "host", tmp_path)) as run:
        ids = next(batches(1))

        def closure() -> torch.Tensor:
            run.zero_grad()
            loss = loss_of(model, ids)
            loss.backward()
            return loss

        run.optimizer.step(closure)
        found = tz.stats(model)["last_step"]
        assert found["parts_s"]["compute"] > found["parts_s"]["save"] == 0
        assert run.engine.metrics.clock.part == 0
        (loss_of(model, ids) * float("nan")).backward()
        run.step()
        assert tz.stats(model)["last_step"]["skipped"]


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("factory", [models.Net, models.Tied, models.Checkpointed, models.LoRA])
def test_trace(tmp_path: Path, factory: Any, placement: str) -> None:
    """Losses stay what they are; the file holds each unit's forward, backward, gradients, fetches and updates; spans
    of a row nest, and the training thread's lie inside the steps.
    """
    plain = Plain(make(factory, torch.bfloat16))
    model = make(factory, torch.bfloat16)
    with tiered(model, tiers_for(model, placement, tmp_path / "store")) as run:
        train_both([("before", run)], plain, 2)
        with tz.trace(model, tmp_path / "trace.json"):
            with pytest.raises(TierzeroError, match="already"), tz.trace(model, tmp_path / "other.json"):
                pass
            train_both([("traced", run)], plain, 3, seed=2, clip=lambda step, norm: norm / 2 if step else None)
            tz.synchronize(model)
        units = [unit.name for unit in run.engine.units]
        trained = {unit.name for unit in run.engine.units if unit.layout.elements}
        grads = {name for unit in run.engine.units for name in unit.names if run.engine.units and unit.layout.elements}
        assert_same(run, plain)
        assert run.engine.metrics.watch is None
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert crossing(events) == []
    spans = [event for event in events if event["ph"] == "X"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    kinds = {kind: {event["name"] for event in spans if event["cat"] == kind} for kind in {e["cat"] for e in spans}}
    assert kinds["forward"] == set(units)
    assert kinds["step"] == {"step 3", "step 4", "step 5"}
    assert {name.removeprefix("fetch ") for name in kinds["fetch"]} <= set(units)
    assert {name.removeprefix("gradient ") for name in kinds["gradient"]} <= grads
    assert kinds["gradient"]
    updated = {name.split(" ", 1)[1] for kind in ("update", "guess") for name in kinds.get(kind, ())}
    assert updated == trained
    if NATIVE is not None:
        assert {name.removeprefix("AdamW ") for name in kinds["AdamW"]} == trained
        assert ("read" in kinds) == ("write" in kinds) == (placement == "nvme")
    assert {"clip", "optimizer step"} <= kinds["optimizer"]
    assert [event["name"] for event in spans if event["cat"] == "pass"].count("backward") == 3
    assert ("recompute" in kinds) == (factory is models.Checkpointed)
    steps = [event for event in spans if event["cat"] == "step"]
    first, last = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    mine = [event for event in spans if rows[event["tid"]] == "training thread" and event["cat"] != "wait"]
    assert all(first <= event["ts"] and event["ts"] + event["dur"] <= last for event in mine)
    for one in steps:
        assert sum(one["args"]["parts_s"].values()) * 1e6 >= one["dur"] * (1 - 1e-6)  # the first one is cut
    assert any(event["ph"] == "C" for event in events)


def test_a_trace_of_a_failing_body(tmp_path: Path) -> None:
    """What was recorded is written, and the engine goes on; a path that cannot be is refused before anything."""
    model = make(models.Net)
    with tiered(model, tiers_for(model, "host", tmp_path)) as run:
        with pytest.raises(IsADirectoryError, match="it is a directory"), tz.trace(model, tmp_path):
            pass
        with pytest.raises(FileNotFoundError, match="not a directory"), tz.trace(model, tmp_path / "no" / "t.json"):
            pass
        ids = next(batches(1))
        with pytest.raises(IndexError), tz.trace(model, tmp_path / "t.json"):
            model(ids + 10 * models.VOCAB)
        assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        step(run, next(batches(1)))


def test_profiler_ranges(tmp_path: Path) -> None:
    """torch.profiler sees units by name, and nothing is left of it afterwards."""
    plain = Plain(make(models.Net))
    model = make(models.Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        train_both([("before", run)], plain, 1)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            train_both([("profiled", run)], plain, 2, seed=3)
        train_both([("after", run)], plain, 1, seed=4)
        assert_same(run, plain)
        assert run.engine.metrics.watch is None
        names = {event.key: event.count for event in found.key_averages() if event.key.startswith("tierzero::")}
        for unit in run.engine.units:
            assert names[f"tierzero::forward {unit.name}"] == 2
            assert names[f"tierzero::backward {unit.name}"] == 2
        assert names["tierzero::forward"] == names["tierzero::backward"] == 2
        assert names["tierzero::optimizer step"] == 2
        assert any(name.startswith("tierzero::wait for ") for name in names)
        assert any(name.startswith("tierzero::gradient ") for name in names)


def test_prometheus(tmp_path: Path) -> None:
    """The endpoint answers on localhost with the engine's numbers, and is gone after close."""
    pytest.importorskip("prometheus_client")
    model = make(models.Net)
    run = Tiered(model, tiers_for(model, "nvme", tmp_path))
    with closing(run.engine):
        step(run, next(batches(1)))
        with closing(tz.serve_metrics(model)) as endpoint:
            with pytest.raises(OSError, match="another port"):
                tz.serve_metrics(model, endpoint.port)
            url = f"http://127.0.0.1:{endpoint.port}/metrics"
            text = urllib.request.urlopen(url, timeout=30).read().decode()
            stats = tz.stats(model)
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            assert float(values["tierzero_steps_total"]) == 1
            assert float(values['tierzero_link_bytes_total{link="d2h"}']) == stats["d2h"]
            assert float(values["tierzero_step_seconds"]) == pytest.approx(stats["last_step"]["wall_s"])
            parts = [float(values[f'tierzero_step_part_seconds{{part="{part}"}}']) for part in PARTS]
            assert sum(parts) == pytest.approx(stats["last_step"]["wall_s"])
            run.engine.close()
            assert "tierzero_" not in urllib.request.urlopen(url, timeout=30).read().decode()
        with pytest.raises(OSError):
            urllib.request.urlopen(url, timeout=5)


def test_prometheus_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    model = make(models.Net)
    with tiered(model, tiers_for(model, "host", tmp_path)), pytest.raises(ConfigError, match="pip install"):
        tz.serve_metrics(model)
