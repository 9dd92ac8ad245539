"""The directory that save writes is torch.distributed.checkpoint's: stock torch reads it and goes on training."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Net, Tied
from oracle import HYPER, batches, loss_of, make, same, tiered, tiers_for
from saves import files_of, step, weights
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import tierzero as tz
from tierzero.checkpoint.boxes import boxes
from tierzero.checkpoint.container import LARGE, frame
from tierzero.checkpoint.reader import Reader
from tierzero.units.layout import PAGE

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint"),
]
BF16 = torch.bfloat16
DTYPES = [torch.float32, BF16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint16, torch.complex64]


def raw_of(value: torch.Tensor) -> bytes:
    flat = value.contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 1), (300, 256)])
def test_an_item_is_what_torch_load_reads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Wherever in the file it starts; the elements of a large one begin at a whole page."""
    value = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    for start in (0, 1, 4095, 4096 + 17):
        head, tail = frame(dtype, shape, start)
        found = torch.load(io.BytesIO(head + raw_of(value) + tail), weights_only=True)
        assert found.is_contiguous()
        assert found.shape == value.shape
        assert found.dtype == dtype
        assert raw_of(found) == raw_of(value)
        assert (start + len(head)) % (PAGE if value.nbytes >= LARGE else 64) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 40))
def test_boxes_are_runs_that_make_up_the_tensor(shape: list[int], most: int) -> None:
    """Each is a slice of the tensor and the elements that it says, no larger than asked."""
    value = torch.arange(math.prod(shape)).reshape(shape)
    found = boxes(shape, most)
    runs = []
    for box in found:
        part = value[tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))]
        assert part.shape == box.sizes
        assert part.reshape(-1).tolist() == list(range(box.first, box.first + box.numel))
        assert box.numel <= most
        runs += part.reshape(-1).tolist()
    assert runs == list(range(math.prod(shape)))


@pytest.mark.parametrize("pieces", [1 << 30, 300])
def test_plain_torch_goes_on_from_it(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dcp.load and set_optimizer_state_dict, groups with options of their own; also where tensors are cut to pieces."""
    monkeypatch.setattr("tierzero.checkpoint.data_file.MOST", pieces)

    def groups(model: Any) -> list[dict[str, Any]]:
        params = list(model.parameters())
        return [{"params": params[:3], "lr": 0.02}, {"params": params[3:], "weight_decay": 0.0}]

    model, data = make(Tied), batches(12)
    with tiered(model, tiers_for(model, "mixed", tmp_path / "store"), groups=groups) as run:
        for _ in range(2):
            step(run, data, micro=(0, 1))
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        for _ in range(3):
            step(run, data, micro=(0, 1))
        end = weights(run.model)
    plain = make(Tied, seed=5)
    optimizer = torch.optim.AdamW(groups(plain), **{**HYPER, "lr": 0.5}, fused=True)
    found = {"model": get_model_state_dict(plain), "optimizer": get_optimizer_state_dict(plain, optimizer)}
    dcp.load(found, checkpoint_id=tmp_path / "save")
    set_model_state_dict(plain, found["model"])
    set_optimizer_state_dict(plain, optimizer, found["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, HYPER["lr"]]
    data = batches(12)
    for _ in range(2):
        next(data)
    for _ in range(3):
        (loss_of(plain, next(data)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in plain.named_parameters():
        assert same(param, end[name]), name


def test_keys_and_names(tmp_path: Path) -> None:
    """Torch's canonical layout; a tied tensor is stored once and listed under both names, masters of 16-bit parameters
    and gradients have keys of their own.
    """
    model = make(Tied, BF16)
    with tiered(model, tiers_for(model, "host", tmp_path)) as run:
        step(run, batches(2), stop=False)
        tz.save(run.model, tmp_path / "save", run.optimizer, states={"n": 3}, meta={"a": 1}, wait=True)
        assert files_of(tmp_path / "save") == [".metadata", "__0_0.distcp", "tierzero.json"]
        metadata = dcp.FileSystemReader(tmp_path / "save").read_metadata()
        keys = set(metadata.state_dict_metadata)
        state = get_model_state_dict(make(Tied, BF16))
        assert {f"model.{name}" for name in state} == {key for key in keys if key.startswith("model.")}
        for part in ("step", "exp_avg", "exp_avg_sq", "master"):
            assert f"optimizer.state.embed.weight.{part}" in keys
        assert {"gradients.embed.weight", "states.n", "meta", "optimizer.param_groups.0.lr"} <= keys
        places = {index.fqn: place for index, place in metadata.storage_data.items()}
        assert places["model.embed.weight"] == places["model.head.weight"]
        found: dict[str, Any] = {"model": state, "states": {"n": 0}, "meta": None}
        dcp.load(found, checkpoint_id=tmp_path / "save")
        assert found["states"] == {"n": 3}
        assert found["meta"] == {"a": 1}
        assert same(found["model"]["head.weight"], weights(run.model)["embed.weight"])


def test_the_whole_directory_as_one_file(tmp_path: Path) -> None:
    """Torch's own converter takes it, tensors of every unit and all."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tiered(make(Net), tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as run:
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        dcp_to_torch_save(tmp_path / "save", tmp_path / "one.pt")
        found = torch.load(tmp_path / "one.pt", weights_only=False)
        plain = make(Net, seed=3)
        plain.load_state_dict(found["model"])
        assert all(same(value, weights(run.model)[name]) for name, value in plain.state_dict().items())
        assert set(found["optimizer"]["state"]) == set(weights(run.model))


def test_the_reader_finds_everything_right(tmp_path: Path) -> None:
    """Every tensor and object is checked once."""
    with tiered(make(Net), tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as run:
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
    with Reader(tmp_path / "save") as reader:
        assert sorted(key for key, _ in reader.verify()) == sorted([*reader.index.tensors, *reader.index.objects])
        assert same(reader.tensor("model.embed.weight"), make(Net).embed.weight)
