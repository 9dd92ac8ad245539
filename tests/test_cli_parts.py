"""The parts of the command that need no model: run log, progress, checkpoint notes, signals, schedule of files."""

from __future__ import annotations

import io
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tierzero.checkpoint import randomness
from tierzero.cli import checkpoints, memory
from tierzero.cli.config import load
from tierzero.cli.progress import LiveView, PlainView, QuietView, choose_view
from tierzero.cli.report import Meter, StepReport, clipped_norm
from tierzero.cli.runlog import RunLog, read_metrics
from tierzero.cli.spelling import did_you_mean
from tierzero.cli.stopping import StopSignal
from tierzero.errors import ConfigError
from tierzero.monitoring.clock import PARTS
from tierzero.monitoring.step_stats import LINKS, Mark, between


def report(step: int = 3, loss: float = 2.5) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        grad_norm=4.0,
        grad_norm_clipped=1.0,
        lr=1e-3,
        tokens_per_s=512.0,
        step_s=2.0,
        stalls={"fetch": 0.25, "update": 0.0, "gradient": 0.0},
        bytes={"nvme_read": 4_000_000_000, "nvme_written": 2_000_000_000, "h2d": 1_000_000_000, "d2h": 500_000_000},
        engine=last_step(),
    )


def last_step() -> dict[str, Any]:
    """What stats() says of a step of 2.25 s."""
    busy, zeros = dict.fromkeys((*LINKS, "background"), 0), [0] * len(PARTS)
    counts = dict.fromkeys(("hits", "misses", "prefetched", "prefetch_wasted"), 1)
    before = Mark(0, zeros, busy, dict.fromkeys(LINKS, 0), dict.fromkeys(counts, 0))
    spent = [2_000_000_000, 250_000_000, *zeros[2:]]
    after = Mark(2_250_000_000, spent, busy, dict.fromkeys(LINKS, 7), counts)
    return between(before, after, number=3, skipped=False, device_peak=5).as_dict()


def log_steps(out: Path, steps: range, after: int = 0) -> None:
    log = RunLog(out, after)
    for step in steps:
        log.write(report(step, 0.1 + step / 3).line())
    log.close()


def test_metrics_keep_every_bit_of_the_loss(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 6))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["loss"] for line in lines] == [0.1 + step / 3 for step in range(1, 6)]
    assert set(lines[0]) >= {
        "step",
        "loss",
        "grad_norm",
        "grad_norm_clipped",
        "lr",
        "tokens_per_s",
        "step_s",
        "stalls",
        "bytes",
    }
    assert lines[0]["wall_s"] == 2.25
    assert lines[0]["parts"] == {**dict.fromkeys(PARTS, 0.0), "compute": 2.0, "fetch": 0.25}
    assert lines[0]["io"]["exposed_io_s"] == 0.25
    assert lines[0]["io"]["hit_rate"] == 0.5
    assert lines[0]["busy"] == dict.fromkeys(LINKS, 0.0)


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(report(1).line())
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    log.close()


def test_resuming_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 8))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe garbage\n" + b'{"step": 8, "lo')
    log_steps(tmp_path, range(5, 7), after=4)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    log_steps(tmp_path, range(1, 3))
    (events,) = (tmp_path / "tensorboard").iterdir()
    for tag in (b"train/loss", b"stalls/fetch", b"parts/compute", b"busy/h2d", b"io/hit_rate", b"train/wall_s"):
        assert tag in events.read_bytes(), tag


def test_plain_view_prints_some_steps_with_everything_asked_for() -> None:
    console = Console(file=io.StringIO(), width=80)
    view = PlainView(console, every=5)
    with view.running(0, 12):
        for step in range(1, 13):
            view.step(report(step))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split()[1] for line in text.splitlines()] == ["1/12", "5/12", "10/12", "12/12"]
    for part in (
        "loss 2.5000",
        "norm 4.000 -> 1.000",
        "512 tok/s",
        "read 2.00 write 1.00 H2D 0.50 D2H 0.25",
        "waited: fetch 0.25 s",
    ):
        assert part in text.splitlines()[0]


def test_live_view_shows_the_step_and_rates() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    view = choose_view(console, quiet=False, every=5)
    assert isinstance(view, LiveView)
    with view.running(2, 12):
        view.step(report(3), "saving 43%")
        view.say("hello")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/12" in text
    assert "loss 2.5000" in text
    assert "tok/s" in text
    assert "saving 43%" in text
    assert "hello" in text


