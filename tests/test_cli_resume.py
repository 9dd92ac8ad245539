"""Interrupted runs go on to the same losses, bit for bit, and leave no stale disk use (N8, S14, S15)."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import CODE, disk_use, interrupt, losses, train, train_arguments

SETTINGS = ["train.steps=10", "train.save_every=3", "train.accumulate=2"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nobody interrupted."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    done = train(out, *SETTINGS)
    assert done.returncode == 0, done.stderr
    return out


def same_end(out: Path, straight: Path) -> None:
    """Losses, weights and sample of two runs are equal, and no more disk is used than a run needs."""
    assert losses(out) == losses(straight)
    for path in (straight / "export").glob("*.safetensors"):
        assert (out / "export" / path.name).read_bytes() == path.read_bytes()
    assert (out / "sample.txt").read_text() == (straight / "sample.txt").read_text()
    # what is current, what the snapshot pins, and what is being written: how much of the last depends on time
    summary = json.loads((straight / "summary.json").read_text())
    assert disk_use(out / "store") <= 3.15 * (summary["state_bytes"] + summary["param_bytes"]) + (1 << 20)
    assert sorted(path.name for path in (out / "store").iterdir()) == sorted(
        path.name for path in (straight / "store").iterdir()
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_saves_and_resumes(number: int, tmp_path: Path, straight: Path) -> None:
    out = tmp_path / "out"
    code, text, errors = interrupt(out, *SETTINGS, line="step 4/", signal=number)
    assert code == 0, errors
    assert "stopped after step" in text
    assert "--resume" in text
    assert "once more: stop at once" in errors
    done_steps = len(losses(out))
    assert 4 <= done_steps < 10
    assert not (out / "summary.json").exists()
    done = train(out, *SETTINGS, flags=("--resume",))
    assert done.returncode == 0, done.stderr
    for part in (f"resumed after step {done_steps} of 10", "scheduler", "random", str(out / "store")):
        assert part in done.stdout
    same_end(out, straight)


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, straight: Path) -> None:
    out = tmp_path / "out"
    moments = [
        "initialising",
        "step 1/",
        *(f"step {step}/" for step in sorted(random.Random(4).sample(range(2, 10), 5))),
    ]
    interrupt(out, *SETTINGS, line=moments[0], signal=signal.SIGKILL)
    flags = ("--overwrite",)  # nothing was saved yet
    for moment in moments[1:]:
        code, _, errors = interrupt(out, *SETTINGS, flags=flags, line=moment, signal=signal.SIGKILL)
        assert code in (-signal.SIGKILL, 0), errors
        flags = ("--resume",)
    done = train(out, *SETTINGS, flags=flags)
    assert done.returncode == 0, done.stderr
    same_end(out, straight)


def test_killed_while_updates_run_in_backward(tmp_path: Path) -> None:
    """Updates that begin in backward, killed inside steps: the end is that of a run whose updates wait."""
    settings = [*SETTINGS, "train.clip=0"]
    waiting, out = tmp_path / "waiting", tmp_path / "out"
    assert train(waiting, *settings, "train.overlap=deferred").returncode == 0
    moments = [f"step {step}/" for step in (1, 4, 5, 8)]
    flags: tuple[str, ...] = ()
    for number, moment in enumerate(moments):
        code, _, errors = interrupt(
            out, *settings, "train.overlap=eager", flags=flags, line=moment, signal=signal.SIGKILL
        )
        assert code == -signal.SIGKILL, errors
        flags = ("--resume",) if number else ("--overwrite",)
    done = train(out, *settings, "train.overlap=eager", flags=flags)
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(waiting)
    for path in (waiting / "export").glob("*.safetensors"):
        assert (out / "export" / path.name).read_bytes() == path.read_bytes()


def test_a_run_that_stopped_before_its_first_checkpoint(tmp_path: Path, straight: Path) -> None:
    out = tmp_path / "out"
    interrupt(out, *SETTINGS, line="initialising", signal=signal.SIGKILL)
    refused = train(out, *SETTINGS, flags=("--resume",))
    if refused.returncode != 0:  # killed before the values were all there
        assert refused.returncode == 2
        assert "--overwrite" in refused.stderr
        assert train(out, *SETTINGS, flags=("--overwrite",)).returncode == 0
    same_end(out, straight)


def test_more_steps_and_other_budgets_are_fine_and_told(tmp_path: Path) -> None:
    """S12: placement follows the configuration, not the checkpoint."""
    out = tmp_path / "out"
    assert train(out, "train.steps=4", "train.warmup=1").returncode == 0
    done = train(out, "train.steps=6", "train.warmup=1", "tiers.host=64MiB", "tiers.device=8MiB", flags=("--resume",))
    assert done.returncode == 0, done.stderr
    assert "resumed after step 4 of 6" in done.stdout
    assert "train.steps 4 -> 6" in done.stdout
    assert len(losses(out)) == 6
    assert json.loads((out / "summary.json").read_text())["steps"] == 6


def test_a_finished_run_resumes_to_its_end(tmp_path: Path, straight: Path) -> None:
    """Killed while it exports: what is left to do is done."""
    out = tmp_path / "out"
    assert train(out, *SETTINGS).returncode == 0
    (out / "summary.json").unlink()
    done = train(out, *SETTINGS, flags=("--resume",))
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "summary.json").read_text())["last_loss"] == losses(straight)[-1]
    same_end(out, straight)


def test_another_model_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train(out, "train.steps=1").returncode == 0
    for setting in ("model.layers=3", "train.dtype=float32", "model.hidden=32"):
        done = train(out, "train.steps=2", setting, flags=("--resume",))
        assert done.returncode == 2
        assert setting.partition("=")[0] in done.stderr
        assert "another model" in done.stderr
    assert train(out, "train.steps=2", flags=("--resume",)).returncode == 0


def test_a_run_never_goes_on_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    """A store that changed hands, by --overwrite from elsewhere or by copying, is not taken for the run's own."""
    first, second = tmp_path / "first", tmp_path / "second"
    shared = f"tiers.nvme={first / 'store'}"
    assert train(first, "train.steps=2").returncode == 0
    before = losses(first)
    refused = train(second, "train.steps=1", shared, flags=("--overwrite",))
    assert refused.returncode == 2
    assert f"the checkpoint of the run in {first}" in refused.stderr
    assert train(second, "train.steps=1").returncode == 0
    mixed = train(first, "train.steps=3", f"tiers.nvme={second / 'store'}", flags=("--resume",))
    assert mixed.returncode == 2
    assert f"is of the run in {second}, and not of the one in {first}" in mixed.stderr
    assert losses(first) == before
    assert train(first, "train.steps=3", flags=("--resume",)).returncode == 0
    moved = tmp_path / "moved"
    first.rename(moved)
    assert train(moved, "train.steps=4", flags=("--resume",)).returncode == 0
    assert losses(moved)[:2] == before
    shutil.rmtree(second, ignore_errors=True)
    assert train(second, "train.steps=1", f"tiers.nvme={moved / 'store'}", flags=("--overwrite",)).returncode == 2
    gone = tmp_path / "gone"
    (moved / "store").rename(gone)
    shutil.rmtree(moved)
    assert train(second, "train.steps=1", f"tiers.nvme={gone}", flags=("--overwrite",)).returncode == 0  # nobody's


