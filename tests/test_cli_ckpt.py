"""`tierzero ckpt` on checkpoints and on stores that training has just written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_process import tierzero, tierzero_here
from oracle import tiers_for
from safetensors.torch import load_file, load_model, save_model
from torch import nn

import tierzero as tz


class Small(nn.Module):
    """Tied, frozen and float32 parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 24).bfloat16()
        self.blocks = nn.ModuleList(nn.Linear(24, 24).bfloat16() for _ in range(3))
        self.blocks[1].weight.requires_grad_(False)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 40, bias=False).bfloat16()
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(5.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x.float()).bfloat16())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints in `saved`, a store with a snapshot, and the weights as torch saved them."""
    root = tmp_path_factory.mktemp("made")
    model = tz.offload(Small(), tz.Tiers(nvme=root / "store", host="64MiB", device="8MiB", compute="cpu"))
    opt = tz.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in (1, 2):
        model(torch.arange(40).view(4, 10)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        tz.save(model, root / "saved" / f"step-{step}", opt, meta={"step": step, "note": "hello"}, wait=True)
    tz.snapshot(model, opt, "here", {"step": 2})
    torch.save(model.state_dict(), root / "weights.pt")
    tz.close(model)
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """The same to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "copy", symlinks=True))


def ckpt(*words: Any, code: int = 0) -> str:
    done = tierzero_here("ckpt", *map(str, words))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def listed(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ckpt("ls", path, "--json"))
    return found


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as data:
        data.seek(at)
        byte = data.read(1)
        data.seek(at)
        data.write(bytes([byte[0] ^ 1]))


def test_ls(made: Path) -> None:
    """A directory of checkpoints, one of them, and a store."""
    found = listed(made / "saved")
    assert [(one["name"], one["step"], one["state"]) for one in found] == [
        ("step-1", 1, "complete"),
        ("step-2", 2, "complete"),
    ]
    sizes = [sum(file.stat().st_size for file in (made / "saved" / one["name"]).iterdir()) for one in found]
    assert [one["bytes"] for one in found] == sizes
    assert [one["name"] for one in listed(made / "saved" / "step-1")] == ["step-1"]
    (snapshot,) = listed(made / "store")
    assert (snapshot["kind"], snapshot["name"], snapshot["step"]) == ("snapshot", "here", 2)
    assert [one["name"] for one in listed(made)] == ["saved/step-1", "saved/step-2", "here"]
    text = ckpt("ls", made / "saved")
    assert "step-2" in text
    assert "complete" in text


@pytest.mark.parametrize("which", ["saved/step-2", "store"])
def test_show(made: Path, which: str) -> None:
    shown = json.loads(ckpt("show", made / which, "--json"))
    assert shown["meta"]["step"] == 2
    assert [(group["lr"], group["weight_decay"]) for group in shown["groups"]] == [(1e-2, 0.1)]
    tensors = {one["name"]: one for one in shown["tensors"]}
    plain = torch.load(made / "weights.pt")
    for name, value in plain.items():
        if name in ("head.weight", "seen"):
            continue
        one = tensors[f"model.{name}"]
        assert (one["dtype"], tuple(one["shape"])) == (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        assert one["nbytes"] == value.nbytes
        assert Path(one["file"]).is_file()
    text = ckpt("show", made / which)
    assert "model.norm.weight" in text
    assert "weight_decay 0.1" in text


@pytest.mark.parametrize("which", ["saved", "store"])
@pytest.mark.parametrize("tied", ["list", "copy"])
def test_export(made: Path, tmp_path: Path, which: str, tied: str) -> None:
    """Strictly into the plain model, bit for bit; of the last checkpoint where there are several."""
    ckpt("export", made / which, tmp_path / "out", "--tied", tied)
    plain = torch.load(made / "weights.pt")
    file = tmp_path / "out" / "model.safetensors"
    if tied == "copy":
        found = load_file(file)
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], value) for name, value in plain.items())
    again = Small()
    load_model(again, file, strict=True) if tied == "list" else again.load_state_dict(load_file(file), strict=True)
    assert all(torch.equal(value, plain[name]) for name, value in again.state_dict().items())


def test_export_in_shards(made: Path, tmp_path: Path) -> None:
    ckpt("export", made / "saved" / "step-1", tmp_path / "out", "--max-shard", "2kB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    assert found.keys() == torch.load(made / "weights.pt").keys() - {"head.weight"}
    assert "max_shard" in ckpt("export", made / "saved", tmp_path / "x", "--max-shard", "big", code=2)
    assert "use " in ckpt("export", made / "saved", tmp_path / "x", "--tied", "never", code=2)
    assert not (tmp_path / "x").exists()
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "model.safetensors").write_text("mine")
    assert "no earlier export" in ckpt("export", made / "saved", tmp_path / "y", code=1)
    ckpt("export", made / "saved", tmp_path / "y", "--overwrite")


@pytest.mark.parametrize("which", ["saved/step-1", "saved/step-2", "store"])
def test_verify(made: Path, which: str) -> None:
    assert "is whole" in ckpt("verify", made / which)


