"""The store against a model: any sequence of writes, failures, snapshots, crashes and reopenings."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierzero.errors import StoreError
from tierzero.native import NATIVE
from tierzero.storage.extents import Extent
from tierzero.storage.store import Store
from tierzero.tiers.base import BlockFile, open_block_file
from tierzero.tiers.faulty import Fault, FaultyFile

NAMES = st.sampled_from(["a", "b", "c", "d"])
SIZES = st.one_of(st.integers(0, 20), st.integers(4090, 4100), st.integers(0, 40_000))
SNAPSHOTS = st.sampled_from(["s", "t", "u"])


class StoreMachine(RuleBasedStateMachine):
    """`current` and `snapshots` say what the store must hold; `pending` are extents allocated and not yet published."""

    native = False
    drives = 1

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.mkdtemp()
        self.places = [self.directory]
        if self.drives > 1:
            self.places = [str(Path(self.directory, str(index))) for index in range(self.drives)]
        self.engine: Any = None
        if self.native:
            from tierzero.tiers.nvme import NativeEngine

            self.engine = NativeEngine(threads=2, block=1 << 14)
        self.plan: list[Fault] = []
        self.current: dict[str, torch.Tensor] = {}
        self.snapshots: dict[str, dict[str, torch.Tensor]] = {}
        self.latest = ""
        self.pending: list[Extent] = []
        self.seed = 0
        self.open(False)

    def opener(self, path: Any, engine: Any, **options: Any) -> BlockFile:
        return FaultyFile(open_block_file(path, engine, **options), self.plan)

    def open(self, resume: str | bool) -> None:
        self.plan.clear()
        self.store = Store(self.places, engine=self.engine, resume=resume, opener=self.opener)

    def some(self, nbytes: int) -> torch.Tensor:
        self.seed += 1
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(self.seed))

    @initialize(nbytes=SIZES)
    def reserve(self, nbytes: int) -> None:
        self.store.reserve(nbytes)

    @rule(name=NAMES, nbytes=SIZES)
    def put(self, name: str, nbytes: int) -> None:
        data = self.some(nbytes)
        self.runner.run(self.store.put(name, data))
        self.current[name] = data

    @rule(name=NAMES, start=st.floats(0, 1), count=st.floats(0, 1))
    def write(self, name: str, start: float, count: float) -> None:
        old = self.current.get(name)
        if old is None:
            return
        offset = int(start * old.numel())
        data = self.some(int(count * (old.numel() - offset)))
        self.runner.run(self.store.write(name, offset, data))
        new = old.clone()
        new[offset : offset + data.numel()] = data
        self.current[name] = new

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        if self.current.pop(name, None) is not None:
            self.store.remove(name)

    @rule(name=NAMES, nbytes=SIZES)
    def write_without_publishing(self, name: str, nbytes: int) -> None:
        extent, _ = self.runner.run(self.store.write_new(name, self.some(nbytes)))
        self.pending.append(extent)

    @precondition(lambda self: self.pending)
    @rule()
    def discard(self) -> None:
        self.store.discard(self.pending.pop(0))

    @rule(name=NAMES, nbytes=SIZES, kind=st.sampled_from(["error", "short"]))
    def put_fails(self, name: str, nbytes: int, kind: Any) -> None:
        self.plan[:] = [Fault("write", 1, kind, persistent=True)]
        before = self.store.space.live()
        with pytest.raises(OSError, match="injected"):
            self.runner.run(self.store.put(name, self.some(nbytes)))
        assert self.store.space.live() == before
        self.plan.clear()

    @rule(name=SNAPSHOTS, keep=st.sets(SNAPSHOTS))
    def snapshot(self, name: str, keep: set[str]) -> None:
        keep &= set(self.snapshots)
        self.runner.run(self.store.snapshot(name, {"step": self.seed}, keep))
        self.snapshots = {other: held for other, held in self.snapshots.items() if other in keep}
        self.snapshots[name] = dict(self.current)
        self.latest = name

    @rule(name=SNAPSHOTS)
    def snapshot_fails(self, name: str) -> None:
        self.plan[:] = [Fault("sync", 1, persistent=True)]
        with pytest.raises(OSError, match="injected"):
            self.runner.run(self.store.snapshot(name, {}))
        self.plan.clear()

    @rule(name=NAMES)
    def recall(self, name: str) -> None:
        holders = [one for one in self.store.snapshots.values() if name in one.records]
        assert self.store.recall(name) == bool(holders)
        if holders:
            last = max(holders, key=lambda one: one.epoch)
            self.current[name] = self.snapshots[last.name][name]
            assert self.store.recall(name, last.records[name][0])

    @rule(which=st.one_of(st.none(), SNAPSHOTS), clean=st.booleans())
    def end_and_reopen(self, which: str | None, clean: bool) -> None:
        if clean:
            self.store.close()
        else:  # as a killed process leaves it
            self.store.file.close()
            self.store._lock.release(remove=False)
        self.pending.clear()
        if not self.snapshots:
            self.open(False)
            self.current = {}
            return
        with pytest.raises(StoreError, match=repr(self.latest)):
            Store(self.places, engine=self.engine)
        name = which if which in self.snapshots else self.latest
        self.open(name if which else True)
        assert (self.store.stale is None) == clean
        self.current = dict(self.snapshots[name])

    @invariant()
    def extents_are_apart_and_counted(self) -> None:
        live = self.store.space.live()
        assert all(one.end <= two.offset for one, two in pairwise(live))
        held = sum(extent.capacity for extent in live)
        assert held + self.store.space.free_bytes == self.store.space.capacity
        expected = {*self.store.current.values(), *self.pending}
        for snapshot in self.store.snapshots.values():
            expected.update(extent for extent, _ in snapshot.records.values())
        assert {extent for extent in expected if extent.nbytes} == set(live)

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        assert set(self.store.current) == set(self.current)
        assert set(self.store.snapshots) == set(self.snapshots)

        async def check() -> None:
            for name, data in self.current.items():
                out = torch.empty_like(data)
                await self.store.read(name, 0, out)
                assert torch.equal(out, data), name
            for snapshot, records in self.snapshots.items():
                for name, data in records.items():
                    extent, _ = self.store.snapshots[snapshot].records[name]
                    out = torch.empty_like(data)
                    if data.numel():
                        await self.store.file.read(extent.offset, out)
                    assert torch.equal(out, data), (snapshot, name)
            await self.store.verify()

        self.runner.run(check())

    def teardown(self) -> None:
        self.store.close()
        if self.engine is not None:
            self.engine.close()
        self.runner.close()
        for place in self.places:
            left = {entry.name for entry in Path(place).iterdir()} - {"member.json"}
            named = {"manifest.json"} if place == self.places[0] else set()
            assert left == ({"data.bin", *named} if self.snapshots else set()) or left == named
        shutil.rmtree(self.directory)


class NativeStoreMachine(StoreMachine):
    native = True


class StripedStoreMachine(NativeStoreMachine):
    """Over three directories, listed in another order each time; the stripes are small, so that records lie on all."""

    drives = 3
    patch: pytest.MonkeyPatch

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("tierzero.storage.members.STRIPE", 4096)
        self.patch.setattr("tierzero.storage.store._weights", lambda directories: [3, 1, 2])
        super().__init__()

    def open(self, resume: str | bool) -> None:
        places = self.places
        self.places = places[1:] + places[:1]
        super().open(resume)
        self.places = self.store.directories

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


TestPortable = StoreMachine.TestCase
TestPortable.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
if NATIVE is not None:
    TestNative = NativeStoreMachine.TestCase
    TestNative.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
    TestStriped = StripedStoreMachine.TestCase
    TestStriped.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
