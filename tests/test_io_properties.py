"""Every size, alignment, offset and striping through every engine, byte for byte against a plain model of the file."""

from __future__ import annotations

import errno
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drives
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from io_model import PAGE, FileModel, owners_of

from tierzero import _native

BLOCK = 8192
NOISE = np.random.default_rng(0).integers(1, 256, 1 << 18, np.uint8)
LOOSE = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], print_blob=True
)
KINDS = {"uring": ("uring", True), "pool": ("pool", True), "buffered": ("auto", False)}


@dataclass(frozen=True)
class Layout:
    """Members with their weights; `plain` ones lie where there is no direct I/O."""

    weights: tuple[int, ...]
    stripe: int
    plain: tuple[bool, ...]


@dataclass(frozen=True)
class Act:
    """One thing done to a file, at page `page`."""

    what: str
    page: int
    nbytes: int
    shift: int
    noise: int


layouts = st.integers(1, 4).flatmap(
    lambda n: st.builds(
        Layout,
        st.tuples(*[st.integers(1, 5)] * n),
        st.sampled_from([1, 2, 3, 5, 16]).map(lambda pages: pages * PAGE),
        st.tuples(*[st.booleans()] * n),
    )
)
near = st.builds(
    lambda unit, times, more: max(0, unit * times + more),
    st.sampled_from([PAGE, BLOCK, 3 * PAGE, 5 * PAGE]),
    st.integers(0, 5),
    st.integers(-2, 2),
)
sizes = st.one_of(st.integers(0, 20_000), near)
shifts = st.one_of(st.sampled_from([0, 1, 512, 4095]), st.integers(0, 4095))
acts = st.lists(
    st.builds(
        Act,
        st.sampled_from(["write", "write", "write", "read", "truncate", "preallocate"]),
        st.integers(0, 40),
        sizes,
        shifts,
        st.integers(0, 1 << 17),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, _native.Engine]]:
    kinds = {name: kind for name, (kind, _) in KINDS.items() if name != "uring" or not _native.probe_uring()}
    made = {name: _native.Engine(kind=kind, block=BLOCK, depth=3) for name, kind in kinds.items()}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A directory with direct I/O, if there is any here, and one without it (the same where none can be mounted)."""
    whole = tmp_path_factory.mktemp("places")
    (whole / "disk").mkdir()
    with ExitStack() as stack:
        try:
            plain = stack.enter_context(drives.memory_drive(whole / "ram", "mode=700", "ramfs"))
        except pytest.skip.Exception:
            plain = whole / "disk"
        yield whole / "disk", plain


class Opened:
    """A new file of a layout for one engine, next to its model."""

    def __init__(self, layout: Layout, engine: _native.Engine, direct: bool, places: tuple[Path, Path]) -> None:
        self.homes = [Path(tempfile.mkdtemp(dir=place)) for place in places]
        paths = [self.homes[plain] / f"m{i}" for i, plain in enumerate(layout.plain)]
        self.engine = engine
        many = len(paths) > 1
        self.file = _native.File(
            list(paths) if many else paths[0],
            direct=direct,
            weights=layout.weights if many else None,
            stripe=layout.stripe if many else 0,
        )
        self.model = FileModel(layout.weights, layout.stripe, self.file.directs)

    def act(self, act: Act, base: int = 0) -> None:
        """Do it to both, and compare what they say."""
        offset = base + act.page * PAGE
        if act.what in ("truncate", "preallocate"):
            getattr(self.file, act.what)(offset + act.nbytes)
            getattr(self.model, act.what)(offset + act.nbytes)
            return
        room = np.full(act.nbytes + 3 * PAGE, 0xAA, np.uint8)
        start = -room.ctypes.data % PAGE + act.shift
        data = room[start : start + act.nbytes]
        if act.what == "write":
            data[:] = NOISE[act.noise : act.noise + act.nbytes]
            assert self.engine.write(self.file, offset, data).result() == act.nbytes
            self.model.write(offset, data.tobytes())
            return
        want = self.model.read(offset, act.nbytes)
        ticket = self.engine.read(self.file, offset, data)
        if want is None:
            with pytest.raises(OSError, match="ends at") as caught:
                ticket.result()
            assert caught.value.errno == errno.EIO
            assert caught.value.filename in self.file.paths
        else:
            assert ticket.result() == act.nbytes
            assert data.tobytes() == want
        assert (room[:start] == 0xAA).all()
        assert (room[start + act.nbytes :] == 0xAA).all()

    def compare(self, where_it_lies: bool = True) -> None:
        """Member files as they lie on the drive against the model."""
        self.engine.reap()
        if where_it_lies:
            assert self.file.size() == self.model.size()
        for i, path in enumerate(self.file.paths):
            assert Path(path).stat().st_size == self.model.lengths[i]
        for page, want in self.model.pages.items():
            member, there = self.model.locate(page * PAGE)
            with open(self.file.paths[member], "rb") as file:
                file.seek(there)
                have = file.read(PAGE)
            assert have == want[: len(have)]
            assert len(have) == max(0, min(PAGE, self.model.lengths[member] - there))

    def close(self) -> None:
        """Remove the file."""
        self.file.close()
        for home in self.homes:
            shutil.rmtree(home)


@settings(LOOSE, max_examples=100)
@given(layout=layouts, todo=acts)
def test_every_engine_is_the_model(
    engines: dict[str, Any], places: tuple[Path, Path], layout: Layout, todo: list[Act]
) -> None:
    for name, engine in engines.items():
        opened = Opened(layout, engine, KINDS[name][1], places)
        try:
            for act in todo:
                opened.act(act)
            opened.compare()
        finally:
            opened.close()


@settings(LOOSE, max_examples=50)
@given(layout=layouts, todo=acts, base=st.sampled_from([(4 << 30) - 4 * PAGE, 4 << 30, (5 << 40) + PAGE]))
def test_beyond_four_gigabytes(
    engines: dict[str, Any], places: tuple[Path, Path], layout: Layout, todo: list[Act], base: int
) -> None:
    layout = Layout(layout.weights, layout.stripe, (False,) * len(layout.plain))  # a ramfs keeps no holes
    for name, engine in engines.items():
        opened = Opened(layout, engine, KINDS[name][1], places)
        try:
            for act in todo:
                if act.what != "preallocate":  # it would really allocate them
                    opened.act(act, base)
            opened.compare(where_it_lies=False)
        finally:
            opened.close()


@pytest.mark.parametrize("name", KINDS)
def test_around_every_boundary(engines: dict[str, Any], places: tuple[Path, Path], name: str) -> None:
    if name not in engines:
        pytest.skip(f"no io_uring: {_native.probe_uring()}")
    for layout in (
        Layout((1,), 0, (False,)),
        Layout((2, 1), 3 * PAGE, (False, True)),
        Layout((1, 3, 2), PAGE, (True, False, False)),
    ):
        opened = Opened(layout, engines[name], KINDS[name][1], places)
        sizes = {unit * times + more for unit in (PAGE, BLOCK, 3 * PAGE) for times in (1, 2) for more in (-1, 0, 1)}
        for nbytes, shift in itertools.product(sorted(sizes | {0, 1, 511, 513, 20_000}), (0, 1, 512)):
            for page in (0, 1, 3):
                opened.act(Act("write", page, nbytes, shift, nbytes + page))
                opened.act(Act("read", page, nbytes, 4096 - shift, 0))
        opened.compare()
        opened.close()


@settings(LOOSE, max_examples=100)
@given(layout=layouts, nbytes=st.integers(0, 60 * PAGE), more=st.integers(0, 60 * PAGE))
def test_sizes_come_back(places: tuple[Path, Path], layout: Layout, nbytes: int, more: int) -> None:
    """Growing, cutting and growing again, and that all bytes between are zeros."""
    engine = _native.Engine(kind="pool", depth=1)
    opened = Opened(layout, engine, True, places)
    try:
        opened.file.truncate(nbytes)
        assert opened.file.size() == nbytes
        opened.file.preallocate(nbytes // 2)
        assert opened.file.size() == nbytes
        opened.file.preallocate(nbytes + more)
        assert opened.file.size() == nbytes + more
        whole = np.ones(nbytes + more, np.uint8)
        engine.read(opened.file, 0, whole).result()
        assert not whole.any()
        whole[:] = 7
        engine.write(opened.file, 0, whole).result()
        opened.file.truncate(nbytes)
        assert opened.file.size() == nbytes
        opened.file.truncate(nbytes + more)
        engine.read(opened.file, 0, whole).result()
        assert (whole[:nbytes] == 7).all()
        assert not whole[nbytes:].any()
        opened.file.sync()
    finally:
        engine.close()
        opened.close()


@settings(LOOSE, max_examples=60)
@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=4), pages=st.integers(1, 3), cycles=st.integers(1, 3))
def test_the_stripe_map_counted_out(tmp_path: Path, weights: list[int], pages: int, cycles: int) -> None:
    """Stripes with their numbers in them lie on the members in order, each with its share of every cycle, spread
    evenly.
    """
    owners = owners_of(weights)
    total, stripe = sum(weights), pages * PAGE
    assert [owners.count(i) for i in range(len(weights))] == weights
    for end in range(total + 1):
        for i, weight in enumerate(weights):
            assert abs(owners[:end].count(i) - end * weight / total) < len(weights)
    home = Path(tempfile.mkdtemp(dir=tmp_path))
    paths = [home / str(i) for i in range(len(weights))]
    file = _native.File(paths, direct=False, weights=weights, stripe=stripe)
    engine = _native.Engine(kind="pool", depth=2)
    count = cycles * total
    data = np.repeat(np.arange(count, dtype=np.uint8), stripe)
    engine.write(file, 0, data).result()
    queues = [path.read_bytes()[::stripe] for path in paths]
    assert sum(map(len, queues)) == count
    at = [0] * len(weights)
    for number in range(count):
        member = owners[number % total]
        assert queues[member][at[member]] == number % 256
        at[member] += 1
    for nbytes in (0, 1, stripe - 1, stripe, stripe + 1, count * stripe - 1):
        file.truncate(nbytes)
        left = [path.stat().st_size for path in paths]
        counted = [0] * len(weights)
        for byte in range(0, nbytes, stripe):
            counted[owners[byte // stripe % total]] += min(stripe, nbytes - byte)
        assert left == counted
        assert file.size() == nbytes
    engine.close()
    file.close()
    shutil.rmtree(home)
