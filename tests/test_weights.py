"""Weights from files: what fits is loaded bit for bit, what does not is refused by name before anything is changed."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed.checkpoint as dcp
from oracle import Tiered, batches, loss_of, make, same, tiered, tiers_for
from safetensors.torch import load_file, save_file
from torch import nn

import tierzero as tz
from tierzero.checkpoint.weights import load_weights

pytestmark = pytest.mark.usefixtures("no_leaks")


@contextmanager
def empty(directory: Path, factory: Any = models.Net, dtype: torch.dtype = torch.float32) -> Iterator[Tiered]:
    """A model without values."""
    with torch.device("meta"):
        model = factory().to(dtype)
    with tiered(model, tiers_for(model, "nvme", directory / "store")) as run:
        yield run


def flat(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal(run: Tiered, plain: nn.Module) -> bool:
    mine = {name: value.clone() for name, value in run.model.state_dict().items()}
    return all(same(mine[name], value) for name, value in plain.state_dict().items())


def sharded(state: dict[str, torch.Tensor], folder: Path, shards: int = 3) -> Path:
    """As transformers lays out checkpoints."""
    folder.mkdir()
    names = sorted(state)
    placed = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: state[name] for name in names if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def as_file(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_directory(state: dict[str, torch.Tensor], folder: Path) -> Path:
    (folder / "plain").mkdir()
    save_file(state, folder / "plain" / "some.safetensors")
    return folder / "plain"


def as_dcp(state: dict[str, torch.Tensor], folder: Path) -> Path:
    dcp.save({"model": state, "optim": {"m": torch.zeros(2)}, "step": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def as_bare_dcp(state: dict[str, torch.Tensor], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.parametrize(
    "write",
    [as_file, as_directory, lambda state, folder: sharded(state, folder / "shards"), as_dcp, as_bare_dcp],
    ids=["file", "directory", "shards", "dcp", "bare-dcp"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_checkpoint(write: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = make(models.BatchNormed)  # it has buffers
    with tz.parameters_on_meta():
        model = models.BatchNormed().to(dtype)
    path = write(flat(plain), tmp_path)
    plain.to(dtype)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        assert load_weights(run.model, path) == ([], [])
        assert equal(run, plain)
        ids = next(batches(1))
        assert same(loss_of(run.model, ids), loss_of(plain, ids))


def test_shards_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """Rows, columns and blocks that several ranks wrote; here each is written as its own chunk."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
    from torch.distributed.checkpoint.planner_helpers import MetadataIndex, TensorProperties, TensorWriteData

    class Cut(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            items = []
            for name, value in self.state_dict.items():
                for place, sizes in boxes(value.shape):
                    data = TensorWriteData(
                        ChunkStorageMetadata(torch.Size(place), torch.Size(sizes)),
                        TensorProperties.create_from_tensor(value),
                        value.size(),
                    )
                    index = MetadataIndex(name, torch.Size(place))
                    items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self.plan = SavePlan(items)
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            assert write_item.tensor_data is not None
            chunk = write_item.tensor_data.chunk
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            return self.state_dict[write_item.index.fqn][box].clone()

    def boxes(shape: torch.Size) -> list[tuple[list[int], list[int]]]:
        cuts = [[(0, n // 3), (n // 3, n - n // 3)] if n > 3 else [(0, n)] for n in shape]
        found: list[tuple[list[int], list[int]]] = [([], [])]
        for cut in cuts:
            found = [([*o, a], [*n, b]) for o, n in found for a, b in cut]
        return found

    plain = make(models.Net)
    dcp.save(flat(plain), checkpoint_id=tmp_path / "dcp", planner=Cut(flatten_state_dict=False), no_dist=True)
    with empty(tmp_path) as run:
        load_weights(run.model, tmp_path / "dcp")
        assert equal(run, plain)


def test_masters_and_moments_follow(tmp_path: Path) -> None:
    """Weights loaded after steps become the masters too, as a state dict loaded into the plain model would not be."""
    path = as_file(flat(make(models.Net, seed=5)), tmp_path)
    model = make(models.Net, torch.bfloat16)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        loss_of(run.model, next(batches(1))).backward()
        run.step()
        run.zero_grad()
        load_weights(run.model, path)
        for param in run.model.parameters():
            assert same(run.optimizer.state[param]["master"].read(), param.read().float())  # type: ignore[operator]


def test_ties_and_prefixes(tmp_path: Path) -> None:
    """One name of a shared parameter is enough; an inner model's name may be there or not."""
    plain = make(models.Tied)
    state = flat(plain)
    del state["head.weight"]
    with empty(tmp_path, models.Tied) as run:
        load_weights(run.model, as_file(state, tmp_path))
        assert equal(run, plain)

    class Outer(nn.Module):
        base_model_prefix = "net"

        def __init__(self) -> None:
            super().__init__()
            self.net = models.Net()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.net(ids)

    for factory, written in ((Outer, models.Net), (models.Net, models.Net)):
        source = make(written, seed=3)
        with empty(tmp_path / factory.__name__, factory) as run:
            load_weights(run.model, as_file(flat(source), tmp_path))
            there = run.model.net if factory is Outer else run.model  # type: ignore[union-attr]
            assert all(same(a.read(), b) for a, b in zip(there.parameters(), source.parameters(), strict=True))  # type: ignore[union-attr]


def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    plain = make(models.Net)
    state = flat(plain)
    first = next(iter(state))
    wrong = {
        "missing": {name: value for name, value in state.items() if name != first},
        "unexpected stranger.*weights.safetensors": {**state, "stranger": torch.zeros(2)},
        "shape": {**state, first: torch.zeros(3, 3)},
        "quantised": {**state, first: state[first].to(torch.int8)},
    }
    model = make(models.Net, seed=9)
    before = flat(model)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        for said, values in wrong.items():
            with pytest.raises(tz.TierzeroError, match=said) as caught:
                load_weights(run.model, as_file(values, tmp_path))
            assert str(tmp_path) in str(caught.value)
            assert "stranger" in str(caught.value) or first in str(caught.value)
        assert all(same(value.clone(), before[name]) for name, value in run.model.state_dict().items())
        both = {**wrong["missing"], "stranger": torch.zeros(2)}
        assert load_weights(run.model, as_file(both, tmp_path), strict=False) == ([first], ["stranger"])
        now = run.model.state_dict()
        assert same(now[first].clone(), before[first])
        assert all(same(now[name].clone(), value) for name, value in state.items() if name != first)


def damage(kind: str, folder: Path, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    if kind == "gone":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        path.write_bytes(raw[:-7])
    elif kind == "longer":
        path.write_bytes(bytes(raw) + b"0" * 9)
    elif kind == "header":
        raw[10:14] = b"\xff\xfe{["
        path.write_bytes(raw)
    elif kind == "length":
        path.write_bytes(struct.pack("<Q", 1 << 62) + raw[8:])
    elif kind == "pickle":
        torch.save({"a": torch.zeros(2)}, path)
    elif kind == "twice":
        save_file({"head.weight": torch.zeros(24, 8)}, folder / "model-1.safetensors")
    elif kind == "index":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}')
    elif kind == "outside":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    elif kind == "names":
        end = 8 + int.from_bytes(raw[:8], "little")
        content = raw[8:end].decode().rstrip()
        name = content.split('"')[1]
        double = content[:-1] + "," + content[content.index(f'"{name}"') : content.index("}") + 1] + "}"
        path.write_bytes(
            struct.pack("<Q", len(double)) + double.encode() + raw[8 + int.from_bytes(raw[:8], "little") :]
        )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gone", "model-0.safetensors, in which .* places .*, is missing"),
        ("empty", "model-0.safetensors .* empty"),
        ("cut", "model-0.safetensors .*truncated: tensor"),
        ("longer", "model-0.safetensors .*9 bytes behind its last tensor"),
        ("header", "model-0.safetensors .*damaged"),
        ("length", "model-0.safetensors .*header would have"),
        ("pickle", "model-0.safetensors is a pickled torch file"),
        ("twice", "head.weight is in .*model-0.safetensors and in .*model-1.safetensors"),
        ("index", "index.json is not a safetensors index"),
        ("outside", "index.json names '../x.safetensors', which is no file beside it"),
        ("names", "model-0.safetensors .*holds .* twice"),
    ],
)
def test_damaged_safetensors(kind: str, said: str, tmp_path: Path) -> None:
    """A sentence with the file (and the tensor where it is known); the model is as it was."""
    folder = sharded(flat(make(models.Net)), tmp_path / "shards", 3)
    state = flat(make(models.Net))
    if kind == "twice":
        first = sorted(state)[0]
        save_file({"head.weight": torch.zeros(24, 8), first: state[first]}, folder / "model-0.safetensors")
    damage(kind, folder, folder / "model-0.safetensors")
    model = make(models.Net, seed=9)
    before = flat(model)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        with pytest.raises((tz.TierzeroError, FileNotFoundError), match=said):
            load_weights(run.model, folder)
        assert all(same(value.clone(), before[name]) for name, value in run.model.state_dict().items())


def test_other_places(tmp_path: Path) -> None:
    """Not there, nothing in it, only pickles, not offloaded, in use, closed."""
    (tmp_path / "pickles").mkdir()
    torch.save({}, tmp_path / "pickles" / "pytorch_model.bin")
    plain = make(models.Net)
    path = as_file(flat(plain), tmp_path)
    with pytest.raises(tz.TierzeroError, match="not an offloaded model"):
        load_weights(plain, path)
    with empty(tmp_path) as run:
        with pytest.raises(FileNotFoundError, match="nowhere"):
            load_weights(run.model, tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin.*pickles.*safe_serialization"):
            load_weights(run.model, tmp_path / "pickles")
        load_weights(run.model, path)
        with tz.unsharded(run.model.embed), pytest.raises(tz.TierzeroError, match="in use"):  # type: ignore[arg-type]
            load_weights(run.model, path)
    with pytest.raises(tz.TierzeroError, match="closed"):
        load_weights(run.model, path)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/tierzero-was-here",)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("evil", r"refers to posix\.system"),
        ("noise", "metadata"),
        ("other", "holds a dict"),
        ("gone", "__0_0.distcp, in which a part of .* lies, is missing"),
        ("cut", "__0_0.distcp is truncated: a part of "),
        ("bytes", "part of .* in .*__0_0.distcp is damaged"),
        ("outside", "outside its directory"),
        ("hole", "parts of .* do not make up its shape"),
    ],
)
def test_damaged_distributed_checkpoints(kind: str, said: str, tmp_path: Path) -> None:
    """Nothing in a checkpoint can run code, and what is damaged is named."""
    plain = make(models.Net)
    folder = as_dcp(flat(plain), tmp_path)
    data = folder / "__0_0.distcp"
    metadata: Any = pickle.loads((folder / ".metadata").read_bytes())
    if kind == "evil":
        metadata.planner_data = Evil()
    elif kind == "outside":
        for info in metadata.storage_data.values():
            info.relative_path = "../dcp/__0_0.distcp"
    elif kind == "hole":
        metadata.state_dict_metadata["model.head.weight"].size = torch.Size([25, 8])
    if kind in ("evil", "outside", "hole"):
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    elif kind == "noise":
        (folder / ".metadata").write_bytes(os.urandom(500))
    elif kind == "other":
        (folder / ".metadata").write_bytes(pickle.dumps({}))
    elif kind == "gone":
        data.unlink()
    elif kind == "cut":
        data.write_bytes(data.read_bytes()[:-2000])
    elif kind == "bytes":
        data.write_bytes(bytes(len(data.read_bytes())))
    with empty(tmp_path) as run, pytest.raises((tz.TierzeroError, FileNotFoundError), match=said):
        load_weights(run.model, folder)
    assert not Path("/tmp/tierzero-was-here").exists()


def test_names_are_understood() -> None:
    """Prefixes on both sides, wrapped layers, old spellings; what is left over and what is there twice."""
    from tierzero.checkpoint.names import ignored, match

    wanted = ["model.embed.weight", "model.layers.0.norm.weight", "lm_head.weight"]
    bare = ["embed.weight", "layers.0.norm.gamma", "lm_head.weight"]
    assert match(bare, wanted, "model").found == dict(zip(wanted, bare, strict=True))
    inside = [f"model.{name}" for name in wanted]
    found = match([*inside, "optim.state.x", "step"], wanted, "model")
    assert found.found == dict(zip(wanted, inside, strict=True))
    assert (found.beside, found.unexpected) == (["optim.state.x", "step"], [])
    assert match(wanted, ["embed.weight", "layers.0.norm.weight"], "model").found == {
        "embed.weight": wanted[0],
        "layers.0.norm.weight": wanted[1],
    }
    wrapped = ["base_model.model.model.embed.weight", "base_model.model.model.layers.0.q.base_layer.weight"]
    stored = ["model.embed.weight", "model.layers.0.q.weight"]
    assert match(stored, wrapped).found == dict(zip(wrapped, stored, strict=True))
    assert match(["w.weight_g", "w.weight_v"], ["w.parametrizations.weight.original0"]).unexpected == ["w.weight_v"]
    assert match(["a.gamma", "a.weight"], ["a.weight"]).twice == [("a.weight", "a.gamma", "a.weight")]
    assert ignored(["h.0.attn.bias", "rotary.inv_freq", "x"], [r"attn\.bias"], ["model.rotary.inv_freq"]) == {
        "h.0.attn.bias",
        "rotary.inv_freq",
    }


def test_large_tensors_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a part, the values are the same."""
    plain = make(models.Net)
    path = as_file(flat(plain), tmp_path)
    for part in (4, 12, 100, 1 << 20):
        monkeypatch.setattr("tierzero.units.parts.PART", part)
        with empty(tmp_path / str(part)) as run:
            load_weights(run.model, path)
            out = tz.export(run.model, tmp_path / f"{part}.safetensors")
        exported = load_file(out)
        assert all(same(exported[name], value) for name, value in flat(plain).items())
