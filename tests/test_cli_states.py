"""`tierzero train` with smaller optimizer states: the options arrive, resume goes on with the same bits."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from cli_process import interrupt, losses, train

from tierzero.native import NATIVE

pytestmark = pytest.mark.skipif(NATIVE is None, reason="smaller states need the extension")


@pytest.mark.parametrize(
    "states",
    [["train.state_dtype=bfloat16"], ["train.state_dtype=8bit", "train.master=split"], ["train.master=split"]],
    ids=" ".join,
)
def test_resumed_in_the_middle(states: list[str], tmp_path: Path) -> None:
    common = ["train.save_every=4", "tiers.host=12MiB"]
    assert train(tmp_path / "straight", *common, *states).returncode == 0
    out = tmp_path / "out"
    code, _, errors = interrupt(out, *common, *states, line="step 6/", signal=signal.SIGKILL)
    assert code == -signal.SIGKILL, errors
    other = train(out, *common, flags=("--resume",))
    assert other.returncode == 1
    assert "state_dtype=" in other.stderr
    done = train(out, *common, *states, flags=("--resume",))
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(tmp_path / "straight")
    for path in (tmp_path / "straight" / "export").glob("*.safetensors"):
        assert (out / "export" / path.name).read_bytes() == path.read_bytes()


def test_they_take_less_room(tmp_path: Path) -> None:
    sizes = []
    for number, states in enumerate([[], ["train.state_dtype=bfloat16"], ["train.state_dtype=8bit"]]):
        done = train(tmp_path / str(number), "train.steps=2", "train.save_every=2", "tiers.host=12MiB", *states)
        assert done.returncode == 0, done.stderr
        sizes.append(json.loads((tmp_path / str(number) / "summary.json").read_text())["nvme_written"])
    assert sizes[0] > sizes[1] > sizes[2]


def test_updates_begun_in_backward_are_told(tmp_path: Path) -> None:
    done = train(tmp_path / "out", "train.overlap=eager", "train.clip=0", "tiers.host=12MiB")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["guesses"] >= summary["guesses_right"] > 0
    assert "updates begun early" in done.stdout


def test_what_is_no_state(tmp_path: Path) -> None:
    done = train(tmp_path / "out", "train.state_dtype=float16")
    assert done.returncode == 2
    assert "state_dtype" in done.stderr
    assert not (tmp_path / "out").exists()
