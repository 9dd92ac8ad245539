"""Saves that fail and checkpoints that are damaged: an error that names the file, and everything else as it was."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIM, VOCAB, Net, Tied
from oracle import Tiered, batches, make, same, tiered, tiers_for
from saves import files_of, step, weights

import tierzero as tz
from tierzero.checkpoint.index import read_index
from tierzero.checkpoint.place import Place

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
FILES = ["__0_0.distcp", ".metadata", "tierzero.json"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Tiered]:
    """A model that has taken a step and is saved in tmp_path/saves/one."""
    model = make(Tied)
    with tiered(model, tiers_for(model, "mixed", tmp_path / "store")) as found:
        step(found, batches(2))
        tz.save(found.model, tmp_path / "saves" / "one", found.optimizer, wait=True)
        yield weakref.proxy(found)  # pytest keeps what it gives longer than no_leaks looks


def everything(run: Tiered) -> list[torch.Tensor]:
    """All bytes that a load may change."""
    states = [run.optimizer.state[param] for param in run.model.parameters()]
    return [
        *weights(run.model).values(),
        *(state[part].read() for state in states for part in ("exp_avg", "exp_avg_sq")),
    ]


def refused(run: Tiered, path: Path, kind: Any, match: str) -> None:
    """Loading fails so, and nothing was changed."""
    before, rng = everything(run), torch.get_rng_state()
    with pytest.raises(kind, match=match):
        tz.load(run.model, path, run.optimizer)
    assert all(same(one, other) for one, other in zip(everything(run), before, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["gone", "cut", "empty", "longer"])
def test_a_file_that_is_not_whole(run: Tiered, name: str, how: str, tmp_path: Path) -> None:
    """Named before anything is changed."""
    file = tmp_path / "saves" / "one" / name
    raw = file.read_bytes()
    step(run, batches(2))
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut": raw[:-9], "empty": b"", "longer": raw + b"\n\n"}[how])
    if name == "tierzero.json" and how in ("gone", "empty"):  # what is left is a checkpoint of torch's
        refused(run, file.parent, tz.TierzeroError, "is no checkpoint that tierzero.save has written")
    else:
        refused(run, file.parent, tz.StoreCorruptError, name)


@pytest.mark.parametrize("seed", range(12))
def test_a_changed_byte(run: Tiered, seed: int, tmp_path: Path) -> None:
    """Anywhere in an item of the data file or in the index: the tensor and the file are named."""
    import random

    chosen = random.Random(seed)
    step(run, batches(2))
    folder = tmp_path / "saves" / "one"
    index = read_index(folder)
    key = chosen.choice(sorted(index.tensors))
    piece = index.tensors[key].pieces[0]
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    at = piece.start + chosen.randrange(piece.length)
    data[at] ^= 1 << chosen.randrange(8)
    (folder / "__0_0.distcp").write_bytes(data)
    refused(run, folder, tz.StoreCorruptError, rf"{key} .* of {folder}/__0_0.distcp")


def test_a_changed_index(run: Tiered, tmp_path: Path) -> None:
    """Any byte of it."""
    file = tmp_path / "saves" / "one" / "tierzero.json"
    raw = file.read_bytes()
    for at in range(len(raw.partition(b"\n")[0]) + 1, len(raw) - 1, 997):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(tz.StoreCorruptError, match=r"tierzero\.json"):
            tz.load(run.model, file.parent, run.optimizer)
    first = json.loads(raw.partition(b"\n")[0])
    file.write_bytes(json.dumps({**first, "version": 99}).encode() + b"\n" + raw.partition(b"\n")[2])
    with pytest.raises(tz.TierzeroError, match="version 99"):
        tz.load(run.model, file.parent, run.optimizer)


def test_nothing_of_a_hostile_file_runs(run: Tiered, tmp_path: Path) -> None:
    """.metadata is never unpickled, and an object in the data file is loaded as weights are."""
    folder, told = tmp_path / "saves" / "one", tmp_path / "told"

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {told}",)

    size = (folder / ".metadata").stat().st_size
    raw = pickle.dumps(Evil())
    (folder / ".metadata").write_bytes(raw + b" " * (size - len(raw)))
    tz.load(run.model, folder, run.optimizer)
    assert not told.exists()


def test_what_is_no_checkpoint(run: Tiered, tmp_path: Path) -> None:
    """Directories and files of others, and nothing at all."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("hello")
    for name in ("empty", "file"):
        refused(run, tmp_path / name, tz.TierzeroError, "is no checkpoint that tierzero.save has written")
    with pytest.raises(FileNotFoundError):
        tz.load(run.model, tmp_path / "nothing")