def test_an_export_that_fails(tmp_path: Path) -> None:
    """The run is there all the same, and --resume makes up for it."""
    out, settings = tmp_path / "out", ("train.steps=2", "train.warmup=0")
    assert train(out, *settings).returncode == 0
    weights = out / "export" / "model.safetensors"
    weights.write_text("mine")
    (out / "summary.json").unlink()
    done = train(out, *settings, flags=("--resume",))
    assert done.returncode == 1
    assert "warning: the run is done and saved, and its weights are not exported: --resume" in done.stderr
    assert json.loads((out / "summary.json").read_text())["steps"] == 2
    weights.unlink()
    done = train(out, *settings, flags=("--resume",))
    assert done.returncode == 0, done.stderr
    assert weights.stat().st_size > 4


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """`tierzero train | head`: it is said on stderr, and the run can be gone on with."""
    out, settings = tmp_path / "out", ("train.steps=400", "train.warmup=0")
    command = [sys.executable, "-P", "-c", CODE, *train_arguments(out, *settings)]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        assert any(line.startswith("step 2/") for line in output)
    assert process.wait(240) == 1
    said = (tmp_path / "errors").read_text()
    assert said == "warning: nobody reads the output any more, so the run ends: go on with it by --resume\n"
    done = train(out, "train.steps=2", "train.warmup=0", flags=("--resume",))
    assert done.returncode == 0, done.stderr
