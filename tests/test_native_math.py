"""checksum, l2_norms and adamw of the native extension, each against plain torch or numpy, to the last bit."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tierzero import _native

SIZES = [*range(1, 141), 1000, 4095, 4096, 4097, 33333, 600_001]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01


def scalars(step: int, coef: float = 1.0, lr: float = LR, beta1: float = BETA1) -> tuple[float, ...]:
    """The kernel's eight scalars at `step` (1-based), in double."""
    bias1, bias2 = 1 - beta1**step, 1 - BETA2**step
    return (1 - lr * DECAY, 1 - beta1, BETA2, 1 - BETA2, EPS, lr / bias1, math.sqrt(bias2), coef)


def words_reference(data: bytes, offset: int) -> tuple[int, int]:
    """The checksum's definition, in Python integers."""
    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)]
    s1 = sum(words)
    s2 = sum((offset + i + 1) * w for i, w in enumerate(words))
    return s1 % 2**64, s2 % 2**64


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int32 if t.element_size() == 4 else torch.int16)


# ---- checksum


@settings(deadline=None)
@given(st.binary(max_size=700), st.integers(0, 2**40))
def test_checksum_is_its_definition(data: bytes, offset: int) -> None:
    array = np.frombuffer(data, np.uint8)
    assert _native.checksum(array, offset) == words_reference(data, offset)


@settings(deadline=None)
@given(st.binary(max_size=900), st.lists(st.integers(0, 225), max_size=4))
def test_checksum_of_ranges_adds_up(data: bytes, cuts: list[int]) -> None:
    array = np.frombuffer(data, np.uint8)
    edges = sorted({0, len(data), *(4 * c for c in cuts if 4 * c < len(data))})
    s1 = s2 = 0
    for lo, hi in itertools.pairwise(edges):
        a, b = _native.checksum(array[lo:hi], lo // 4)
        s1, s2 = (s1 + a) % 2**64, (s2 + b) % 2**64
    assert (s1, s2) == _native.checksum(array)


def test_checksum_wraps_and_takes_torch() -> None:
    ones = torch.full((1 << 20,), 255, dtype=torch.uint8)
    n, w = ones.numel() // 4, 2**32 - 1
    assert _native.checksum(ones, 2**60) == (n * w % 2**64, w * sum(range(2**60 + 1, 2**60 + n + 1)) % 2**64)
    assert _native.checksum(torch.empty(0, dtype=torch.uint8)) == (0, 0)


# ---- norms


def torch_norm(a: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(a.float()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_equals_torch_for_every_size(dtype: torch.dtype) -> None:
    for size in [*range(301), 1000, 4097, 65_541, 1_000_003]:
        generator = torch.Generator().manual_seed(size)
        arrays = [(torch.randn(size, generator=generator) * scale).to(dtype) for scale in (1e-3, 1.0, 17.0, 3e4)]
        assert _native.l2_norms(arrays) == [torch_norm(a) for a in arrays], size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3.0e38, 1e-40, 6e-8, 0.0, -0.0])
def test_norm_of_special_values(dtype: torch.dtype, value: float) -> None:
    for size in (1, 5, 7, 8, 13, 39, 64, 257):
        for place in {0, size // 2, size - 1}:
            a = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
            a[place] = value
            got, want = _native.l2_norms([a])[0], torch_norm(a)
            assert got == want or (math.isnan(got) and math.isnan(want))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=80))
def test_norm_of_any_bits(raw: list[int]) -> None:
    a = torch.from_numpy(np.array(raw, np.uint32).view(np.float32))
    got, want = _native.l2_norms([a])[0], torch_norm(a)
    assert got == want or (math.isnan(got) and math.isnan(want))


def test_norms_of_many_arrays_and_threads() -> None:
    arrays = [torch.randn(n % 97, 3, dtype=torch.float32) for n in range(200)]
    assert _native.l2_norms(arrays, threads=4) == [torch_norm(a) for a in arrays]
    assert _native.l2_norms([]) == []
    assert _native.l2_norms([torch.tensor(-1e-30), torch.tensor([[3e38]])]) == [
        torch_norm(torch.tensor(-1e-30)),
        torch_norm(torch.tensor(3e38)),
    ]
    assert _native.l2_norms([np.arange(11, dtype=np.float16)]) == [torch_norm(torch.arange(11.0))]


# ---- adamw