def test_verify_names_file_and_tensor(copy: Path) -> None:
    one = copy / "saved" / "step-2"
    index = json.loads((one / "tierzero.json").read_text().splitlines()[1])
    piece = index["tensors"]["model.blocks.2.weight"][2][0]
    flip(one / "__0_0.distcp", piece[5] + 17)
    said = ckpt("verify", copy / "saved", code=1)
    assert "model.blocks.2.weight" in said
    assert str(one / "__0_0.distcp") in said
    assert "is whole" in ckpt("verify", copy / "saved", "--name", "step-1")

    manifest = json.loads((copy / "store" / "manifest.json").read_text())["payload"]
    offset, _, _ = manifest["snapshots"]["here"]["records"]["blocks.0/param"]
    flip(copy / "store" / "data.bin", offset + 5)
    said = ckpt("verify", copy / "store", code=1)
    assert "blocks.0.weight" in said
    assert str(copy / "store" / "data.bin") in said


def test_every_byte_of_a_snapshot_counts(copy: Path) -> None:
    """A change in any record is found."""
    manifest = json.loads((copy / "store" / "manifest.json").read_text())["payload"]
    for offset, nbytes, _ in manifest["snapshots"]["here"]["records"].values():
        for at in (offset, offset + nbytes - 1):
            flip(copy / "store" / "data.bin", at)
            ckpt("verify", copy / "store", code=1)
            flip(copy / "store" / "data.bin", at)
    assert "is whole" in ckpt("verify", copy / "store")


def test_damaged_and_partial_ones_are_listed(copy: Path) -> None:
    saved = copy / "saved"
    data = saved / "step-1" / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 4096)
    shutil.copytree(saved / "step-2", saved / ".step-3.tierzero-0123456789abcdef")
    (saved / ".step-3.tierzero-0123456789abcdef" / "tierzero.json").unlink()
    states = {one["name"]: one["state"] for one in listed(saved)}
    assert states == {"step-1": "damaged", "step-2": "complete", "step-3": "partial"}
    for words in (["verify"], ["show"], ["export", copy / "out"]):
        said = ckpt(words[0], saved, *words[1:], "--name", "step-1", code=1 if words[0] == "verify" else 2)
        assert "bytes and should have" in said
    ckpt("rm", saved, "--name", "step-1", "--yes")
    ckpt("rm", saved, "--name", "step-3", "--yes")
    assert [path.name for path in saved.iterdir()] == ["step-2"]

    os.truncate(copy / "store" / "data.bin", 4096)
    (snapshot,) = listed(copy / "store")
    assert snapshot["state"] == "damaged"
    assert "truncated" in ckpt("verify", copy / "store", code=1)
    (copy / "store" / "manifest.json").write_text("{")
    assert "truncated or damaged" in ckpt("ls", copy / "store", code=1)


def test_one_that_cannot_be_read_hides_no_other(copy: Path) -> None:
    """A store with a damaged manifest and an odd sequence number beside whole checkpoints."""
    (copy / "store" / "manifest.json").write_text("{")
    index = copy / "saved" / "step-1" / "tierzero.json"
    index.write_bytes(index.read_bytes().replace(b'"sequence": 1', b'"sequence": "x"', 1))
    found = {one["name"]: one["state"] for one in listed(copy)}
    assert found == {"saved/step-1": "complete", "saved/step-2": "complete", "store": "damaged"}
    assert "truncated or damaged" in ckpt("verify", copy, "--name", "store", code=1)
    assert "store is not removed" in ckpt("rm", copy, "--name", "store", "--yes", code=2)
    assert (copy / "store" / "data.bin").exists()


def test_several_of_one_name(copy: Path) -> None:
    """None of them is taken unasked, unless it is the only whole one."""
    shutil.copytree(copy / "store", copy / "other")
    for words in (["show"], ["verify"], ["export", copy / "out"], ["rm", "--yes"]):
        said = ckpt(words[0], copy, *words[1:], "--name", "here", code=2)
        assert "several checkpoints called 'here'" in said
        assert str(copy / "store") in said
        assert str(copy / "other") in said
        assert "step-1" not in said
    assert str(copy / "other") in ckpt("show", copy / "other", "--name", "here")
    os.truncate(copy / "store" / "data.bin", 4096)
    assert f"here in {copy / 'other'} is whole" in ckpt("verify", copy, "--name", "here")
    assert "several checkpoints called" in ckpt("rm", copy, "--name", "here", "--yes", code=2)
    assert len(listed(copy)) == 4


def test_rm(copy: Path) -> None:
    """Asks, needs a name where it is not clear, leaves others alone; with its last snapshot a store goes."""
    saved = copy / "saved"
    assert "--yes" in ckpt("rm", saved / "step-1", code=2)
    assert "several" in ckpt("rm", saved, "--yes", code=2)
    (saved / "step-1" / "mine.txt").write_text("keep")
    assert "mine.txt" in ckpt("rm", saved / "step-1", "--yes", code=2)
    assert (saved / "step-1" / "tierzero.json").is_file()
    (saved / "step-1" / "mine.txt").unlink()
    ckpt("rm", saved / "step-1", "--yes")
    assert [path.name for path in saved.iterdir()] == ["step-2"]
    ckpt("rm", copy / "store", "--yes")
    assert list((copy / "store").iterdir()) == []
    tz.close(tz.offload(Small(), tz.Tiers(nvme=copy / "store", host="64MiB", device="8MiB", compute="cpu")))


