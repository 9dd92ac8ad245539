"""`tierzero train` with portable checkpoints: what is refused before anything begins, and what fails on the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_process import saved, tierzero_here, train, train_arguments


@pytest.mark.parametrize(
    ("path", "said", "code"),
    [
        ("{tmp}/file", "{path} is a file", 2),
        ("{tmp}/file/a/b", "{path} lies below {tmp}/file, which is no directory", 2),
        ("{tmp}/nowhere", "{path} is no directory", 2),
        ("{tmp}/nowhere/a", "{path} lies below {tmp}/nowhere, which is no directory", 2),
        ("{tmp}/around", "'{path}' leads around in symbolic links", 2),
        ("/dev/null/a", "{path} lies below /dev/null, which is no directory", 2),
        ("/proc/self/a/b", "{path}, as no directory can be made in /proc/self: ", 1),
        ("/proc/self/task", "{path}, as no directory can be made in /proc/self/task: ", 1),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--overwrite",)])
def test_a_directory_that_cannot_be_made(
    path: str, said: str, code: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Refused before anything begins, in a sentence with the path, and nothing is left of the trial."""
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "around").symlink_to(tmp_path / "around")
    path = path.format(tmp=tmp_path)
    done = train(tmp_path / "out", "checkpoint.every=1", f"checkpoint.path={path}", flags=flags)
    assert done.returncode == code, done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert said.format(tmp=tmp_path, path=path) in errors[0]
    assert "[Errno" not in errors[0]
    assert sorted(os.listdir(tmp_path)) == ["around", "file", "nowhere"]


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    """Also by a user who is not root: run as one where that can be."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    path = tmp_path / "locked" / "saves"
    done = train(tmp_path / "out", "checkpoint.every=1", f"checkpoint.path={path}")
    assert (done.returncode, (tmp_path / "out").exists()) == (1, False)
    assert f"no directory can be made in {path.parent}: Permission denied" in done.stderr


def test_nothing_is_left_of_the_trial(tmp_path: Path) -> None:
    done = train(tmp_path / "out", "checkpoint.every=1", f"checkpoint.path={tmp_path}/a/b", flags=("--dry-run",))
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["checkpoint.keep=2"], "checkpoint.keep has no effect without checkpoint.every"),
        (["checkpoint.path=x"], "checkpoint.path has no effect without checkpoint.every"),
        (["checkpoint.every=0"], "checkpoint.every must be > 0"),
        (["checkpoint.every=1", "checkpoint.keep=-1"], "checkpoint.keep must be >= 0"),
        (["checkpoint.every=1", "checkpoint.limit=fast"], "checkpoint.limit 'fast' is not a rate"),
        (["checkpoint.every=1", "checkpoint.path={tmp}/file"], "{tmp}/file is a file"),
        (["checkpoint.every=1", "checkpoint.path={tmp}/out/store"], "holds other files of the run"),
        (["checkpoint.evry=1"], "did you mean checkpoint.every"),
    ],
)
def test_settings_that_cannot_be(settings: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = train(tmp_path / "out", *(setting.format(tmp=tmp_path) for setting in settings))
    assert done.returncode == 2
    assert said.format(tmp=tmp_path) in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_drive_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything begins."""
    from tierzero.cli import saver

    monkeypatch.setattr(saver, "checkpoint_bytes", lambda model: 1 << 60)
    done = train(tmp_path / "out", "checkpoint.every=1")
    assert done.returncode == 1
    assert str(tmp_path / "out" / "checkpoints") in done.stderr
    assert "checkpoint.path" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_store_that_is_damaged(tmp_path: Path) -> None:
    """The error says from which checkpoint to go on, and the advice works."""
    out, settings = tmp_path / "out", ["train.steps=2", "train.warmup=0", "train.save_every=2", "checkpoint.every=1"]
    assert train(out, *settings).returncode == 0
    manifest = out / "store" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    done = train(out, *settings, flags=("--resume",))
    assert done.returncode == 1
    assert str(manifest) in done.stderr
    advice = ("--overwrite", "--resume-from", str(out / "checkpoints" / "step-00000002"))
    assert " ".join(advice) in done.stderr
    assert train(out, *settings, flags=advice[1:]).returncode == 1
    done = train(out, *settings, flags=advice)
    assert done.returncode == 0, done.stderr
    assert "resumed after step 2 of 2" in done.stdout


def test_a_save_that_fails_ends_nothing(tmp_path: Path) -> None:
    """It is said, and training goes on; after a last one that failed the command says so by its code."""
    out, folder = tmp_path / "out", tmp_path / "saves"
    for step in (2, 4):
        (folder / f"step-{step:08d}").mkdir(parents=True)
        (folder / f"step-{step:08d}" / "mine").touch()
    toml = tmp_path / "run.toml"
    toml.write_text(f'[checkpoint]\nevery = 1\npath = "{folder}"\nkeep = 3\n')
    done = tierzero_here("train", str(toml), "--quiet", *train_arguments(out, "train.steps=4", "train.warmup=0")[1:])
    assert (done.returncode, done.stdout) == (1, "")
    for step in (2, 4):
        assert f"warning: the checkpoint {folder / f'step-{step:08d}'} was not written" in done.stderr
    assert "error: " in done.stderr
    assert saved(folder) == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    told = json.loads((out / "summary.json").read_text())["checkpoints"]
    assert (told["saved"], told["failed"], told["last"]) == (2, 2, str(folder / "step-00000003"))
    assert (out / "export" / "model.safetensors").exists()
