"""Loads that are staged beside what is there: all or nothing wherever the units lie, whatever goes wrong on the way."""

from __future__ import annotations

import errno
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Tied
from oracle import Tiered, batches, make, same, tiered, tiers_for
from saves import step, weights

import tierzero as tz
from tierzero.checkpoint.index import read_index
from tierzero.checkpoint.reader import Parts, Reader
from tierzero.checkpoint.verify import BLOCK
from tierzero.storage.store import Store

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
DATA = "__0_0.distcp"


def everything(run: Tiered) -> list[torch.Tensor]:
    """All bytes that a load may change."""
    states = [run.optimizer.state[param] for param in run.model.parameters()]
    return [
        *weights(run.model).values(),
        *(state[part].read() for state in states for part in ("exp_avg", "exp_avg_sq")),
    ]


def held(run: Tiered) -> int:
    """Bytes of the store that something refers to."""
    store = run.engine.store
    return 0 if store is None else sum(extent.capacity for extent in store.space.live())


@pytest.mark.parametrize("placement", ["nvme", "mixed", "host"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_changed_byte_wherever_units_lie(placement: str, verify: bool, tmp_path: Path) -> None:
    """Nothing is changed and nothing is left; then the same checkpoint, whole again, is loaded."""
    model = make(Tied, torch.bfloat16)
    with tiered(model, tiers_for(model, placement, tmp_path / "store")) as run:
        step(run, batches(2))
        folder = tmp_path / "save"
        tz.save(run.model, folder, run.optimizer, wait=True)
        then = everything(run)
        step(run, batches(2))
        index, raw, chosen = read_index(folder), (folder / DATA).read_bytes(), random.Random(5)
        for key in [key for key in sorted(index.tensors) if index.tensors[key].nbytes > 4]:
            staged = placement == "nvme" and ("exp_avg" in key or "master" in key)
            if not verify and not staged:
                continue  # found as it is used, with others used before it
            data, piece = bytearray(raw), index.tensors[key].pieces[0]
            data[piece.at + chosen.randrange(piece.nbytes)] ^= 1 << chosen.randrange(8)
            (folder / DATA).write_bytes(data)
            before, space = everything(run), held(run)
            with pytest.raises(tz.StoreCorruptError, match=rf"{key} .* does not match its checksum"):
                tz.load(run.model, folder, run.optimizer, verify=verify)
            assert all(same(one, other) for one, other in zip(everything(run), before, strict=True))
            assert held(run) == space
        (folder / DATA).write_bytes(raw)
        tz.load(run.model, folder, run.optimizer, verify=verify)
        assert all(same(one, other) for one, other in zip(everything(run), then, strict=True))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_no_room_beside_what_is_there(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the drive has no room for new versions, a pass of its own finds what is damaged, and the load is right."""
    model = make(Tied, torch.bfloat16)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        step(run, batches(2))
        folder = tmp_path / "save"
        tz.save(run.model, folder, run.optimizer, wait=True)
        then = everything(run)
        step(run, batches(2))
        allocate, asked = Store.allocate, [0]

        def full(store: Store, nbytes: int, name: str) -> Any:
            asked[0] += 1
            if asked[0] == count + 1:
                raise OSError(errno.ENOSPC, "no room (injected)", store.path)
            return allocate(store, nbytes, name)

        raw, key = (folder / DATA).read_bytes(), "optimizer.state.embed.weight.exp_avg"
        piece = read_index(folder).tensors[key].pieces[0]
        (folder / DATA).write_bytes(raw[: piece.at] + bytes([raw[piece.at] ^ 1]) + raw[piece.at + 1 :])
        before, space = everything(run), held(run)
        monkeypatch.setattr(Store, "allocate", full)
        with pytest.raises(tz.StoreCorruptError, match=key):
            tz.load(run.model, folder, run.optimizer)
        assert all(same(one, other) for one, other in zip(everything(run), before, strict=True))
        assert held(run) == space
        (folder / DATA).write_bytes(raw)
        asked[0] = 0
        tz.load(run.model, folder, run.optimizer)
        assert asked[0] > count
        assert all(same(one, other) for one, other in zip(everything(run), then, strict=True))


def test_things_over_several_blocks(tmp_path: Path) -> None:
    """Objects that begin anywhere, tensors larger than a block: each changed byte is found and its thing is named."""
    model = make(Tied)
    tensor = torch.randn(BLOCK // 4 + 777)
    states = {"odd": "x" * 4099, "text": "y" * (BLOCK + 12345), "values": {"tensor": tensor}}
    with tiered(model, tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as run:
        tz.save(run.model, tmp_path / "save", states=states, wait=True)
    with Reader(tmp_path / "save") as reader:
        assert sorted(key for key, _ in reader.verify()) == sorted([*reader.index.tensors, *reader.index.objects])
        some = {"states.text", "model.embed.weight"}
        assert {key for key, _ in reader.verify(some)} == some
        objects = {key: (one.start, one.length) for key, one in reader.index.objects.items()}
        stored = reader.index.tensors["states.values.tensor"]
        objects["states.values.tensor"] = (stored.pieces[0].start, stored.pieces[0].length)
    data = tmp_path / "save" / DATA
    raw = data.read_bytes()
    edges = range(BLOCK, len(raw), BLOCK)
    for key in ("states.text", "states.values.tensor"):
        start, length = objects[key]
        inside = [at for edge in edges for at in (edge - 1, edge) if start <= at < start + length]
        for at in [start, start + length // 2, start + length - 1, *inside]:
            data.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
            with Reader(tmp_path / "save") as reader, pytest.raises(tz.StoreCorruptError, match=key):
                list(reader.verify())
            data.write_bytes(raw)


def test_parts_in_any_order(tmp_path: Path) -> None:
    """A tensor is the same however it is read, and compared when its last part is."""
    model = make(Tied)
    with tiered(model, tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as run:
        tz.save(run.model, tmp_path / "save", wait=True)
        expected = run.model.state_dict()["embed.weight"].clone().view(-1)
    data = tmp_path / "save" / DATA
    with Reader(tmp_path / "save") as reader:
        piece = reader.index.tensors["model.embed.weight"].pieces[0]
        cuts = [*range(0, expected.numel(), 64), expected.numel()]
        parts = list(pairwise(cuts))
        random.Random(1).shuffle(parts)
        for changed in (False, True):
            if changed:
                with data.open("r+b") as file:
                    file.seek(piece.at + 5)
                    file.write(bytes([data.read_bytes()[piece.at + 5] ^ 1]))
            source, out = Parts(reader, "model.embed.weight"), torch.empty_like(expected)
            for first, last in parts[:-1]:
                source.read(first, out[first:last])
            first, last = parts[-1]
            if changed:
                with pytest.raises(tz.StoreCorruptError, match=r"model\.embed\.weight"):
                    source.read(first, out[first:last])
            else:
                source.read(first, out[first:last])
                assert same(out, expected)


def read_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the bytes that each load reads of its data file."""
    found: list[int] = []
    close = Reader.close

    def counted(reader: Reader) -> None:
        found.append(reader.file.bytes_read)
        close(reader)

    monkeypatch.setattr(Reader, "close", counted)
    return found


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(64, 512), *[torch.nn.Linear(512, 512) for _ in range(4)])


def ids_step(run: Tiered) -> None:
    run.model(torch.arange(40)).square().mean().backward()
    run.step(0.5)
    run.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["nvme", "mixed", "host"])
def test_a_load_reads_once(dtype: torch.dtype, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a model that was not trained yet, wherever units lie; one that was trained and lies in host memory has its
    states compared first.
    """
    model = make(wide, dtype)
    with tiered(model, tiers_for(model, placement, tmp_path / "one")) as run:
        ids_step(run)
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        then = everything(run)
    size = (tmp_path / "save" / DATA).stat().st_size
    found = read_of(monkeypatch)
    model = make(wide, dtype, seed=3)
    with tiered(model, tiers_for(model, placement, tmp_path / "two")) as run:
        for _ in range(2):
            tz.load(run.model, tmp_path / "save", run.optimizer)
            assert all(same(one, other) for one, other in zip(everything(run), then, strict=True))
            ids_step(run)
    again = 8 / (12 if dtype == torch.float32 else 14) * size  # the moments
    assert found[0] < 1.05 * size  # with hyper-parameters and the rest of pages
    assert (found[1] > again + 0.9 * size) if placement == "host" else (found[1] < 2 * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["nvme", "mixed", "host"])
def test_a_changed_byte_before_the_first_step(dtype: torch.dtype, placement: str, tmp_path: Path) -> None:
    """What was read into host memory is brought back: every value, and training as it would have been."""
    model, other = make(Tied, dtype), make(Tied, dtype, seed=8)
    with tiered(other, tiers_for(other, "host", tmp_path / "other")) as run:
        step(run, batches(2))
        folder = tmp_path / "save"
        tz.save(run.model, folder, run.optimizer, wait=True)
    index, raw, chosen = read_index(folder), (folder / DATA).read_bytes(), random.Random(5)
    plain = make(Tied, dtype)
    tiers = tiers_for(model, placement, tmp_path / "store")
    with tiered(model, tiers) as run, tiered(plain, tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as expected:
        before = everything(run)
        for key in [key for key in sorted(index.tensors) if index.tensors[key].nbytes > 4]:
            data, piece = bytearray(raw), index.tensors[key].pieces[0]
            data[piece.at + chosen.randrange(piece.nbytes)] ^= 1 << chosen.randrange(8)
            (folder / DATA).write_bytes(data)
            for verify in (True, False):
                with pytest.raises(tz.StoreCorruptError, match=rf"{key} .* does not match its checksum"):
                    tz.load(run.model, folder, run.optimizer, verify=verify)
                assert all(same(one, other) for one, other in zip(everything(run), before, strict=True)), key
        for one, other in zip(batches(4, 2), batches(4, 2), strict=True):
            losses = [step(each, iter([ids]), micro=(0, 1)) for each, ids in ((run, one), (expected, other))]
            assert same(losses[0][0], losses[1][0])
        assert all(same(one, other) for one, other in zip(everything(run), everything(expected), strict=True))


def test_gradients_and_their_readers_keep_what_they_have(tmp_path: Path) -> None:
    """Accumulated ones, and one that somebody has kept: a load that fails leaves both, and one that does not leaves the
    latter.
    """
    model = make(Tied)
    with tiered(model, tiers_for(model, "host", tmp_path / "store")) as run:
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        raw = (tmp_path / "save" / DATA).read_bytes()
        piece = read_index(tmp_path / "save").tensors["optimizer.state.embed.weight.exp_avg_sq"].pieces[0]
        data = bytearray(raw)
        data[piece.at] ^= 1
        step(run, batches(2), stop=False)
        kept = {name: param.grad for name, param in run.model.named_parameters()}
        values = {name: grad.clone() for name, grad in kept.items() if grad is not None}
        for dropped in (False, True):
            if dropped:
                run.zero_grad()
            (tmp_path / "save" / DATA).write_bytes(data)
            with pytest.raises(tz.StoreCorruptError, match="exp_avg_sq"):
                tz.load(run.model, tmp_path / "save", run.optimizer)
            assert all(same(kept[name].clone(), value) for name, value in values.items())  # type: ignore[union-attr]
            (tmp_path / "save" / DATA).write_bytes(raw)
            if dropped:
                tz.load(run.model, tmp_path / "save", run.optimizer)
                assert all(same(kept[name].clone(), value) for name, value in values.items())  # type: ignore[union-attr]


def test_a_model_without_values_stays_without(tmp_path: Path) -> None:
    """Built on the meta device: after a load that failed its parameters still have to be given values."""
    model = make(Tied)
    with tiered(model, tiers_for(model, "host", tmp_path / "store")) as run:
        step(run, batches(2))
        tz.save(run.model, tmp_path / "save", run.optimizer, wait=True)
        then = everything(run)
    raw = (tmp_path / "save" / DATA).read_bytes()
    piece = read_index(tmp_path / "save").tensors["optimizer.state.embed.weight.exp_avg_sq"].pieces[0]
    (tmp_path / "save" / DATA).write_bytes(raw[: piece.at] + bytes([raw[piece.at] ^ 1]) + raw[piece.at + 1 :])
    with tz.parameters_on_meta():
        blank = Tied()
    with tiered(blank, tz.Tiers(host="1GiB", device="1GiB", compute="cpu")) as run:
        with pytest.raises(tz.StoreCorruptError, match="exp_avg_sq"):
            tz.load(run.model, tmp_path / "save", run.optimizer)
        with pytest.raises(tz.TierzeroError, match="was never given a value"):
            run.model(next(batches(1)))
        (tmp_path / "save" / DATA).write_bytes(raw)
        tz.load(run.model, tmp_path / "save", run.optimizer)
        assert all(same(one, other) for one, other in zip(everything(run), then, strict=True))