def train_both(size: int, steps: int, *, clip: bool, threads: int = 1, beta1: float = BETA1) -> None:
    generator = torch.Generator().manual_seed(size)
    p = torch.randn(size, generator=generator)
    m, v = torch.zeros(size), torch.zeros(size)
    oracle = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([oracle], lr=LR, betas=(beta1, BETA2), eps=EPS, weight_decay=DECAY, fused=True)
    for step in range(1, steps + 1):
        grad = torch.randn(size, generator=generator) * 10.0 ** (step % 7 - 4)
        coef = float(torch.tensor(0.37 / step)) if clip else 1.0
        oracle.grad = grad * coef
        optimizer.step()
        _native.adamw(p, m, v, grad, None, scalars(step, coef, beta1=beta1), threads)
    state = optimizer.state[oracle]
    for ours, theirs in ((p, oracle.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert torch.equal(bits(ours), bits(theirs)), size


@pytest.mark.parametrize("clip", [False, True])
def test_adamw_equals_torch_fused(clip: bool) -> None:
    for size in SIZES:
        train_both(size, 12, clip=clip)


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.4999, 0.5, 0.5000001, 0.99])
def test_adamw_for_any_beta1(beta1: float) -> None:
    """torch's lerp starts from the gradient when its weight is a half or more."""
    for size in (1, 7, 8, 13, 131, 1000):
        train_both(size, 12, clip=True, beta1=beta1)


def test_adamw_many_steps_and_threads() -> None:
    for size in (7, 13, 131):
        train_both(size, 300, clip=True)
    for threads in (1, 2, 5):
        train_both(600_007, 2, clip=True, threads=threads)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, *DTYPES])
