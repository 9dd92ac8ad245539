"""Checkpoints that were made to do harm."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import Net
from oracle import Tiered, make, same, tiered
from saves import saved_once, weights

import tierzero as tz
from tierzero.storage.checksum import checksum, to_hex

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Tiered]:
    with saved_once(tmp_path) as found:
        yield weakref.proxy(found)  # pytest keeps what it gives longer than no_leaks looks


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any], raw: bytes) -> None:
    """The index `raw` after `change`, with checksums that fit."""
    first, _, rest = raw.partition(b"\n")
    value = json.loads(rest)
    change(value)
    text = json.dumps(value).encode()
    head = {**json.loads(first), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / "tierzero.json").write_bytes(json.dumps(head).encode() + b"\n" + text + b"\n")


def refused(run: Tiered, path: Path, match: str, **options: Any) -> None:
    """Loading fails as for a damaged file, and nothing was changed."""
    before, rng = weights(run.model), torch.get_rng_state()
    with pytest.raises(tz.StoreCorruptError, match=match):
        tz.load(run.model, path, run.optimizer, **options)
    assert all(same(one, before[name]) for name, one in weights(run.model).items())
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_index_that_lies(run: Tiered, tmp_path: Path) -> None:
    """Numbers out of range, other types, paths that are none: all with a checksum that is right."""
    folder = tmp_path / "saves" / "one"
    raw = (folder / "tierzero.json").read_bytes()
    known = json.loads(raw.partition(b"\n")[2])
    tensor, value = "model.embed.weight", "optimizer.param_groups.0.lr"
    state = next(key for key in known["paths"] if key.startswith("optimizer.state"))

    def put(where: list[Any], what: Any) -> Callable[[dict[str, Any]], None]:
        def change(index: Any) -> None:
            for key in where[:-1]:
                index = index[key]
            index[where[-1]] = what

        return change

    numbers: list[Any] = [-1, 1 << 70, float("inf"), float("nan"), None, "x", []]
    changes = [put(["tensors", tensor, 2, 0, at], one) for at in range(2, 7) for one in numbers]
    changes += [put(["tensors", tensor, 2, 0, 1], one) for one in ("x", [-1], [10**12], [1, 2])]
    changes += [put(["tensors", tensor, 1], one) for one in ([-4, -4], [1 << 70], [0, 1 << 70], [float("inf")], 5)]
    changes += [put(["tensors", tensor, 0], one) for one in ("Tensor", "qint8", "__name__", "", None)]
    changes += [put(["objects", value, at], one) for at in (0, 1) for one in numbers]
    changes += [put([part], one) for part in ("aliases", "paths", "extra") for one in (None, 5, "x", {"a": None})]
    changes += [put(["aliases", "model.x"], one) for one in ("model.nothing", None, [1])]
    odd: list[Any] = [None, 5, [], ["optimizer"], ["optimizer", "state", 5], ["optimizer", "param_groups", "x", "lr"]]
    changes += [put(["paths", key], one) for key in (state, value) for one in odd]
    changes += [put(["extra", "made_by"], one) for one in (None, [], [1], "x")]
    changes += [put(["extra", "random", key], 5) for key in ("torch", "python", "numpy")]
    changes += [put(["files"], {"__0_0.distcp": known["files"]["__0_0.distcp"], "../../etc/passwd": 1})]
    for change in changes:
        rewrite(folder, change, raw)
        with pytest.raises(tz.StoreCorruptError, match=r"tierzero\.json"):
            tz.load(run.model, folder, run.optimizer)
    refused(run, folder, r"tierzero\.json")


@pytest.mark.parametrize("key", ["optimizer.param_groups.0.lr", "optimizer.param_groups.0.params", "states.plain"])
def test_a_value_that_would_run_code(run: Tiered, key: str, tmp_path: Path) -> None:
    """With a checksum that is right: it does not run, the file and the value are named, and nothing was changed."""
    folder, told = tmp_path / "saves" / "one", tmp_path / "told"

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {told}",)

    out = io.BytesIO()
    torch.save(Evil(), out)
    raw, data = (folder / "tierzero.json").read_bytes(), folder / "__0_0.distcp"
    for payload in (out.getvalue(), pickle.dumps(Evil(), 2), b"garbage"):
        at, whole = data.stat().st_size, data.read_bytes()
        data.write_bytes(whole + payload)
        place = [at, len(payload), to_hex(checksum(torch.frombuffer(bytearray(payload), dtype=torch.uint8)))]

        def change(index: dict[str, Any], key: str = key, place: Any = place, size: int = at + len(payload)) -> None:
            index["objects"][key] = place
            index["files"]["__0_0.distcp"] = size

        rewrite(folder, change, raw)
        refused(run, folder, rf"{key} .*__0_0\.distcp\) is no value that is loaded safely", states={"plain": {}})
        data.write_bytes(whole)
    assert not told.exists()


@pytest.mark.parametrize("kind", ["directory", "pipe", "loop"])
def test_what_is_no_file(run: Tiered, kind: str, tmp_path: Path) -> None:
    """In the place of any file of a checkpoint, and in other directories beside those that are saved."""
    odd = tmp_path / "saves" / "odd"
    odd.mkdir()

    def put(path: Path) -> None:
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(path)

    put(odd / "tierzero.json")
    (tmp_path / "saves" / "foreign").mkdir()
    (tmp_path / "saves" / "foreign" / "tierzero.json").write_text('{"format": "tierzero checkpoint", "sequence": "x"}')
    two = tmp_path / "saves" / "two"
    tz.save(run.model, two, run.optimizer, keep=5, wait=True)
    with pytest.raises(tz.TierzeroError, match="is no checkpoint"):
        tz.load(run.model, odd, run.optimizer)
    for name in (".metadata", "__0_0.distcp"):
        (two / name).rename(two / "away")
        put(two / name)
        refused(run, two, name)
        (two / name).rmdir() if kind == "directory" else (two / name).unlink()
        (two / "away").rename(two / name)
    put(tmp_path / "weights.safetensors")
    kinds: Any = tz.StoreCorruptError if kind == "pipe" else FileNotFoundError
    with pytest.raises(kinds, match=r"weights\.safetensors"):
        tz.load(run.model, tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("offset", one) for one in (-4096, "x", None, 1 << 70)),
        *(("length", one) for one in (-1, None, 1 << 70)),
        *(("relative_path", one) for one in ("/etc/passwd", "../x", 5, None, ".")),
        *(("size", one) for one in (None, [-3, -4], 5)),
        *(("dtype", one) for one in (None, "float32")),
        *(("chunks", one) for one in (None, 5, [5])),
        ("state_dict_metadata", [1]),
    ],
)
def test_a_distributed_checkpoint_that_lies(tmp_path: Path, field: str, value: Any) -> None:
    """Its `.metadata` is right as a pickle and describes what cannot be: the file is named."""
    plain = make(Net)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    metadata: Any = pickle.loads(file.read_bytes())
    one = metadata.state_dict_metadata["model.head.weight"]
    if field in ("offset", "length", "relative_path"):
        for info in metadata.storage_data.values():
            object.__setattr__(info, field, value)
    else:
        owner = {"dtype": one.properties, "state_dict_metadata": metadata}.get(field, one)
        object.__setattr__(owner, field, value)
    file.write_bytes(pickle.dumps(metadata))
    with tiered(make(Net), tz.Tiers(host="64MiB", device="64MiB", compute="cpu")) as run:
        before = weights(run.model)
        with pytest.raises(tz.StoreCorruptError, match=str(tmp_path / "dcp")):
            tz.load(run.model, tmp_path / "dcp")
        assert all(same(one, before[name]) for name, one in weights(run.model).items())
