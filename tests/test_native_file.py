"""Slab and File: alignment, growth, and what cannot be opened, as exceptions that name it."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from denied import without_nameless_files
from names_made import names_made, needs_nameless_files

from tierzero import _native

# ---- slab


def test_slab_is_aligned_and_shared() -> None:
    slab = _native.Slab(5_000_001)
    view = slab.array()
    assert view.dtype == np.uint8
    assert (view.size, slab.nbytes) == (5_000_001, 5_000_001)
    assert slab.address % (2 << 20) == 0 == view.ctypes.data - slab.address
    assert not view.any()
    view[-1] = 7
    assert slab.array()[-1] == 7
    assert torch.from_numpy(view)[-1] == 7
    assert 0 <= slab.huge_bytes() <= 5_001_216
    del slab
    gc.collect()
    assert view[-1] == 7


def test_slab_costs_nothing_until_touched() -> None:
    slab = _native.Slab(1 << 40)
    assert slab.huge_bytes() == 0


def test_slab_refuses_bad_sizes() -> None:
    for bad in (0, -1, 1 << 63, 1 << 70):
        with pytest.raises(ValueError):
            _native.Slab(bad)
    with pytest.raises(OSError, match="bytes") as caught:
        _native.Slab(1 << 60)
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(TypeError):
        _native.Slab("4096")  # type: ignore[arg-type]


# ---- file


def test_file_properties(tmp_path: Path) -> None:
    file = _native.File(tmp_path / "a b\udcff.bin")
    assert file.path == str(tmp_path / "a b\udcff.bin")
    assert file.alignment == (4096 if file.direct else 1)
    assert [p.name for p in tmp_path.iterdir()] == ["a b\udcff.bin"]
    assert file.size() == 0
    file.preallocate(10_000)
    assert file.size() == 10_000
    file.preallocate(5_000)
    file.preallocate(0)
    assert file.size() == 10_000
    assert os.stat(file.path).st_blocks * 512 >= 10_000
    file.sync()
    file.close()
    file.close()
    assert file.closed
    for call in (file.size, file.sync, lambda: file.preallocate(1)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_file_that_cannot_be_opened(tmp_path: Path) -> None:
    for path, kind in ((tmp_path / "no" / "f", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(kind) as caught:
            _native.File(path)
        assert caught.value.filename == str(path)
    with pytest.raises(FileNotFoundError):
        _native.File(tmp_path / "absent", create=False)
    with pytest.raises(ValueError):
        _native.File("a\0b")
    with pytest.raises(TypeError):
        _native.File(3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="not a regular file"):
        _native.File("/dev/null")


def test_preallocate_beyond_the_disk(tmp_path: Path) -> None:
    file = _native.File(tmp_path / "f")
    file.preallocate(4096)
    with pytest.raises(OSError, match="bytes") as caught:
        file.preallocate(1 << 50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.filename == file.path
    assert file.size() == 4096
    for bad in (-1, 1 << 63):
        with pytest.raises(ValueError):
            file.preallocate(bad)


def test_buffered_where_direct_is_refused() -> None:
    """Whatever /dev/shm does with O_DIRECT, the answer is honest and the bytes are right."""
    path = f"/dev/shm/tierzero-test-{os.getpid()}"
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    try:
        file = _native.File(path)
        engine = _native.Engine(threads=1)
        data = torch.arange(100, dtype=torch.uint8)
        engine.write(file, 0, data).result()
        back = torch.zeros_like(data)
        engine.read(file, 0, back).result()
        assert torch.equal(back, data)
        engine.close()
    finally:
        os.unlink(path)


def direct(path: Path) -> bool:
    file = _native.File(str(path))
    try:
        return bool(file.direct)
    finally:
        file.close()


@pytest.mark.parametrize("length", [1, 200, 255])
def test_direct_whatever_its_name_and_however_many_open(tmp_path: Path, length: int) -> None:
    """A file with bytes in it is tried on a neighbour that never has a name: a kill at any moment leaves nothing."""
    empty, full = tmp_path / "empty", tmp_path / ("n" * length)
    full.write_bytes(bytes(8192))
    if not direct(empty):
        pytest.skip("no direct I/O here")
    needs_nameless_files(tmp_path)
    with names_made(tmp_path) as made, ThreadPoolExecutor(8) as pool:
        assert direct(full)
        assert all(pool.map(direct, [full] * 200))
    assert made == []
    assert sorted(tmp_path.iterdir()) == sorted({empty, full})


BESIDE = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tierzero import _native
full = Path(sys.argv[1])
for number in range(1, 1000):  # as a process of the same id that was killed may have left them
    full.with_name(f".tierzero-probe-{os.getpid()}-{number}").touch()
with ThreadPoolExecutor(8) as pool:
    assert all(pool.map(lambda name: _native.File(name).direct, [sys.argv[1]] * 200))
print(os.getpid())
"""


def test_direct_where_every_file_has_a_name(tmp_path: Path) -> None:
    """The neighbour has one for a moment, which depends neither on the file's nor on others': those are left alone."""
    full = tmp_path / ("n" * 255)
    full.write_bytes(bytes(8192))
    if not direct(full):
        pytest.skip("no direct I/O here")
    with names_made(tmp_path) as made:
        done = subprocess.run(
            [sys.executable, "-P", "-c", BESIDE, str(full)],
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=without_nameless_files,
        )
    assert done.returncode == 0, done.stderr
    stale = {f".tierzero-probe-{done.stdout.strip()}-{number}" for number in range(1, 1000)}
    assert len(set(made) - stale) == 200
    assert {path.name for path in tmp_path.iterdir()} == {full.name, *stale}
