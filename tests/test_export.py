"""Export: shards as transformers writes them, whole or not there, loading strictly into the plain model."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from oracle import batches, loss_of, make, same, tiered, tiers_for, train_both
from pairs import pair
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

import tierzero as tz
from tierzero.checkpoint.export import export_tensors

pytestmark = pytest.mark.usefixtures("no_leaks")
INDEX = "model.safetensors.index.json"


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors, by the index, and the index."""
    index = json.loads((folder / INDEX).read_text())
    state: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        state |= load_file(folder / file)
    assert index["weight_map"].keys() == state.keys()
    return state, index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_shards(dtype: torch.dtype, placement: str, tmp_path: Path) -> None:
    """S7: the exported model has the trained model's loss to the bit; tied names are listed and not repeated."""
    with pair(tmp_path / "run", models.Tied, placement, dtype=dtype) as (plain, run):
        train_both([("", run)], plain, 2)
        folder = tz.export(run.model, tmp_path / "out", max_shard=1000)
        state, index = read(folder)
        assert len(set(index["weight_map"].values())) > 2
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert index["metadata"]["tied"] == {"head.weight": "embed.weight"}
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
        largest = max(value.nbytes for value in state.values())
        sizes = [os.stat(folder / file).st_size for file in set(index["weight_map"].values())]
        assert max(sizes) < max(largest, 1000) + 2000
        fresh: Any = make(models.Tied, dtype, seed=4)
        tied = {other: state[name] for other, name in index["metadata"]["tied"].items()}
        fresh.load_state_dict({**state, **tied}, strict=True)
        ids = next(batches(1))
        assert same(loss_of(fresh, ids), loss_of(run.model, ids))
        # one file: the library itself ties the names again
        single = tz.export(run.model, tmp_path / "out.safetensors", metadata={"made": "here"})
        again = make(models.Tied, dtype, seed=5)
        assert load_model(again, single, strict=True) == (set(), [])
        assert same(loss_of(again, ids), loss_of(fresh, ids))
        with safe_open(single, "pt") as file:
            assert file.metadata()["made"] == "here"
            assert file.metadata()["head.weight"] == "embed.weight"
        assert "head.weight" in load_file(tz.export(run.model, tmp_path / "all.safetensors", tied="copy"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_export_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """One file, shards, other shards, one file; files that are none of its business stay."""
    model = make(models.Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        folder = tmp_path / "out"
        tz.export(run.model, folder)
        (folder / "config.json").write_text("{}")
        assert names(folder) == {"model.safetensors", "config.json"}
        seen = []
        for scale in (2.0, 3.0):
            with torch.no_grad():
                run.model.load_state_dict({k: v.clone() * scale for k, v in run.model.state_dict().items()})
            tz.export(run.model, folder, max_shard=2000)
            state, index = read(folder)
            expected = {name: value.clone() for name, value in run.model.state_dict().items()}
            assert all(same(state[name], expected[name]) for name in expected)
            assert names(folder) == {INDEX, "config.json", *index["weight_map"].values()}
            seen.append(set(index["weight_map"].values()))
        assert not seen[0] & seen[1]
        tz.export(run.model, folder)
        assert names(folder) == {"model.safetensors", "config.json"}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "other.safetensors"])
def test_foreign_weights_are_left_alone(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    save_file({"a": torch.zeros(3)}, folder / name)
    before = (folder / name).read_bytes()
    model = make(models.Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        with pytest.raises(tz.StoreError, match=f"{name} is there already.*overwrite=True"):
            tz.export(run.model, folder)
        assert (folder / name).read_bytes() == before
        assert names(folder) == {name}
        with pytest.raises(tz.StoreError, match="is a file"):
            tz.export(run.model, folder / name / "x" if name == "none" else __file__)
        tz.export(run.model, folder, overwrite=True)
        assert "model.safetensors" in names(folder)
        assert load_file(folder / "model.safetensors").keys() == run.model.state_dict().keys()


def test_no_room_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(models.Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
        with pytest.raises(OSError, match=r"No space|the export takes .* 5 B free.*out") as caught:
            tz.export(run.model, tmp_path / "out" / "deep")
        assert caught.value.filename == str(tmp_path / "out" / "deep")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failure_leaves_the_export_before(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at any write: the old files are whole and nothing else is left."""
    from tierzero.checkpoint import writer

    model = make(models.Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        folder = tz.export(run.model, tmp_path / "out", max_shard=2000)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        put, count = os.pwrite, 0

        def full(fd: int, data: Any, offset: int) -> int:
            nonlocal count
            count += 1
            if count > at:
                raise OSError(28, "No space left on device")
            return put(fd, data, offset)

        monkeypatch.setattr(writer.os, "pwrite", full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            tz.export(run.model, folder, max_shard=2000)
        assert str(folder) in str(caught.value.filename)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with torch.device("meta"):
        blank = models.Net()
    with tiered(blank, tiers_for(blank, "nvme", tmp_path / "store")) as run:
        with pytest.raises(tz.TierzeroError, match=r"embed.weight was never given a value"):
            tz.export(run.model, tmp_path / "out")
        with pytest.raises(ValueError, match="max_shard"):
            tz.export(run.model, tmp_path / "out", max_shard="many")
        tz.initialize(run.model)
        with tz.unsharded(run.model.embed), pytest.raises(tz.TierzeroError, match="in use"):  # type: ignore[arg-type]
            tz.export(run.model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("extra", [0, 1, 4096, 4097 + 5])
def test_files_of_any_size_are_written_whole(extra: int, tmp_path: Path) -> None:
    """Several blocks and what is left over, some at a time; an error leaves nothing, and a file that is there stays."""
    from tierzero.checkpoint.writer import BLOCK, write_file

    raw = torch.frombuffer(bytearray(os.urandom(5 * BLOCK + extra)), dtype=torch.uint8)

    async def fill(at: int, out: torch.Tensor) -> None:
        out.copy_(raw[at : at + out.numel()])

    async def fails(at: int, out: torch.Tensor) -> None:
        if at == 3 * BLOCK:
            raise OSError(errno.EIO, "no such luck")

    asyncio.run(write_file(tmp_path / "file", raw.numel(), fill))
    assert (tmp_path / "file").read_bytes() == bytes(raw.numpy())
    with pytest.raises(FileExistsError):
        asyncio.run(write_file(tmp_path / "file", 1, fill))
    with pytest.raises(OSError, match="no such luck"):
        asyncio.run(write_file(tmp_path / "other", raw.numel(), fails))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_tensors_of_any_size_and_place(tmp_path: Path) -> None:
    """Elements that lie across blocks and at odd bytes, in the tiers and in plain tensors, of every kind."""

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("odd", torch.arange(3, dtype=torch.uint8))
            self.register_buffer("strided", torch.randn(700, 900, dtype=torch.float64).t())
            self.a = torch.nn.Linear(1023, 1025)
            self.b = torch.nn.Linear(1500, 1501).to(torch.bfloat16)
            self.c = torch.nn.Parameter(torch.randn(7, 1 << 17).half(), requires_grad=False)
            self.none = torch.nn.Parameter(torch.empty(0, 5))
            self.register_buffer("flags", torch.rand(5) > 0.5)

    for host, states in (("64MiB", True), ("256MiB", True), ("64MiB", False)):
        model = make(Odd)
        expected = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
        plain = load_file(tz.export(model, tmp_path / "plain.safetensors"))
        tz.offload(model, tz.Tiers(nvme=tmp_path / f"{host}{states}", host=host, device="64MiB", compute="cpu"))
        if states:
            tz.AdamW(model.parameters())
        out = tz.export(model, tmp_path / "out.safetensors")
        tz.close(model)
        raw = out.read_bytes()
        assert int.from_bytes(raw[:8], "little") % 4096 == 4088  # the tensors begin at a whole page
        for found in (load_file(out), plain):
            assert found.keys() == expected.keys()
            assert all(same(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("offloaded", [False, True])
def test_an_export_that_is_interrupted(offloaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C while blocks are written: it ends, nothing of it stays, and the next one is whole."""
    from tierzero.checkpoint import writer

    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if offloaded:
        tz.offload(model, tz.Tiers(host="256MiB", device="64MiB", compute="cpu"))
    put, main, told = os.pwrite, threading.main_thread().ident, []

    def interrupting(fd: int, data: Any, offset: int) -> int:
        if not told:
            told.append(offset)
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
        return put(fd, data, offset)

    monkeypatch.setattr(writer.os, "pwrite", interrupting)
    with pytest.raises(KeyboardInterrupt):
        tz.export(model, tmp_path / "out")
    assert told
    assert list((tmp_path / "out").iterdir()) == []
    state = load_file(tz.export(model, tmp_path / "out") / "model.safetensors")
    assert all(same(state[name], value) for name, value in expected.items())
    if offloaded:
        tz.close(model)


def test_what_a_header_cannot_hold(tmp_path: Path) -> None:
    """Refused before anything is written: metadata that are no strings, a tensor called as the metadata are."""
    with tiered(make(models.Net), tz.Tiers(host="64MiB", device="64MiB", compute="cpu")) as run:
        with pytest.raises(TypeError, match="are strings by name"):
            tz.export(run.model, tmp_path / "out", metadata={"step": 5})  # type: ignore[dict-item]
        with pytest.raises(tz.TierzeroError, match="cannot hold a tensor called __metadata__"):
            export_tensors({"__metadata__": torch.ones(1)}, tmp_path / "out")
        assert list(tmp_path.glob("out/*")) == []


def test_a_drive_that_fills_up_at_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that no index names are not left behind."""

    def full(fd: int) -> None:
        if "index.json" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with tiered(make(models.Net), tz.Tiers(host="64MiB", device="64MiB", compute="cpu")) as run:
        monkeypatch.setattr("tierzero.checkpoint.export.os.fsync", full)
        with pytest.raises(OSError, match="No space left") as caught:
            tz.export(run.model, tmp_path / "out", max_shard=4000)
        assert str(caught.value.filename).endswith(".part")
        assert list((tmp_path / "out").iterdir()) == []


KILLED = """
import resource, signal, sys, torch
from tierzero.checkpoint.export import export_tensors

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which kills when a file becomes too large
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
tensors = {"a": torch.zeros(1000), "b": torch.zeros(1000), "c": torch.zeros(1 << 20)}
export_tensors(tensors, sys.argv[1], max_shard=5000)
"""


@pytest.mark.parametrize("single", [False, True])
def test_what_a_killed_export_leaves_goes_with_the_next(single: bool, tmp_path: Path) -> None:
    """Nothing else does, and nothing while another export goes on there."""
    out = tmp_path / "out"
    out.mkdir()
    target = out / "weights.safetensors" if single else out
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert killed.returncode == -signal.SIGXFSZ
    left = sorted(path.name for path in out.iterdir())
    assert len(left) == (1 if single else 3)
    mine = [".model.safetensors.part", ".other.safetensors.7-0123abcd.part", "model.safetensors.7-0123abcd.part"]
    for name in mine:
        (out / name).touch()
    other = os.open(out, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_SH)
    new = ["weights.safetensors"] if single else ["model.safetensors"]
    export_tensors({"a": torch.ones(3)}, target)
    assert sorted(path.name for path in out.iterdir()) == sorted([*left, *mine, *new])
    os.close(other)
    export_tensors({"a": torch.ones(3)}, target)
    assert sorted(path.name for path in out.iterdir()) == sorted([*mine, *new])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the embedding's, whose inputs are ids
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_export_inside_a_pass(where: str, tmp_path: Path) -> None:
    """Refused in hooks of every module, with a sentence; the pass goes on, and afterwards it works."""
    tried: list[str] = []

    def export(*_: Any) -> None:
        with pytest.raises(tz.TierzeroError, match=rf"a {where} of the Net goes on: export outside of it"):
            tz.export(run.model, tmp_path / "out")
        tried.append(where)

    with pair(tmp_path / "run", models.Net, "nvme") as (plain, run):
        hooks = [
            module.register_forward_hook(export) if where == "forward" else module.register_full_backward_hook(export)
            for module in run.model.modules()
            if not isinstance(module, torch.nn.ModuleList) and (module is not run.model or where == "forward")
        ]
        loss_of(run.model, next(batches(1))).backward()
        for hook in hooks:
            hook.remove()
        assert len(tried) == len(hooks) > 2
        run.zero_grad()
        train_both([("", run)], plain, 1)
        tz.export(run.model, tmp_path / "out")
        exported = load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(value, exported[name]) for name, value in plain.model.state_dict().items())
    tz.export(torch.nn.Linear(2, 2), tmp_path / "plain")
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == {"weight", "bias"}
