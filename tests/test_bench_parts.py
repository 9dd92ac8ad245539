"""The parts of the drive benchmark: what a phase transfers, rates over time, room, and what fio is told."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierzero.bench import fio
from tierzero.bench.scratch import MINIMUM, Scratch, fit
from tierzero.bench.search import Found
from tierzero.bench.stream import KINDS, Buffers, Sample, Setting, rates, run
from tierzero.errors import TierzeroError
from tierzero.native import NATIVE

needs_native = pytest.mark.skipif(NATIVE is None, reason="it measures the native engine")
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
MIB = 1 << 20


@needs_native
@pytest.mark.parametrize("engine", ["pool", "auto"])
@pytest.mark.parametrize("paths", [1, 2])
def test_a_pass_writes_every_byte_once(tmp_path: Path, engine: str, paths: int) -> None:
    setting = Setting(engine, 1 * MIB, 4)
    size = 18 * MIB  # two whole requests and a part of one
    directories = [tmp_path] if paths == 1 else [tmp_path, tmp_path]
    with Scratch(directories, size, [1] * paths) as scratch:
        assert list(tmp_path.iterdir()) == []
        assert scratch.file.size() == size
        buffers = Buffers([setting], paths, 8 * MIB)
        buffers.array[:] = 7
        sample = run(setting, scratch, buffers, "write", nbytes=size, drives=paths, request=8 * MIB)
        assert (sample.read, sample.written) == (0, size)
        held = b"".join(Path(name).read_bytes() for name in scratch.fd_paths)
        assert held == bytes([7]) * size
        buffers.array[:] = 8
        mixed = run(setting, scratch, buffers, "mixed", nbytes=size, drives=paths, request=8 * MIB)
        assert mixed.read + mixed.written == mixed.moved >= size
        if paths == 1:
            whole = Path(scratch.fd_paths[0]).read_bytes()
            assert whole[: size // 2] == bytes([7]) * (size // 2), "the first half is read only"
            assert set(whole[size // 2 :]) <= {7, 8}


@needs_native
def test_a_scratch_file_never_takes_an_existing_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda n: "same")
    monkeypatch.setattr("os.O_TMPFILE", 0)  # as where nameless files are refused
    taken = tmp_path / f".tierzero-bench-{os.getpid()}-same"
    taken.write_text("yours")
    with pytest.raises(FileExistsError):
        Scratch([tmp_path], MINIMUM)
    assert taken.read_text() == "yours"


@given(
    st.lists(st.tuples(st.floats(0.001, 1), st.integers(0, 10**9)), min_size=1, max_size=50),
    st.integers(1, 20),
)
def test_rates_add_up(steps: list[tuple[float, int]], count: int) -> None:
    timeline, passed, moved = [], 0.0, 0
    for seconds, nbytes in steps:
        passed, moved = passed + seconds, moved + nbytes
        timeline.append((passed, moved))
    parts = rates(timeline, count)
    assert len(parts) == count
    assert min(parts) >= -1e-3
    assert sum(parts) * passed / count == pytest.approx(moved, rel=1e-6, abs=1)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_buffered_writes_have_their_flush_in_every_part(tmp_path: Path, kind: str) -> None:
    """However long the flush takes: a part of the time in which nothing more was asked for is none without writes."""
    assert NATIVE is not None
    setting = Setting("pool", 1 << 20, 4)
    with Scratch([tmp_path], 64 << 20) as scratch:
        scratch.file.close()
        scratch.file = NATIVE.File(scratch.fd_paths[0], create=False, direct=False)
        buffers = Buffers([setting])
        run(setting, scratch, buffers, "write", nbytes=64 << 20)
        sample = run(setting, scratch, buffers, kind, nbytes=256 << 20)
    assert sample.timeline[-1][1] == sample.moved
    parts = rates(sample.timeline, 1000)
    assert kind == "read" or parts == pytest.approx([sample.rate] * 1000, rel=0.1)


def test_a_steady_rate_is_level() -> None:
    assert rates([(t / 10, t * 100) for t in range(1, 101)], 7) == pytest.approx([1000.0] * 7)
    assert rates([], 3) == []


def test_the_winner_is_best_in_all_and_cheapest_among_equals() -> None:
    fast, cheap, slow = Setting("uring", 4 * MIB, 8), Setting("uring", 8 * MIB, 8), Setting("pool", MIB, 4)
    found = Found([slow, fast, cheap])
    for setting, seconds, cpu in ((fast, 1.0, 0.02), (cheap, 1.01, 0.01), (slow, 2.0, 0.001)):
        for kind in KINDS:
            found.samples[setting, kind] = [Sample(kind, 10**9, 0, seconds, cpu)]
    assert found.ranking() == [cheap, fast, slow]
    found.finalists = [slow, fast]
    assert found.ranking() == [fast, slow, cheap], "a setting measured once does not win against those of the finals"
    assert found.score(fast) == pytest.approx(1)
    assert found.score(slow) == pytest.approx(0.5)
    assert found.rate(Setting("pool", 2 * MIB, 2), "read") == 0


def test_members_on_one_drive_share_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1000 * MIB
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert fit([tmp_path], 100 * MIB, [1]) == (100 * MIB, "")
    assert fit([tmp_path], 4 << 30, [1])[0] == 900 * MIB
    shared, note = fit([tmp_path, tmp_path], 4 << 30, [3, 1])
    assert shared == 900 * MIB
    assert "1000.0 MiB are free" in note
    usage = usage._replace(free=MINIMUM)
    with pytest.raises(OSError, match="no room to measure") as caught:
        fit([tmp_path], 4 << 30, [1])
    assert caught.value.filename == str(tmp_path)


@needs_fio
@pytest.mark.parametrize("kind", KINDS)
def test_fio_transfers_what_it_is_told(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(8 * MIB))
    result = fio.run(fio.Job("psync", MIB, 1, direct=False), kind, [str(file)], 8 * MIB)
    assert result.nbytes == 8 * MIB
    assert result.rate > 0 <= result.cpu_per_gb
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert file.stat().st_size == 8 * MIB


@needs_fio
def test_fio_that_fails_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TierzeroError, match="fio failed with exit code"):
        fio.run(fio.Job("no_such_engine"), "read", [str(tmp_path / "missing")], MIB)