@pytest.mark.parametrize("kind", ["on NVMe", "8bit", "split", "wrapped", "borrowed"])
def test_snapshots_of_every_kind(tmp_path: Path, kind: str) -> None:
    """Wherever the bytes lie and whatever format the states have."""
    plain = Small().requires_grad_(kind != "borrowed")
    tiers = tz.Tiers(nvme=tmp_path / "store", host="64MiB", device="8MiB", compute="cpu")
    if kind in ("on NVMe", "borrowed"):
        tiers = tiers_for(plain, "nvme", tmp_path / "store", spare=1 << 20)
    if kind == "borrowed":
        save_model(plain, tmp_path / "weights.safetensors")
        with tz.parameters_on_meta():
            model = Small().requires_grad_(False)
        tz.offload(model, tiers)
        tz.load(model, tmp_path / "weights.safetensors", in_place=True)
        tz.snapshot(model, None, "kind")
    else:
        model = tz.offload(plain, tiers)
        options: Any = {"8bit": {"state_dtype": "8bit"}, "split": {"master": "split"}}.get(kind, {})
        opt: Any = tz.AdamW(model.parameters(), **options)
        if kind == "wrapped":
            opt = tz.wrap_optimizer(torch.optim.Adagrad, model.parameters(), lr=1e-2)
        model(torch.arange(40).view(4, 10)).float().square().mean().backward()
        opt.step()
        tz.snapshot(model, opt, "kind")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    tz.close(model)
    assert "is whole" in ckpt("verify", tmp_path / "store")
    ckpt("show", tmp_path / "store")
    ckpt("export", tmp_path / "store", tmp_path / "out.safetensors", "--tied", "copy")
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == weights.keys()
    assert [name for name, value in weights.items() if not torch.equal(found[name], value)] == []
    if kind == "borrowed":
        flip(tmp_path / "weights.safetensors", 3000)
        assert "weights.safetensors" in ckpt("verify", tmp_path / "store", code=1)


def test_what_is_in_use_stays(copy: Path) -> None:
    tiers = tz.Tiers(nvme=copy / "store", host="64MiB", device="8MiB", compute="cpu")
    model = tz.offload(Small(), tiers, resume=True)
    (snapshot,) = listed(copy / "store")
    assert f"pid {os.getpid()}" in snapshot["in_use"]
    assert "in use" in ckpt("ls", copy / "store")
    assert "is in use by pid" in ckpt("rm", copy / "store", "--yes", code=1)
    assert "is whole" in ckpt("verify", copy / "store")  # reading is no harm
    tz.close(model)
    assert listed(copy / "store")[0]["in_use"] == ""


def test_several_drives(tmp_path: Path) -> None:
    """A striped store is found from its first directory, and a missing member is named."""
    pytest.importorskip("tierzero._native")
    drives = [tmp_path / "a", tmp_path / "b"]
    model = tz.offload(Small(), tz.Tiers(nvme=drives, host="64MiB", device="8MiB", compute="cpu"))
    tz.snapshot(model, tz.AdamW(model.parameters()), "striped")
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    tz.close(model)
    assert "is whole" in ckpt("verify", drives[0])
    assert [one["path"] for one in listed(tmp_path)] == [str(drives[0])] == [listed(drives[1])[0]["path"]]
    ckpt("export", drives[0], tmp_path / "out.safetensors", "--tied", "copy")
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    os.rename(drives[1], tmp_path / "away")
    assert str(drives[1]) in ckpt("ls", drives[0], code=1)
    os.rename(tmp_path / "away", drives[1])
    ckpt("rm", drives[0], "--yes")
    assert [list(drive.iterdir()) for drive in drives] == [[], []]


@pytest.mark.parametrize("command", ["ls", "show", "verify", "rm"])
def test_what_is_no_checkpoint(tmp_path: Path, command: str) -> None:
    (tmp_path / "data.bin").write_text("mine")
    assert "holds no checkpoint" in ckpt(command, tmp_path, code=2)
    assert "is not there" in ckpt(command, tmp_path / "nothing", code=2)
    assert "is a file" in ckpt(command, tmp_path / "data.bin", code=2)
    assert (tmp_path / "data.bin").read_text() == "mine"


def test_in_a_process_of_its_own(made: Path) -> None:
    """As it is called, with help that names the commands."""
    done = tierzero("ckpt", "ls", str(made / "saved"))
    assert done.returncode == 0, done.stderr
    assert "step-2" in done.stdout
    said = ckpt("--help")
    assert all(command in said for command in ("ls", "show", "verify", "export", "rm"))
    assert "checksums" in ckpt("verify", "--help")