def test_quiet_view_says_nothing_but_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO())
    view = choose_view(console, quiet=True, every=5)
    assert isinstance(view, QuietView)
    view.say("x")
    with view.running(0, 1):
        view.step(report(), "saving 43%")
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    view.warn("a save failed")
    assert capsys.readouterr().err == "warning: a save failed\n"


def test_meter_gives_differences() -> None:
    stalls = ("stall_fetch_s", "stall_update_s", "stall_grad_s", "stall_activation_s")
    keys = ("nvme_read", "nvme_written", "h2d", "d2h", *stalls)
    meter = Meter(dict.fromkeys(keys, 10))
    stalls, moved = meter(dict.fromkeys(keys, 13))
    assert set(stalls.values()) == {3.0}
    assert set(moved.values()) == {3}
    assert set(meter(dict.fromkeys(keys, 13))[1].values()) == {0}


def test_clipped_norm() -> None:
    assert clipped_norm(0.5, 1.0) == 0.5
    assert clipped_norm(4.0, 0) == 4.0
    assert abs(clipped_norm(4.0, 1.0) - 1.0) < 1e-6


def test_random_state_goes_through_json() -> None:
    """S15: what draws numbers draws the same ones after a resume."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.random(), np.random.rand(), torch.rand(3)
    state = json.loads(json.dumps(randomness.random_state()))
    expected = random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(4).tolist()
    randomness.set_random_state(state)
    assert (random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(4).tolist()) == expected


def test_another_model_is_refused_and_other_settings_are_told(tmp_path: Path) -> None:
    config = load(None, ["model.preset=tiny"])
    saved = checkpoints.model_identity(config), checkpoints.loop_settings(config)
    other = load(None, ["model.preset=tiny", "tiers.host=64MiB", "train.steps=99"])
    checkpoints.check_same_model(saved[0], other, tmp_path)
    for setting in ("model.layers=3", "train.dtype=float32"):
        with pytest.raises(ConfigError, match=setting.partition("=")[0]):
            checkpoints.check_same_model(saved[0], load(None, ["model.preset=tiny", setting]), tmp_path)
    told = checkpoints.changes(saved[1], load(None, ["model.preset=tiny", "train.steps=99"]))
    assert told[0] == "train.steps 40 -> 99"
    here = checkpoints.model_identity(load(None, [f"model.path={tmp_path}"]))
    (tmp_path / "moved").mkdir()
    there = load(None, [f"model.path={tmp_path / 'moved'}"])
    checkpoints.check_same_model(here, there, tmp_path, moved=True)  # of a portable one the tensors decide
    with pytest.raises(ConfigError, match=r"model\.path is"):
        checkpoints.check_same_model(here, there, tmp_path)
    with pytest.raises(ConfigError, match=r"model\.layers is"):
        checkpoints.check_same_model(here, config, tmp_path, moved=True)


def test_notes_of_snapshots_that_are_gone_are_removed(tmp_path: Path) -> None:
    config = load(None, [f"train.out={tmp_path}"])
    for step in (0, 20):
        checkpoints.write_note(config, "id", step, 2.0)
    (note,) = (tmp_path / "checkpoints").iterdir()
    assert note.name == "step-00000020.json"
    assert json.loads(note.read_text())["step"] == 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_acts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        assert signal.getsignal(number) == before
    assert signal.getsignal(number) == before


def test_spelling() -> None:
    assert did_you_mean("train.stps", ["train.steps", "train.seed"]) == "; did you mean train.steps?"
    assert did_you_mean("quux", ["train.steps"]) == ""
    assert did_you_mean("path", ["model.path", "data.path"]) == "; did you mean model.path or data.path?"


def test_memory_figures() -> None:
    before = memory.resident()
    memory.reset_peak()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert memory.resident_peak() >= before + (32 << 20)
    del block


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    from tierzero.cli.trainer import schedule

    factor = schedule(load(None, ["train.steps=20", "train.warmup=4"]))
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    later = [factor(step) for step in range(4, 21)]
    assert later == sorted(later, reverse=True)
    assert later[0] == 1.0
    assert abs(later[-1] - 0.1) < 1e-12
    assert factor(1000) == later[-1]
    assert schedule(load(None, ["train.steps=3", "train.warmup=0"]))(0) == 1.0


def test_placement_of_the_demo(tmp_path: Path) -> None:
    """Budgets are shares of the model, everything is told, and a drive that is too small is refused."""
    import dataclasses
    import errno

    import tierzero as tz
    from tierzero.cli.placement import check_disk, choose_tiers, print_placement, rows
    from tierzero.cli.task import DecoderTask
    from tierzero.sizes import format_size

    config = load(None, [f"train.out={tmp_path}"])
    task = DecoderTask(config)
    model = task.build()
    tiers = choose_tiers(config, model)
    plan = tz.plan(model, tiers)
    assert plan.params >= 100_000_000
    assert plan.device_needed <= plan.device_budget <= plan.param_bytes / 6
    assert plan.host_needed <= plan.host_budget <= plan.state_bytes / 4
    names = [row[0] for row in rows(config, plan)]
    assert names[:3] == ["parameters", "gradients", "optimizer states"]
    console = Console(file=io.StringIO(), width=100)
    print_placement(console, config, task, plan)
    assert "103,055,872 parameters" in console.file.getvalue()  # type: ignore[attr-defined]
    for activations, share in (("64MiB", 0), ("25%", 0.25)):
        more = choose_tiers(load(None, [f"train.out={tmp_path}", f"tiers.activations={activations}"]), model)
        assert more.activation_bytes() == (int(more.host_bytes() * share) or 64 << 20)
        assert abs(more.host_bytes() - more.activation_bytes() - tiers.host_bytes()) <= tiers.host_bytes() * 1e-5
        beside = tz.plan(model, more)
        assert ("activations", "-", f"up to {format_size(more.activation_bytes())}", "what exceeds it") in rows(
            config, beside
        )
        assert abs(beside.host_needed - beside.activation_bytes - plan.host_needed) <= 1 << 20
    with pytest.raises(ConfigError, match=r"tiers\.activations = '100%' leaves nothing"):
        choose_tiers(load(None, [f"train.out={tmp_path}", "tiers.activations=100%"]), model)
    check_disk(config, plan)
    large = dataclasses.replace(plan, nvme_min=1 << 50, nvme_bytes=3 << 49)
    with pytest.raises(OSError, match=r"needs 1536\.00 TiB \(1024\.00 TiB at least.*\) and the drive has") as raised:
        check_disk(config, large)
    assert raised.value.errno == errno.ENOSPC
    (needed,) = [row for row in rows(config, large) if row[0] == "needed"]
    assert f"needs {needed[3]} " in str(raised.value)  # as the table that a dry run prints
    small = dataclasses.replace(large, disk_free=1 << 20)
    (total,) = [row for row in small.table() if row[0] == "total"]
    assert f"the store needs {total[3]} " in small.why


def test_the_export_takes_room_beside_the_store(tmp_path: Path) -> None:
    """Where both lie on one drive; the room of an earlier export is counted where --overwrite removes that first."""
    import dataclasses
    import shutil

    from drives import memory_drive

    import tierzero as tz
    from tierzero.checkpoint.export import export_needs
    from tierzero.cli.placement import check_disk, choose_tiers
    from tierzero.cli.task import DecoderTask

    with memory_drive(tmp_path / "drive", "size=64m") as drive, memory_drive(tmp_path / "other") as other:
        config = load(None, [f"train.out={drive}", "model.preset=tiny"])
        model = DecoderTask(config).build()
        plan = tz.plan(model, choose_tiers(config, model))
        check_disk(config, plan)
        former = drive / "export" / "model.safetensors"
        former.parent.mkdir()
        former.write_bytes(bytes(8 << 20))
        (drive / "store").mkdir()
        (drive / "store" / "data.bin").write_bytes(bytes(4 << 20))  # of the store itself
        room = shutil.disk_usage(drive).free + (4 << 20)
        large = dataclasses.replace(plan, nvme_min=room - export_needs(plan.param_bytes) // 2)
        with pytest.raises(OSError, match=r"for it beside the export of [0-9.]+ MiB to .*export: free some space"):
            check_disk(config, large)
        check_disk(config, large, overwrite=True)
        check_disk(config, large, exports=False)
        check_disk(load(None, [f"train.out={other}", f"tiers.nvme={drive / 'store'}", "model.preset=tiny"]), large)


def test_what_a_model_makes_up_does_not_steer_the_terminal() -> None:
    from tierzero.cli.summary import printable

    assert printable("def f():\n\tré\x1b[2J\x07") == "def f():\n\tré�[2J�"
