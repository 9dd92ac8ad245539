"""`tierzero train` with portable checkpoints: written beside training, gone on from bit for bit, here or elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from cli_process import interrupt, losses, metrics, saved, tierzero, tierzero_here, train, train_arguments
from safetensors.torch import load_file

import tierzero as tz
from tierzero.cli import portable

SETTINGS = ["train.steps=10", "train.save_every=4"]
Run = tuple[Path, str]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The directory of a run that nobody interrupted, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    done = tierzero(*train_arguments(out, *SETTINGS, "checkpoint.every=3"))
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def same_end(out: Path, straight: Path) -> None:
    """The losses that `out` has, its weights and its sample are those of the whole run."""
    whole = metrics(straight)
    for line in metrics(out):
        assert line["loss"] == whole[line["step"] - 1]["loss"], line["step"]
    assert line["step"] == len(whole)
    for path in (straight / "export").glob("*.safetensors"):
        assert (out / "export" / path.name).read_bytes() == path.read_bytes()
    assert (out / "sample.txt").read_text() == (straight / "sample.txt").read_text()


def test_a_run_saves_and_says_so(straight: Run) -> None:
    out, text = straight
    assert saved(out / "checkpoints") == ["step-00000009", "step-00000010"]  # two are kept
    before, _, rest = text.partition("step 1/10")
    assert f"checkpoints every 3 steps in {out / 'checkpoints'}" in before
    for step in (3, 6, 9, 10):
        name = f"step-{step:08d}"
        assert f"saving {name} into {out / 'checkpoints'}" in rest
        assert f"saved {out / 'checkpoints' / name}: " in rest
    assert "4 saved, " in rest
    told = json.loads((out / "summary.json").read_text())["checkpoints"]
    assert (told["saved"], told["failed"]) == (4, 0)
    assert told["last"] == str(out / "checkpoints" / "step-00000010")
    files = [file for file in (out / "checkpoints" / "step-00000010").iterdir() if file.name != "tierzero.json"]
    assert told["bytes"] == pytest.approx(4 * sum(file.stat().st_size for file in files), rel=0.01)


def test_the_command_works_on_them(straight: Run, tmp_path: Path) -> None:
    """ls of the run and of what is above it, show, verify, export, rm."""
    out, _ = straight
    for path, prefix in ((out, ""), (out.parent, "straight/")):
        found = json.loads(tierzero_here("ckpt", "ls", str(path), "--json").stdout)
        names = {one["name"]: (one["kind"], one["step"], one["state"]) for one in found}
        assert names[f"{prefix}checkpoints/step-00000009"] == ("checkpoint", 9, "complete")
        assert names["step-00000010"] == ("snapshot", 10, "complete")
        assert len(found) == 3
    one = out / "checkpoints" / "step-00000010"
    shown = json.loads(tierzero_here("ckpt", "show", str(one), "--json").stdout)
    assert shown["meta"]["settings"]["train.steps"] == 10
    assert "is whole" in tierzero_here("ckpt", "verify", str(one)).stdout
    assert tierzero_here("ckpt", "export", str(one), str(tmp_path / "w")).returncode == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "w", out / "export"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    shutil.copytree(out / "checkpoints", tmp_path / "copy")
    asked = tierzero_here("ckpt", "rm", str(tmp_path / "copy" / "step-00000009"))
    assert asked.returncode == 2
    assert "no terminal" in asked.stderr
    assert "--yes" in asked.stderr
    assert tierzero_here("ckpt", "rm", str(tmp_path / "copy" / "step-00000009"), "--yes").returncode == 0
    assert saved(tmp_path / "copy") == ["step-00000010"]


@pytest.mark.parametrize("placement", ["host", "two drives"])
def test_goes_on_elsewhere(placement: str, straight: Run, tmp_path: Path) -> None:
    """Another directory, drive, placement and budgets, and no store of the run that saved."""
    shutil.copytree(straight[0] / "checkpoints" / "step-00000009", tmp_path / "copied")
    if placement == "host":
        where = [f"tiers.nvme={tmp_path / 'store'}", "tiers.host=64MiB", "tiers.device=8MiB"]
    else:
        pytest.importorskip("tierzero._native")
        where = [f'tiers.nvme=["{tmp_path / "a"}", "{tmp_path / "b"}"]', "tiers.prefetch=1"]
    flags = ("--resume-from", str(tmp_path / "copied"))
    done = tierzero(*train_arguments(tmp_path / "out", *SETTINGS, *where, flags=flags))
    assert done.returncode == 0, done.stderr
    assert f"resumed after step 9 of 10 from {tmp_path / 'copied'}" in done.stdout
    assert [line["step"] for line in metrics(tmp_path / "out")] == [10]
    same_end(tmp_path / "out", straight[0])
    run = json.loads((tmp_path / "out" / "run.json").read_text())["id"]
    assert run != json.loads((straight[0] / "run.json").read_text())["id"]  # neither takes the other's for its own


def test_killed_while_it_saves(straight: Run, tmp_path: Path) -> None:
    """No snapshot is there, the save is cut short: the checkpoint before is gone on from, what is left goes away. A
    polite stop after that, and the store is lost.
    """
    out, folder = tmp_path / "out", tmp_path / "saves"
    settings = ["train.steps=10", "train.save_every=100", "checkpoint.every=3", f"checkpoint.path={folder}"]
    slow = "checkpoint.limit=4MB/s"
    code, _, errors = interrupt(out, *settings, slow, line="saving step-00000006", signal=signal.SIGKILL)
    assert code == -signal.SIGKILL, errors
    found = json.loads(tierzero_here("ckpt", "ls", str(folder), "--json").stdout)
    assert [(one["name"], one["state"]) for one in found] == [
        ("step-00000003", "complete"),
        ("step-00000006", "partial"),
    ]
    for path in (out, out.parent):
        told = {
            one["path"]: one["state"] for one in json.loads(tierzero_here("ckpt", "ls", str(path), "--json").stdout)
        }
        assert told == {one["path"]: one["state"] for one in found} | {str(out / "store"): "complete"}
    code, text, errors = interrupt(out, *settings, flags=("--resume",), line="step 4/", signal=signal.SIGTERM)
    assert code == 0, errors
    assert f"resumed after step 3 of 10 from {folder / 'step-00000003'}" in text
    last = saved(folder)[-1]
    assert f"saved in {out / 'store'} and {folder / last}; " in text
    shutil.rmtree(out / "store")  # its drive is lost
    done = train(out, *settings, flags=("--resume",))
    assert done.returncode == 0, done.stderr
    assert f"resumed after step {int(last[5:])} of 10 from {folder / last}" in done.stdout
    assert len(losses(out)) == 10
    same_end(out, straight[0])
    assert sorted(os.listdir(folder)) == ["step-00000009", "step-00000010"]


def test_stopped_twice_while_it_saves(tmp_path: Path) -> None:
    """Then it ends at once: nothing of the slow save is left, and the run can be gone on with."""
    out, folder = tmp_path / "out", tmp_path / "saves"
    settings = ["train.steps=6", "checkpoint.every=2", f"checkpoint.path={folder}"]
    slow = "checkpoint.limit=1MB/s"
    code, text, errors = interrupt(out, *settings, slow, line="saving step-", signal=signal.SIGINT, twice=True)
    assert code == 130, errors
    assert f"gave up the checkpoint {folder / 'step-00000002'}" in text
    assert os.listdir(folder) == []
    done = train(out, *settings, flags=("--resume",))
    assert done.returncode == 0, done.stderr


def test_the_newest_is_gone_on_from(straight: Run, tmp_path: Path) -> None:
    """A checkpoint that is younger than the snapshot; then back by name, and on from there, not from what is later."""
    out, folder = tmp_path / "out", tmp_path / "saves"
    settings = ["train.steps=10", "train.save_every=5", "checkpoint.every=3", f"checkpoint.path={folder}"]
    settings.append("checkpoint.keep=0")
    code, _, errors = interrupt(out, *settings, line=f"saved {folder / 'step-00000006'}", signal=signal.SIGKILL)
    assert code == -signal.SIGKILL, errors
    last = saved(folder)[-1]
    assert last in ("step-00000006", "step-00000009")  # it may have got further before the signal came
    ended = train(out, *settings, flags=("--resume",))
    assert ended.returncode == 0, ended.stderr
    assert f"resumed after step {int(last[5:])} of 10 from {folder / last}" in ended.stdout
    assert str(folder / last) in tierzero_here("ckpt", "ls", str(out)).stdout
    same_end(out, straight[0])
    assert len(losses(out)) == 10
    assert saved(folder) == [f"step-{step:08d}" for step in (3, 6, 9, 10)]

    back = ("--resume-from", str(folder / "step-00000006"))
    text = refused(out, *settings, flags=back)
    assert "the snapshot of step 10" in text
    assert "--overwrite" in text
    code, text, errors = interrupt(
        out, *settings, flags=(*back, "--overwrite"), line="resumed after", signal=signal.SIGKILL
    )
    assert code == -signal.SIGKILL, errors
    assert "resumed after step 6 of 10" in text
    again = train(out, *settings, flags=("--resume",))
    assert again.returncode == 0, again.stderr
    assert f"resumed after step 6 of 10 from {out / 'store'}" in again.stdout  # those after it are of the time before
    same_end(out, straight[0])
    assert len(losses(out)) == 10


@pytest.fixture
def copy(straight: Run, tmp_path: Path) -> Path:
    """The run and its checkpoints somewhere else."""
    return Path(shutil.copytree(straight[0], tmp_path / "copy"))


def refused(out: Path, *settings: str, flags: tuple[str, ...] = (), code: int = 2) -> str:
    """What a command says that fails and changes nothing."""
    before = {path: path.stat().st_mtime_ns for path in out.parent.rglob("*") if path.name != "lock"}
    done = train(out, *SETTINGS, *settings, flags=flags)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    now = {path: path.stat().st_mtime_ns for path in out.parent.rglob("*") if path.name != "lock"}
    assert {path: now.get(path) for path in before if path.is_file()} == {
        path: time for path, time in before.items() if path.is_file()
    }
    return done.stderr


def test_what_cannot_be_gone_on_from(copy: Path, tmp_path: Path) -> None:
    """The path is named, and what to do."""
    out, last = tmp_path / "new", copy / "checkpoints" / "step-00000010"
    (tmp_path / "file").touch()
    for name in ("empty", ".step-00000001.tierzero-0123456789abcdef"):
        (tmp_path / name).mkdir()
    for path, said in (
        ("nothing", "not there"),
        ("file", "is a file"),
        ("empty", "tierzero ckpt ls"),
        ("copy/checkpoints", "name one of step-00000009, step-00000010"),
        ("copy", "name one of checkpoints/step-00000009, checkpoints/step-00000010"),
        ("copy/store", "a snapshot cannot leave its store"),
        (".step-00000001.tierzero-0123456789abcdef", "cut short"),
    ):
        text = refused(out, flags=("--resume-from", str(tmp_path / path)))
        assert said in text
        assert str(tmp_path / path) in text
    assert "one of them" in refused(out, flags=("--resume-from", str(last), "--resume"))
    text = refused(out, "checkpoint.every=3", f"checkpoint.path={copy / 'checkpoints'}", flags=("--resume",))
    assert f"go on from {last} by --resume-from" in text
    assert "model.layers is 3 and was 8" in refused(out, "model.layers=3", flags=("--resume-from", str(last)))
    model = tz.offload(torch.nn.Linear(3, 3), tz.Tiers(host="64MiB", device="1MiB", compute="cpu"))
    tz.save(model, tmp_path / "other", tz.AdamW(model.parameters()), meta={"step": 3}, wait=True)
    tz.close(model)
    assert "was not saved by tierzero train" in refused(out, flags=("--resume-from", str(tmp_path / "other")))
    text = refused(copy, flags=("--resume-from", str(tmp_path / "other")))
    assert "was not saved by tierzero train" in text
    assert train(tmp_path / "third", "train.steps=1").returncode == 0
    text = refused(tmp_path / "third", flags=("--resume-from", str(last)))
    assert f"{tmp_path / 'third'} holds a run that {last} is not of" in text
    text = refused(
        tmp_path / "fourth", f"tiers.nvme={tmp_path / 'third' / 'store'}", flags=("--resume-from", str(last))
    )
    assert f"the run in {tmp_path / 'third'}" in text
    done = train(tmp_path / "third", *SETTINGS, flags=("--resume-from", str(last), "--overwrite"))
    assert done.returncode == 0, done.stderr
    assert "resumed after step 10 of 10" in done.stdout
    assert "no steps are left to train" in done.stdout


@pytest.mark.parametrize("length", [0, 1, 300])
def test_a_damaged_index(length: int, copy: Path, tmp_path: Path) -> None:
    """It is damaged to --resume-from as it is to `ckpt ls`, and the file is named."""
    last = copy / "checkpoints" / "step-00000010"
    os.truncate(last / "tierzero.json", length)
    text = refused(tmp_path / "new", flags=("--resume-from", str(last)), code=1)
    assert f"{last / 'tierzero.json'} cannot be read" in text
    found = json.loads(tierzero_here("ckpt", "ls", str(copy), "--json").stdout)
    assert {one["state"] for one in found if one["path"] == str(last)} == {"damaged"}


def damage(index: Path, how: str) -> None:
    """Nothing can tell then what the checkpoint holds; of "second line" alone whose it is."""
    if how in ("gone", "folder"):
        index.unlink()
        if how == "folder":
            index.mkdir()
    elif how == "noise":
        index.write_bytes(bytes(range(256)) * 20)
    else:
        os.truncate(index, {"empty": 0, "first line": 10, "second line": 1000}[how])


@pytest.mark.parametrize("how", ["empty", "first line", "second line", "noise", "gone", "folder"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_resume_passes_over_a_damaged_index_aloud(
    how: str, elsewhere: bool, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, with what is wrong and the older one that is gone on from instead; with none left it is refused."""
    out = Path(shutil.copytree(straight[0], tmp_path / "out"))
    shutil.rmtree(out / "store")
    folder = out / "checkpoints"
    settings = list(SETTINGS)
    if elsewhere:
        folder = folder.rename(tmp_path / "saves")
        settings += ["checkpoint.every=20", f"checkpoint.path={folder}"]
        monkeypatch.setattr(portable, "owner_of", lambda meta: None)  # as if the run had been moved, not copied
    last, before = folder / "step-00000010", folder / "step-00000009"
    damage(last / "tierzero.json", how)
    done = train(out, *settings, flags=("--resume", "--quiet"))
    said = next(line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert f"{last} is damaged and passed over, going on from the older {before}, after step 9: " in said
    assert "tierzero.json" in said.partition("after step 9: ")[2]
    assert ("Move it away" in said) == (how != "second line")
    assert [line["step"] for line in metrics(out)] == list(range(1, 11))
    if elsewhere and how != "second line":  # the name is taken
        assert done.returncode == 1
        assert f"the checkpoint {last} was not written" in done.stderr
        assert "move it away" in done.stderr or how == "gone"
    else:
        assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    same_end(out, straight[0])
    shutil.rmtree(out / "store")
    damage(last / "tierzero.json", "first line") if how == "second line" else None
    damage(before / "tierzero.json", how)
    text = refused(out, *settings, flags=("--resume",))
    assert "there is nothing to resume" in text
    assert str(before) in text
    assert str(last) in text


@pytest.mark.parametrize("how", ["empty", "second line"])
def test_resume_from_an_older_snapshot_is_said(how: str, tmp_path: Path) -> None:
    """Also then: the checkpoint had got further."""
    out, folder = tmp_path / "out", tmp_path / "saves"
    settings = ["train.save_every=100", "checkpoint.every=3", f"checkpoint.path={folder}"]
    code, _, errors = interrupt(out, *settings, line=f"saved {folder / 'step-00000003'}", signal=signal.SIGKILL)
    assert code == -signal.SIGKILL, errors
    names = saved(folder)
    for name in names:
        damage(folder / name / "tierzero.json", how)
    code, text, errors = interrupt(out, *settings, flags=("--resume",), line="resumed", signal=signal.SIGKILL)
    assert "resumed after step 0 of" in text
    for name in names:
        older = f"going on from the older snapshot in {out / 'store'}, after step 0: "
        assert f"warning: {folder / name} is damaged and passed over, {older}" in errors


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_one(how: str, copy: Path, straight: Run, tmp_path: Path) -> None:
    """Named with file and tensor before the store is given up; --resume passes over one that is not whole, aloud."""
    last, before = copy / "checkpoints" / "step-00000010", copy / "checkpoints" / "step-00000009"
    data = last / "__0_0.distcp"
    shutil.rmtree(copy / "store")
    if how == "flip":
        piece = json.loads((last / "tierzero.json").read_text().splitlines()[1])["tensors"]["model.lm_head.weight"][2][
            0
        ]
        with data.open("r+b") as file:
            file.seek(piece[5] + 7)
            byte = file.read(1)
            file.seek(piece[5] + 7)
            file.write(bytes([byte[0] ^ 1]))
    elif how == "cut":
        os.truncate(data, 5000)
    else:
        data.unlink()
    text = refused(tmp_path / "new", flags=("--resume-from", str(last)), code=1)
    assert str(data) in text
    if how == "flip":
        text = refused(copy, flags=("--resume",), code=1)
        assert "model.lm_head.weight" in text
        assert f"tierzero ckpt rm {last}" in text
        shutil.rmtree(last)
    done = train(copy, *SETTINGS, flags=("--resume",))
    assert done.returncode == 0, done.stderr
    assert f"resumed after step 9 of 10 from {before}" in done.stdout
    assert ("passed over" in done.stderr and str(data) in done.stderr) == (how != "flip")
    same_end(copy, straight[0])


def test_others_checkpoints_stay(copy: Path, straight: Run, tmp_path: Path) -> None:
    """A run does not write where those of another lie, and --overwrite removes its own."""
    folder = f"checkpoint.path={copy / 'checkpoints'}"
    text = refused(tmp_path / "new", "checkpoint.every=2", folder)
    assert str(copy / "checkpoints" / "step-0000") in text
    assert "checkpoint.path=DIR" in text
    short, own = ["train.steps=2", "train.warmup=0", "train.save_every=1"], tmp_path / "own"
    first = train(tmp_path / "a", *short, "checkpoint.every=1", f"checkpoint.path={own}", "checkpoint.keep=1")
    assert first.returncode == 0, first.stderr
    assert saved(own) == ["step-00000002"]
    shutil.copytree(straight[0] / "checkpoints" / "step-00000010", own / "best")
    short[0] = "train.steps=1"
    again = train(tmp_path / "a", *short, "checkpoint.every=1", f"checkpoint.path={own}", flags=("--overwrite",))
    assert again.returncode == 0, again.stderr
    assert saved(own) == ["best", "step-00000001"]


@pytest.mark.parametrize(
    ("fit", "every", "keep", "enough"),
    [(2, 1, 2, False), (3, 1, 2, True), (2, 7, 2, True), (1, 7, 2, False), (1, 1, 0, True)],
)
def test_a_drive_with_too_little_room(
    fit: int, every: int, keep: int, enough: bool, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For those that are kept and the one being written, as far as that can be known. Those that are there count."""
    from tierzero.cli import saver

    free = saver.shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(saver, "checkpoint_bytes", lambda model: int(free / (fit + 0.5)))
    settings = ("train.steps=12", f"checkpoint.every={every}", f"checkpoint.keep={keep}")
    text = train(tmp_path / "out", *settings, flags=("--dry-run",)).stdout
    assert "are kept" in text
    assert ("which is too little" in text) != enough
    if fit == 2:
        assert "too little" not in train(straight[0], *settings, flags=("--dry-run",)).stdout
