"""State formats through the Stepper: on file and in memory, whatever the chunks and threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_native_adam import bits, same, scalars

from tierzero import _native

ELEMENTS = 3 * 4096 + 1024
# (first element, elements) of three parameters, starting at multiples of 256
PARAMETERS = [(0, 3001), (3072, 255), (3584, ELEMENTS - 3584)]
FORMATS = [
    ("f32", "f32", "f32", True),
    ("f32", "bf16", "bf16", False),
    ("f32", "u8", "u8", True),
    ("split", "f32", "f32", False),
    ("split", "bf16", "bf16", True),
    ("split", "u8", "u8", False),
    ("none", "u8", "f32", False),
    ("none", "f32", "f32", True),
]


class Planes:
    """float32 planes of one record; gaps between parameters are zero."""

    def __init__(self, amsgrad: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.planes = [torch.zeros(ELEMENTS) for _ in range(4 if amsgrad else 3)]
        for first, count in PARAMETERS:
            for i, plane in enumerate(self.planes):
                values = torch.randn(count, generator=generator)
                plane[first : first + count] = values if i < 2 else values.square()
        self.amsgrad = amsgrad
        self.planes[-1][:] = self.planes[2].clone()

    def arrays(self) -> dict[str, Any]:
        names = ["p", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        return dict(zip(names, self.planes, strict=False))


def gradients(step: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step))


def out_type(fmt: tuple[str, str, str, bool]) -> torch.dtype:
    return torch.float32 if fmt[0] == "none" else torch.bfloat16


def segments(fmt: tuple[str, str, str, bool], step: int, key: int = 7) -> list[Any]:
    size, name = (4, "f32") if fmt[0] == "none" else (2, "bf16")
    values = scalars(step, 0.5, 0.01, False, False)
    return [
        (first, count, 4 * first, "f32", size * first, name, *values, key + step, first) for first, count in PARAMETERS
    ]


def packed(fmt: Any, chunk: int, planes: Planes) -> tuple[torch.Tensor, torch.Tensor]:
    state = torch.full((_native.state_bytes(fmt, ELEMENTS, chunk),), 0xCC, dtype=torch.uint8)
    params = planes.planes[0].to(out_type(fmt))
    _native.pack_state(fmt, chunk, state, **planes.arrays(), params=None if fmt[0] == "f32" else params)
    return state, params


def unpacked(fmt: Any, chunk: int, state: torch.Tensor, params: torch.Tensor) -> list[torch.Tensor]:
    planes = Planes(fmt[3])
    _native.unpack_state(fmt, chunk, state, **planes.arrays(), params=None if fmt[0] == "f32" else params)
    return planes.planes


def run(fmt: Any, chunk: int, threads: int, steps: int, path: Path | None, shadow: bool = False) -> list[torch.Tensor]:
    """The planes and the parameters after `steps`, with the state in memory or in a file."""
    state, params = packed(fmt, chunk, Planes(fmt[3]))
    engine = _native.Engine(depth=2, block=8192)
    slot = _native.state_bytes(fmt, chunk, chunk) + 2 * chunk
    stepper = _native.Stepper(engine, _native.Slab(4 * slot).array(), chunk, threads, format=fmt)
    nbytes = state.numel()
    file = None if path is None else _native.File(path)
    if file is not None:
        engine.write(file, 0, state).result()
    for step in range(1, steps + 1):
        grads = gradients(step).view(torch.uint8)
        where: dict[str, Any] = {"state": state}
        if file is not None:
            at = [(step + 1) % 2 * nbytes, step % 2 * nbytes]
            where = {"src": (file, at[0]), "dst": (file, at[1])}
        out = params.view(torch.uint8)
        if shadow and fmt[0] != "f32":
            where["params"], out = out, torch.zeros_like(out)
        sums = stepper.submit(ELEMENTS, segments(fmt, step), grads, out=out, **where).result()
        params = out.view(params.dtype)
        if file is not None:
            engine.read(file, at[1], state).result()
            assert sums[0] == _native.checksum(state)
    stepper.close()
    engine.close()
    return [*unpacked(fmt, chunk, state, params), params]


@pytest.mark.parametrize("fmt", FORMATS)
def test_chunks_threads_and_places_give_the_same_bits(fmt: Any, tmp_path: Path) -> None:
    want = run(fmt, 2048, 1, 4, None)
    for chunk, threads, path in [(4096, 3, None), (16384, 2, tmp_path / "a"), (2048, 2, tmp_path / "b")]:
        for shadow in (False, True):
            got = run(fmt, chunk, threads, 4, path, shadow)
            for (first, count), a, b in ((place, a, b) for place in PARAMETERS for a, b in zip(want, got, strict=True)):
                assert same(a[first : first + count], b[first : first + count])


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f[1:3] == ("f32", "f32")])
def test_float32_moments_equal_the_whole_parameter_step(fmt: Any) -> None:
    """Also with a split master: it loses nothing, and its parameters are the master rounded to nearest even."""
    planes = Planes(fmt[3]).planes
    for step in range(1, 31):
        for first, count in PARAMETERS:
            at = slice(first, first + count)
            largest = planes[3][at] if fmt[3] else None
            parts = [plane[at] for plane in planes[:3]]
            grad = gradients(step)[at]
            _native.adamw(*parts, grad, None, scalars(step, 0.5, 0.01, False, False), max_exp_avg_sq=largest)
    *got, params = run(fmt, 2048, 2, 30, None)
    for a, b in zip(planes, got, strict=True):
        assert torch.equal(bits(a), bits(b))
    for first, count in PARAMETERS:
        at = slice(first, first + count)
        assert torch.equal(bits(params[at]), bits(planes[0][at].to(params.dtype)))


@pytest.mark.parametrize("moments", ["bf16", "u8"])
def test_rounded_moments_stay_near(moments: str) -> None:
    exact = run(("f32", "f32", "f32", False), 2048, 1, 100, None)
    rounded = run(("f32", moments, moments, False), 2048, 1, 100, None)
    moved = exact[0] - Planes(False).planes[0]
    apart = exact[0] - rounded[0]
    assert float(apart.norm()) < 0.05 * float(moved.norm())
    again = run(("f32", moments, moments, False), 4096, 2, 100, None)
    assert torch.equal(rounded[0], again[0])


def test_noise_depends_on_its_key() -> None:
    fmt = ("f32", "bf16", "bf16", False)
    results = []
    for key in (1, 1, 2):
        state, _ = packed(fmt, 2048, Planes(False))
        engine = _native.Engine()
        stepper = _native.Stepper(engine, _native.Slab(1 << 20).array(), 2048, format=fmt)
        stepper.submit(ELEMENTS, segments_without_copy(key), gradients(1).view(torch.uint8), state=state).result()
        stepper.close()
        engine.close()
        results.append(state)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def segments_without_copy(key: int) -> list[Any]:
    values = scalars(1, 1.0, 0.0, True, False)
    return [(first, count, 4 * first, "f32", -1, "bf16", *values, key, 0) for first, count in PARAMETERS]


def test_a_parameter_without_a_gradient_stays(tmp_path: Path) -> None:
    for fmt in FORMATS:
        state, params = packed(fmt, 2048, Planes(fmt[3]))
        before, params_before = state.clone(), params.clone()
        engine = _native.Engine()
        stepper = _native.Stepper(engine, _native.Slab(1 << 20).array(), 2048, format=fmt)
        still = [(*s[:2], -1, *s[3:]) for s in segments(fmt, 1)]
        target = torch.zeros_like(params)
        shadow = {} if fmt[0] == "f32" else {"params": params.view(torch.uint8)}
        stepper.submit(
            ELEMENTS, still, torch.zeros(0, dtype=torch.uint8), state=state, out=target.view(torch.uint8), **shadow
        ).result()
        stepper.close()
        engine.close()
        assert torch.equal(state, before)
        for first, count in PARAMETERS:
            assert torch.equal(target[first : first + count], params_before[first : first + count])


def test_sizes() -> None:
    assert _native.state_bytes(None, 7168, 2048) == 12 * 7168
    assert _native.state_bytes(("split", "f32", "f32", False), 8192, 2048) == 10 * 8192
    parts = _native.state_parts(("split", "u8", "u8", True), 2048)
    assert parts["master"] == (0, 4096)
    assert parts["exp_avg"] == (4096, 2048)
    assert parts["exp_avg_scale"] == (6144, 32)
    assert parts["ties"][1] == 256
    assert sum(nbytes for _, nbytes in parts.values()) == 2 * 2048 + 3 * (2048 + 32) + 256


def test_bad_arguments_raise() -> None:
    fmt = ("split", "f32", "f32", False)
    engine = _native.Engine()
    buffers = _native.Slab(1 << 20).array()
    grads = torch.zeros(4 * ELEMENTS, dtype=torch.uint8)
    stepper = _native.Stepper(engine, buffers, 2048, format=fmt)
    state, params = packed(fmt, 2048, Planes(False))
    raw = params.view(torch.uint8)
    good = segments(fmt, 1)
    with pytest.raises(ValueError, match="a state format is"):
        _native.Stepper(engine, buffers, 2048, format=("f32", "f64", "f32", False))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the parameters in out"):
        stepper.submit(ELEMENTS, good, grads, state=state)
    with pytest.raises(ValueError, match="bf16 parameters in out"):
        stepper.submit(ELEMENTS, [(*good[0][:4], -1, *good[0][5:])], grads, state=state, out=raw)
    with pytest.raises(ValueError, match="without being out"):
        stepper.submit(ELEMENTS, good, grads, state=state, out=raw, params=grads[: raw.numel()])
    with pytest.raises(ValueError, match="params has"):
        stepper.submit(ELEMENTS, good, grads, state=state, out=raw, params=raw[:-2])
    with pytest.raises(ValueError, match="bytes of"):
        stepper.submit(ELEMENTS, good, grads, state=state[:-4096], out=raw)
    wide = torch.zeros(12 * ELEMENTS, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bytes a chunk"):
        stepper.submit(ELEMENTS, good, grads, state=wide, out=raw, format=("f32", "f32", "f32", False))
    with pytest.raises(ValueError, match="noise key"):
        stepper.submit(ELEMENTS, [(*good[0][:15], -1, 0)], grads, state=state, out=raw)
    eight = ("split", "u8", "u8", False)
    small = torch.zeros(_native.state_bytes(eight, ELEMENTS, 2048), dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 256"):
        stepper.submit(ELEMENTS, [(64, *good[1][1:])], grads, state=small, out=raw, format=eight)
    stepper.close()
    engine.close()
    with pytest.raises(ValueError, match="params go with"):
        _native.pack_state(fmt, 2048, state, **Planes(False).arrays())
    with pytest.raises(ValueError, match="state must have"):
        _native.unpack_state(fmt, 2048, state[:-4096], **Planes(False).arrays(), params=params)