def test_another_model(run: Tiered, tmp_path: Path) -> None:
    """The first difference is named, whatever it is, and nothing is changed."""
    one = tmp_path / "saves" / "one"
    with tiered(make(lambda: Net(blocks=2)), tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as other:
        refused(other, one, tz.TierzeroError, "it has layers.2")
    with tiered(make(lambda: Net(blocks=5)), tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as other:
        refused(other, one, tz.TierzeroError, "the model has layers.3")

    def wide() -> torch.nn.Module:
        model = Net()
        model.head = torch.nn.Linear(DIM, VOCAB + 1)
        return model

    with tiered(make(wide), tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as other:
        refused(other, one, tz.TierzeroError, r"head.weight has the shape \(\d+, \d+\) there and")
    groups = lambda model: [{"params": list(reversed(list(model.parameters())))}]
    with tiered(make(Tied), tz.Tiers(host="1GiB", device="1GiB", compute="cpu"), groups=groups) as other:
        refused(other, one, tz.TierzeroError, "parameter group 0 has embed.weight where")
    with pytest.raises(tz.TierzeroError, match="it has no state 'sched', only none"):
        tz.load(run.model, one, run.optimizer, states={"sched": object()})


def test_a_target_that_is_not_ours(run: Tiered, tmp_path: Path) -> None:
    """Neither replaced nor touched, with overwrite= neither."""
    mine = tmp_path / "saves" / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    (tmp_path / "saves" / "file").write_text("x")
    one = tmp_path / "saves" / "one"
    for overwrite in (False, True):
        for target in (mine, tmp_path / "saves" / "file"):
            with pytest.raises(tz.StoreError, match="is no checkpoint of tierzero"):
                tz.save(run.model, target, run.optimizer, overwrite=overwrite)
    with pytest.raises(tz.StoreError, match=r"there is a checkpoint in .*one already"):
        tz.save(run.model, one, run.optimizer)
    (one / "notes.txt").write_text("mine")
    with pytest.raises(tz.StoreError, match=r"contains notes.txt"):
        tz.save(run.model, one, run.optimizer, overwrite=True)
    assert files_of(mine) == ["thesis.txt"]
    assert files_of(tmp_path / "saves") == ["file", "mine", "one"]


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite(run: Tiered, exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of ours is replaced whole, also where directories cannot be exchanged."""
    if not exchange:
        monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: object())
    one = tmp_path / "saves" / "one"
    step(run, batches(2))
    tz.save(run.model, one, run.optimizer, meta={"second": True}, overwrite=True, wait=True)
    assert files_of(tmp_path / "saves") == ["one"]
    assert tz.load(run.model, one, run.optimizer) == {"second": True}


def test_keep(run: Tiered, tmp_path: Path) -> None:
    """The last ones stay; what others have put there stays too."""
    saves = tmp_path / "saves"
    (saves / "other").mkdir()
    (saves / "other" / "file").write_text("x")
    for number in range(4):
        tz.save(run.model, saves / f"step-{9 - number}", run.optimizer, keep=2)
    tz.save(run.model, saves / "last", run.optimizer, keep=2, wait=True)
    assert files_of(saves) == ["last", "other", "step-6"]
    (saves / "step-6" / "note").write_text("x")
    tz.save(run.model, saves / "more", run.optimizer, keep=1, wait=True)
    assert files_of(saves) == ["more", "other", "step-6"]
    with pytest.raises(ValueError, match="keep must be 1 or more"):
        tz.save(run.model, saves / "none", run.optimizer, keep=0)


def test_a_full_disk(run: Tiered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out before or in the middle: the path and the bytes are named, nothing is left, training goes on."""
    saves, before = tmp_path / "saves", everything(run)
    with monkeypatch.context() as small:
        usage = shutil.disk_usage(saves)
        small.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(
            OSError, match=r"the checkpoint needs [0-9.]+ \wiB and 1000 B is free, [0-9.]+ \wiB too little"
        ) as caught:
            tz.save(run.model, saves / "two", run.optimizer)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(saves / "two")
    with monkeypatch.context() as small:

        def publish(self: Place) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

        small.setattr(Place, "publish", publish)
        saving = tz.save(run.model, saves / "two", run.optimizer)
        with pytest.raises(OSError, match="the drive is full, so the checkpoint was not written") as caught:
            saving.result()
        assert caught.value.filename == str(saves / "two")
    assert files_of(saves) == ["one"]
    assert all(same(one, other) for one, other in zip(everything(run), before, strict=True))
    step(run, batches(2))
    tz.save(run.model, saves / "two", run.optimizer, wait=True)
    tz.load(run.model, saves / "two", run.optimizer)


def test_a_failure_that_nobody_has_seen(run: Tiered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comes out of the next save."""
    with monkeypatch.context() as broken:

        def publish(self: Place) -> None:
            raise OSError(errno.EIO, "Input/output error", "drive")

        broken.setattr(Place, "publish", publish)
        saving = tz.save(run.model, tmp_path / "saves" / "two", run.optimizer)
        saving.wait()
    with pytest.raises(OSError, match="Input/output error"):
        tz.save(run.model, tmp_path / "saves" / "three", run.optimizer)
    tz.save(run.model, tmp_path / "saves" / "three", run.optimizer, wait=True)
    assert files_of(tmp_path / "saves") == ["one", "three"]


def test_states_that_cannot_come_back(run: Tiered, tmp_path: Path) -> None:
    """Refused when they are saved, by name; meta values likewise."""
    with pytest.raises(TypeError, match=r"states.odd cannot be saved so that it can be loaded safely"):
        tz.save(run.model, tmp_path / "saves" / "two", run.optimizer, states={"odd": {"a": Place}})
    with pytest.raises(TypeError, match="must be JSON"):
        tz.save(run.model, tmp_path / "saves" / "two", run.optimizer, meta={"a": torch.ones(1)})
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match="is no optimizer of an offloaded model"):
        tz.save(run.model, tmp_path / "saves" / "two", plain)
    assert files_of(tmp_path / "saves") == ["one"]


def test_close_waits_for_a_save(tmp_path: Path) -> None:
    """The checkpoint is whole when close() returns."""
    model = make(Net)
    run = Tiered(model, tiers_for(model, "nvme", tmp_path / "store"))
    saving = tz.save(run.model, tmp_path / "save", run.optimizer)
    tz.close(run.model)
    assert saving.done()
    assert saving.result() == tmp_path / "save"
    assert read_index(tmp_path / "save").tensors


def test_cancelled(run: Tiered, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it stays, the one before does, training and the next save go on; once it is over, nothing happens."""
    folder = tmp_path / "saves"
    before = sorted(os.listdir(folder))
    going = tz.save(run.model, folder / "two", run.optimizer, limit=1 << 20)
    going.cancel()
    assert going.done()
    assert sorted(os.listdir(folder)) == before
    with pytest.raises(tz.TierzeroError, match="two was cancelled: nothing of it is left"):
        going.result()
    one_more = tz.save(run.model, folder / "two", run.optimizer, wait=True)
    one_more.cancel()
    assert one_more.result() == folder / "two"
    forgotten = tz.save(run.model, folder / "three", run.optimizer, limit=1 << 20)
    forgotten.cancel()
    forgotten.finish()
    assert not caplog.records
    tz.load(run.model, folder / "two", run.optimizer)
    assert read_index(folder / "one").tensors


def test_cancelled_by_whoever_was_interrupted_waiting(tmp_path: Path) -> None:
    """Ctrl-C while one waits, then cancel(): it does not stand behind the wait that nobody is in any more."""
    model = torch.nn.Linear(400, 300)  # 1.9 MB of checkpoint, two seconds
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        going = tz.save(run.model, tmp_path / "save", run.optimizer, limit=1_000_000)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            going.result()
        going.cancel()
        assert not (tmp_path / "save").exists()
        with pytest.raises(tz.TierzeroError, match="save was cancelled"):
            going.result()


def test_what_a_save_says_of_itself(run: Tiered, tmp_path: Path) -> None:
    """While it goes on, when it is done and when it has failed: place, progress, size, reason."""
    going = tz.save(run.model, tmp_path / "saves" / "two", run.optimizer, limit=1 << 20)
    size = read_index(tmp_path / "saves" / "one").files["__0_0.distcp"]
    assert 0 < going.written < going.nbytes == size
    assert f"{str(tmp_path / 'saves' / 'two')!r}: " in repr(going)
    assert " written>" in repr(going)
    assert going.seconds == 0
    going.result()
    index = tmp_path / "saves" / "two" / "tierzero.json"
    assert going.nbytes == sum(file.stat().st_size for file in index.parent.iterdir()) - index.stat().st_size
    assert going.written == size
    assert going.seconds > 0
    assert ": done, " in repr(going)
    failed = tz.save(run.model, tmp_path / "saves" / "three", run.optimizer, limit=1 << 20)
    (tmp_path / "saves" / "three").mkdir()
    (tmp_path / "saves" / "three" / "mine").touch()
    assert isinstance(failed.exception(), tz.StoreError)
    assert ": failed: StoreError: " in repr(failed)
    assert str(tmp_path / "saves" / "three") in repr(failed)
