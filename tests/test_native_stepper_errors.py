"""The streamed step when something is wrong: failed I/O, early closing, and every kind of bad argument."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from native_records import as_bytes, plain_case, scalars, slab_buffers, to_layout

from tierzero import _native


@pytest.fixture(scope="module", params=["auto", "pool"])
def engine(request: pytest.FixtureRequest) -> Iterator[_native.Engine]:
    engine = _native.Engine(kind=request.param, threads=3, block=1 << 16)
    yield engine
    engine.close()


def test_a_failed_record_leaves_its_source_and_the_next_one_goes_on(tmp_path: Path) -> None:
    engine = _native.Engine(threads=2, block=8192)
    file = _native.File(tmp_path / "f")
    case, chunk, span = plain_case(1), 2048, 12 * 5120
    layout = as_bytes(to_layout(case.planes, chunk))
    engine.write(file, 0, layout).result()
    stepper = _native.Stepper(engine, slab_buffers(chunk, 3), chunk)
    far = 1 << 30
    bad = stepper.submit(5120, case.segments(), case.grads, src=(file, far), dst=(file, far + span))
    good = stepper.submit(5120, case.segments(), case.grads, src=(file, 0), dst=(file, span))
    with pytest.raises(OSError, match="ends at") as caught:
        bad.result()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, file.path)
    assert str(far) in str(caught.value)
    assert good.result()[0] == _native.checksum(as_bytes(to_layout(case.expected(), chunk)))
    got = torch.empty_like(layout)
    engine.read(file, 0, got).result()
    assert torch.equal(got, layout)
    stepper.close()
    engine.close()


def test_tickets_may_be_dropped_and_everything_closed_in_any_order(tmp_path: Path) -> None:
    file = _native.File(tmp_path / "f")
    case, chunk, span = plain_case(2), 2048, 12 * 5120
    for order in ("stepper", "engine", "neither"):
        engine = _native.Engine(threads=2)
        engine.write(file, 0, as_bytes(to_layout(case.planes, chunk))).result()
        stepper = _native.Stepper(engine, slab_buffers(chunk, 3), chunk)
        for _ in range(6):
            stepper.submit(5120, case.segments(), case.grads.clone(), src=(file, 0), dst=(file, span))
        if order == "stepper":
            stepper.close()
            stepper.close()
            with pytest.raises(ValueError, match="closed"):
                stepper.submit(5120, case.segments(), case.grads, src=(file, 0), dst=(file, span))
        elif order == "engine":
            engine.close()
            with pytest.raises(ValueError, match="closed"):
                stepper.submit(5120, case.segments(), case.grads, src=(file, 0), dst=(file, span))
        del engine, stepper


def test_bad_arguments_raise(engine: _native.Engine, tmp_path: Path) -> None:
    file, chunk = _native.File(tmp_path / "f"), 2048
    buffers = slab_buffers(chunk, 3)
    for bad_chunk in (0, -2048, 1024, 2049, 1 << 62):
        with pytest.raises(ValueError, match="chunk"):
            _native.Stepper(engine, buffers, bad_chunk)
    with pytest.raises(ValueError, match=str(3 * 14 * chunk)):
        _native.Stepper(engine, buffers[:-1], chunk)
    with pytest.raises(ValueError, match="4096"):
        _native.Stepper(engine, _native.Slab(200_000).array()[1:], chunk)
    with pytest.raises(ValueError, match="threads"):
        _native.Stepper(engine, buffers, chunk, 0)
    with pytest.raises(TypeError):
        _native.Stepper(None, buffers, chunk)  # type: ignore[arg-type]
    stepper = _native.Stepper(engine, buffers, chunk)
    n, span = 4096, 12 * 4096
    state, grads, out = torch.zeros(3 * n), torch.zeros(4 * n, dtype=torch.uint8), torch.zeros(9000, dtype=torch.uint8)
    s = scalars(1, 1.0)

    def seg(first: int = 0, numel: int = 100, grad: int = 0, out_at: int = -1, kind: str = "bf16") -> Any:
        return (first, numel, grad, "f32", out_at, kind, *s)

    def refuse(
        match: str, segments: Any = (), elements: Any = n, kind: type[Exception] = ValueError, **kw: Any
    ) -> None:
        kw.setdefault("grads", grads)
        if not kw.keys() & {"state", "src", "dst"}:
            kw["state"] = state
        with pytest.raises(kind, match=match):
            stepper.submit(elements, segments, **kw)

    for elements in (0, -1024, 1000, 1 << 62):
        refuse("elements", elements=elements)
    refuse("state", elements=2048)
    refuse("either", src=(file, 0), dst=(file, span), state=state)
    refuse("together", src=(file, 0), state=None)
    refuse("either", state=None)
    refuse("not both", out=out, out_file=(file, 0, 100))
    refuse("overlap", src=(file, 0), dst=(file, 4096))
    refuse("multiple of 4096", src=(file, 1), dst=(file, span))
    refuse("negative", src=(file, -4096), dst=(file, span))
    refuse("range|beyond", src=(file, (1 << 63) - 4096), dst=(file, span))
    refuse("overlaps src", src=(file, 0), dst=(file, span), out_file=(file, 4096, 100))
    refuse("File", src=("f", 0), dst=(file, span), kind=TypeError)
    refuse("items", src=(file,), dst=(file, span))
    for first, numel in ((1, 10), (63, 10), (4096, 1), (0, 4097), (64, 1 << 62)):
        refuse("segment 0", [seg(first, numel)])
    refuse("negative", [seg(-64)])
    refuse("negative", [seg(numel=-1)])
    refuse("segment 1", [seg(), seg(128, 4000, 400)])
    refuse("gradient", [seg(grad=4 * n - 399)])
    refuse("gradient", [seg(grad=1 << 62)])
    refuse("segment 0", [seg(grad=-2)])
    refuse("overlap", [seg(0, 200), seg(192, 10)])
    refuse("dtype", [(0, 1, 0, "f64", -1, "f32", *s)])
    refuse("items", [(0, 1, 0)])
    refuse("tuple", [3], kind=TypeError)
    refuse("neither", [seg(out_at=0)])
    refuse("beyond out", [seg(out_at=8900)], out=out)
    refuse("copies overlap", [seg(out_at=0), seg(128, 100, 0, 100)], out=out)
    refuse("2-byte", [seg(out_at=0, kind="f32")], out_file=(file, 0, 8192))
    refuse("out_offset", [seg(out_at=2)], out_file=(file, 0, 8192))
    refuse("beyond out_file", [seg(out_at=0)], out_file=(file, 0, 199))
    for nbytes in (0, 8193, 1 << 62):
        refuse("out_file", out_file=(file, 0, nbytes))
    for out_first in (1024, 4096, 8192):
        refuse("out_first", out_file=(file, 0, 100), out_first=out_first)
    refuse("out_first", out_first=2048)
    refuse("share memory", grads=as_bytes(state))
    refuse("share memory", out=as_bytes(state))
    refuse("own buffers", grads=buffers[:100])
    refuse("dtype", grads=state, kind=TypeError)
    refuse("dtype", state=state.double(), kind=TypeError)
    refuse("contiguous", state=torch.zeros(6 * n)[::2], kind=TypeError)
    refuse("array", out="x", kind=TypeError)
    closed = _native.File(tmp_path / "g")
    closed.close()
    refuse("closed", src=(closed, 0), dst=(file, span))
    with pytest.raises(TypeError):
        stepper.submit(n, [], grads, state)  # type: ignore[call-arg, arg-type]
    assert not state.any()
    assert stepper.submit(n, [], grads, state=state).result() == (None, None)
    assert not state.any()
    stepper.close()
