"""`tierzero train` over several drives: the same losses, and the wear in the summary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_process import losses, train

from tierzero.native import NATIVE

pytestmark = pytest.mark.skipif(NATIVE is None, reason="stripes need the native extension")


def test_a_run_over_two_drives_and_its_continuation_in_another_order(tmp_path: Path) -> None:
    one, two, out, plain = (tmp_path / name for name in ("one", "two", "out", "plain"))
    rated = ['tiers.nvme_tbw="1PB"']
    done = train(out, "train.steps=6", f'tiers.nvme=["{one}", "{two}"]', *rated)
    assert done.returncode == 0, done.stderr
    assert "TB/day" in done.stdout
    assert "days to the rated 1.00 PB" in done.stdout.replace("\n", " ")
    assert "rating" in done.stdout.partition("\nstep ")[0]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["nvme_tbw"] == 10**15
    assert summary["nvme_written_per_day"] > 0
    assert 0 < summary["drive_days_left"] < 10**15
    assert (one / "manifest.json").exists()
    assert (two / "data.bin").exists()
    refused = train(out, "train.steps=8", f'tiers.nvme=["{one}", "{two}"]')
    assert refused.returncode == 2
    assert "already holds a run" in refused.stderr
    refused = train(out, "train.steps=8", f"tiers.nvme={two}", flags=("--resume",))
    assert refused.returncode != 0
    done = train(out, "train.steps=8", f'tiers.nvme=["{two}", "{one}"]', *rated, flags=("--resume",))
    assert done.returncode == 0, done.stderr
    assert train(plain, "train.steps=6").returncode == 0
    assert losses(out)[:6] == losses(plain)
    assert json.loads((plain / "summary.json").read_text())["drive_days_left"] is None


@pytest.mark.parametrize("away", ["one", "two"])
def test_a_drive_that_is_not_mounted_is_never_a_reason_to_start_anew(tmp_path: Path, away: str) -> None:
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    both = f'tiers.nvme=["{one}", "{two}"]'
    assert train(out, "train.steps=2", both).returncode == 0
    other = two if away == "one" else one
    kept = {path.name: path.read_bytes() for path in other.iterdir()}
    (tmp_path / away).rename(tmp_path / "away")
    for there in (False, True):
        if there:
            (tmp_path / away).mkdir()  # an empty mount point
        for flags in ((), ("--resume",)):
            for listed in (both, f'tiers.nvme=["{two}", "{one}"]', f"tiers.nvme={other}"):
                refused = train(out, "train.steps=3", listed, flags=flags)
                assert refused.returncode in (1, 2)
                assert "overwrite" not in refused.stderr
                assert "mount" in refused.stderr
                assert str(other) in refused.stderr
    assert {path.name: path.read_bytes() for path in other.iterdir()} == kept
    (tmp_path / away).rmdir()
    shutil.move(tmp_path / "away", tmp_path / away)
    assert train(out, "train.steps=3", both, flags=("--resume",)).returncode == 0
    assert len(losses(out)) == 3


def test_a_manifest_that_is_gone_is_missed(tmp_path: Path) -> None:
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    both = f'tiers.nvme=["{one}", "{two}"]'
    assert train(out, "train.steps=2", both).returncode == 0
    (one / "manifest.json").rename(tmp_path / "backup")
    for flags in ((), ("--resume",)):
        refused = train(out, "train.steps=3", both, flags=flags)
        assert refused.returncode == 1
        assert f"{one}/manifest.json is gone. Nothing was deleted: put a copy of it back" in refused.stderr
    (tmp_path / "backup").rename(one / "manifest.json")
    assert train(out, "train.steps=3", both, flags=("--resume",)).returncode == 0