def test_adamw_gradient_and_copy_types(grad_dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    for size in (1, 7, 8, 9, 64, 77, 1003):
        generator = torch.Generator().manual_seed(size)
        p, m = (torch.randn(size, generator=generator) for _ in range(2))
        v = torch.rand(size, generator=generator)
        grad = torch.randn(size, generator=generator).to(grad_dtype)
        out = None if out_dtype is None else torch.full((size,), 9.0, dtype=out_dtype)
        p2, m2, v2 = p.clone(), m.clone(), v.clone()
        _native.adamw(p, m, v, grad, out, scalars(3, 0.5))
        _native.adamw(p2, m2, v2, grad.float(), None, scalars(3, 0.5))
        assert torch.equal(p, p2)
        assert torch.equal(m, m2)
        assert torch.equal(v, v2)
        if out is not None:
            assert torch.equal(bits(out), bits(p.to(out.dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copy_rounds_as_torch_for_any_bits(dtype: torch.dtype) -> None:
    raw = np.random.default_rng(0).integers(0, 2**32, 1 << 20, dtype=np.uint32)
    raw[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x477FEFFF, 0x477FF000, 0x387FF000, 0x33000000]
    values = torch.from_numpy(raw.view(np.float32))
    values = values[~values.isnan()]
    for n in (values.numel(), 1003, 5):
        p, m, v, g = values[:n].clone(), torch.zeros(n), torch.zeros(n), torch.zeros(n)
        out = torch.empty(n, dtype=dtype)
        _native.adamw(p, m, v, g, out, (1.0, 0.1, 0.999, 0.001, 1e-8, 0.0, 1.0, 1.0))
        assert torch.equal(bits(out), bits(p.to(dtype)))


def test_nan_stays_nan_in_the_copy() -> None:
    n = 19
    for dtype in (torch.bfloat16, torch.float16):
        p, m, v, g = torch.full((n,), math.nan), torch.zeros(n), torch.zeros(n), torch.zeros(n)
        out = torch.zeros(n, dtype=dtype)
        _native.adamw(p, m, v, g, out, scalars(1))
        assert bool(out.isnan().all())


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 40), st.randoms(use_true_random=False), st.integers(1, 50), st.floats(1e-6, 1.0))
def test_adamw_on_any_finite_bits(size: int, random: object, step: int, lr: float) -> None:
    """Denormals, huge values and zeros in every array: still torch's bits."""
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]

    def values(positive: bool = False) -> torch.Tensor:
        raw = rng.integers(0, 0x7F000000, size, dtype=np.uint32)
        if not positive:
            raw |= rng.integers(0, 2, size, dtype=np.uint32) << 31
        return torch.from_numpy(raw.view(np.float32))

    p, m, v, grad = values(), values(), values(positive=True), values()
    oracle = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([oracle], lr=lr, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True)
    optimizer.state[oracle] = {"step": torch.tensor(step - 1.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    oracle.grad = grad.clone()
    optimizer.step()
    _native.adamw(p, m, v, grad, None, scalars(step, lr=lr))
    state = optimizer.state[oracle]
    for ours, theirs in ((p, oracle.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        both_nan = ours.isnan() & theirs.isnan()
        assert bool(((bits(ours) == bits(theirs)) | both_nan).all())


def test_scalar_path_gives_the_same_bits() -> None:
    """TIERZERO_ISA=scalar: the portable kernels are the same arithmetic."""
    code = (
        "import test_native_math as t, torch; from tierzero import _native as n; assert n.adam_isa() == 'scalar'\n"
        "for s in [*range(1, 60), 1003]: t.train_both(s, 5, clip=True)\n"
        "for s in (1, 13, 131): t.train_both(s, 5, clip=True, beta1=0.25)\n"
        "for d in t.DTYPES: t.test_norm_of_special_values(d, 1e-40); t.test_adamw_gradient_and_copy_types(d, d)\n"
        "t.test_copy_rounds_as_torch_for_any_bits(torch.float16)\n"
        "t.test_copy_rounds_as_torch_for_any_bits(torch.bfloat16)\n"
        "t.test_checksum_wraps_and_takes_torch()\n"
    )
    env = {**os.environ, "TIERZERO_ISA": "scalar", "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    subprocess.run([sys.executable, "-P", "-c", code], env=env, check=True, timeout=240)


# ---- bad arguments


def test_bad_arguments_raise() -> None:
    f = torch.zeros(16)
    s = scalars(1)
    with pytest.raises(ValueError, match="exp_avg has 8"):
        _native.adamw(f, torch.zeros(8), torch.zeros(16), torch.zeros(16), None, s)
    with pytest.raises(ValueError, match="share memory"):
        _native.adamw(f, f, torch.zeros(16), torch.zeros(16), None, s)
    big = torch.zeros(24)
    with pytest.raises(ValueError, match="share memory"):
        _native.adamw(big[:16], torch.zeros(16), torch.zeros(16), big[8:], None, s)
    with pytest.raises(TypeError, match="dtype"):
        _native.adamw(f.double(), torch.zeros(16), torch.zeros(16), torch.zeros(16), None, s)
    with pytest.raises(TypeError, match="contiguous"):
        _native.adamw(torch.zeros(32)[::2], torch.zeros(16), torch.zeros(16), torch.zeros(16), None, s)
    fixed = np.zeros(16, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        _native.adamw(fixed, torch.zeros(16), torch.zeros(16), torch.zeros(16), None, s)
    with pytest.raises(ValueError, match="scalars"):
        _native.adamw(f, torch.zeros(16), torch.zeros(16), torch.zeros(16), None, s[:7])
    with pytest.raises(TypeError):
        _native.adamw(f, torch.zeros(16), torch.zeros(16), torch.zeros(16), None, (None,) * 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads"):
        _native.l2_norms([f], threads=0)
    with pytest.raises(TypeError, match="dtype"):
        _native.l2_norms([torch.zeros(3, dtype=torch.int32)])
    with pytest.raises(TypeError, match="contiguous"):
        _native.l2_norms([torch.zeros(4, 4).t()])
    with pytest.raises(TypeError):
        _native.l2_norms([torch.zeros(3, device="meta")])
    with pytest.raises(TypeError):
        _native.l2_norms(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype"):
        _native.checksum(f)
    with pytest.raises(ValueError, match="word_offset"):
        _native.checksum(torch.zeros(4, dtype=torch.uint8), -1)
    assert torch.equal(f, torch.zeros(16))


def without_memory(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of n elements whose storage was taken away, or never was."""
    dead = torch.zeros(n, dtype=dtype)
    dead.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.zeros(n, dtype=dtype)
    return [dead, fake]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_refused(tmp_path: Path) -> None:
    """Every entry that takes an array raises a sentence; none of them reads address zero."""
    f, s, n = torch.zeros(1024), scalars(1), 1024
    file = _native.File(tmp_path / "f")
    engine = _native.Engine()
    stepper = _native.Stepper(engine, _native.Slab(3 * 14 * 2048).array(), 2048)
    state, grads = torch.zeros(3 * n), torch.zeros(4 * n, dtype=torch.uint8)
    segment = (0, n, 0, "f32", 0, "f32", *s)
    try:
        for bad in without_memory(n, torch.float32):
            calls: list[Callable[[], Any]] = [
                lambda bad=bad: _native.l2_norms([f, bad]),
                lambda bad=bad: _native.finite_norms([bad]),
                lambda bad=bad: _native.accumulate(bad, f),
                lambda bad=bad: _native.accumulate(f, bad),
                lambda bad=bad: _native.stream_ceiling(bad, f.clone(), f.clone(), f.clone()),
                lambda bad=bad: _native.adamw(bad, f.clone(), f.clone(), f.clone(), None, s),
                lambda bad=bad: _native.adamw(f, f.clone(), f.clone(), f.clone(), bad, s),
                lambda bad=bad: _native.unpack_state(None, 2048, grads.repeat(3), bad, f, f.clone()),
            ]
            for call in calls:
                with pytest.raises(ValueError, match="1024 elements but no memory"):
                    call()
        for bad in without_memory(4 * n, torch.uint8):
            calls = [
                lambda bad=bad: _native.checksum(bad),
                lambda bad=bad: engine.read(file, 0, bad),
                lambda bad=bad: engine.write(file, 0, bad),
                lambda bad=bad: engine.register(bad),
                lambda bad=bad: stepper.submit(n, [segment], bad, state=state, out=grads),
                lambda bad=bad: stepper.submit(n, [segment], grads, state=bad, out=grads.clone()),
                lambda bad=bad: stepper.submit(n, [segment], grads, state=state, out=bad),
                lambda bad=bad: _native.Stepper(engine, bad, 2048),
            ]
            for call in calls:
                with pytest.raises(ValueError, match="4096 elements but no memory"):
                    call()
        for none in without_memory(0, torch.float32):  # nothing is read of them
            assert _native.l2_norms([none]) == [0.0]
    finally:
        stepper.close()
        engine.close()
