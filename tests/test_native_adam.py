"""Every flag, dtype and instruction set of the native Adam, against torch's fused kernels to the last bit."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tierzero import _native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LR, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8
ISAS = ["scalar", *(["avx2"] if _native.cpu_features().get("avx2") else [])]
ISAS += ["avx512"] if _native.cpu_features().get("avx512f") else []
# every length up to 70, and around the vectors, the gradient's cache lines and the parts that threads take
LENGTHS = [*range(1, 71), 127, 128, 129, 255, 257, 1023, 1025, (1 << 18) - 1, (1 << 18) + 1, (1 << 18) + 9]


SCALARS = (1 - 1e-5, 0.1, 0.999, 0.001, 1e-8, 1e-3, 0.5, 1.0)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int32 if t.element_size() == 4 else torch.int16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, or both NaN."""
    return bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all())


def scalars(
    step: int, coef: float, decay: float, decoupled: bool, maximize: bool, betas: tuple[float, float] = (BETA1, BETA2)
) -> tuple[float, ...]:
    beta1, beta2 = betas
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    return (
        1 - LR * decay if decoupled else 1.0,
        1 - beta1,
        beta2,
        1 - beta2,
        EPS,
        LR / bias1,
        bias2**0.5,
        -coef if maximize else coef,
        0.0 if decoupled else decay,
    )


def wild(size: int, generator: torch.Generator) -> torch.Tensor:
    """A gradient from zero over denormal to huge."""
    g = torch.randn(size, generator=generator)
    power = torch.randint(-44, 20, (size,), generator=generator)
    g = g * torch.pow(10.0, power.double()).float()
    return torch.where(torch.rand(size, generator=generator) < 0.1, torch.zeros(()), g)


def train(
    size: int,
    steps: int,
    *,
    decoupled: bool = True,
    amsgrad: bool = False,
    maximize: bool = False,
    decay: float = 0.01,
    coef: float = 1.0,
    threads: int = 1,
    nan: bool = False,
) -> None:
    """Both optimizers from the same start on the same gradients."""
    generator = torch.Generator().manual_seed(size)
    p = torch.randn(size, generator=generator)
    m, v, x = torch.zeros(size), torch.zeros(size), torch.zeros(size)
    oracle = torch.nn.Parameter(p.clone())
    kind: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings: dict[str, Any] = {"weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
    optimizer = kind([oracle], lr=LR, betas=(BETA1, BETA2), eps=EPS, fused=True, **settings)
    for step in range(1, steps + 1):
        grad = wild(size, generator) if step % 3 == 0 else torch.randn(size, generator=generator)
        if nan and step == 2:
            grad[torch.rand(size, generator=generator) < 0.3] = float("nan")
        oracle.grad = grad * torch.tensor(coef)
        optimizer.step()
        values = scalars(step, coef, decay, decoupled, maximize)
        _native.adamw(p, m, v, grad, None, values, threads, max_exp_avg_sq=x if amsgrad else None)
    state = optimizer.state[oracle]
    pairs = [(p, oracle.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])]
    if amsgrad:
        pairs.append((x, state["max_exp_avg_sq"]))
    for ours, theirs in pairs:
        assert same(ours, theirs), (size, settings)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_every_flag_equals_torch_fused(decoupled: bool, amsgrad: bool, maximize: bool) -> None:
    for size, decay in itertools.product([*range(1, 40), 1003], [0.0, 0.01]):
        train(size, 6, decoupled=decoupled, amsgrad=amsgrad, maximize=maximize, decay=decay, coef=0.3)
        train(size, 4, decoupled=decoupled, amsgrad=amsgrad, maximize=maximize, decay=decay, nan=True)


def test_a_thousand_steps_equal_torch_fused() -> None:
    for size in (1, 7, 8, 15, 24, 70, 131):
        train(size, 1000)
    train(70, 1000, decoupled=False, amsgrad=True)


def test_every_length_and_boundary() -> None:
    for size in LENGTHS:
        train(size, 3, coef=0.7, threads=1 + size % 3)


def zeros_of_both_signs() -> None:
    """Also where the first moment forgets all that was (beta1 = 0), and in the last elements, which torch rounds as a
    scalar loop does.
    """
    for betas, size in itertools.product(
        [(0.0, 0.5), (0.0, 0.999), (0.3, 0.9), (0.5, 0.0), (0.9, 0.999)], range(1, 34)
    ):
        generator = torch.Generator().manual_seed(size)
        p, m, v = torch.randn(size, generator=generator), torch.zeros(size), torch.zeros(size)
        oracle = torch.nn.Parameter(p.clone())
        optimizer = torch.optim.AdamW([oracle], lr=LR, betas=betas, eps=EPS, weight_decay=0.01, fused=True)
        for step in range(1, 9):
            oracle.grad = torch.tensor([2.0, -2.0, 0.0, -0.0])[torch.randint(0, 4, (size,), generator=generator)]
            optimizer.step()
            _native.adamw(p, m, v, oracle.grad, None, scalars(step, 1.0, 0.01, True, False, betas), 1)
            state = optimizer.state[oracle]
            for ours, theirs in ((p, oracle.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
                assert same(ours, theirs), (betas, size, step)


def test_zeros_of_both_signs() -> None:
    zeros_of_both_signs()


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    """TIERZERO_ISA picks the kernel when the library is first used: each in a process of its own."""
    code = (
        f"import test_native_adam as t; from tierzero import _native as n; assert n.adam_isa() == {isa!r}\n"
        "for s in t.LENGTHS: t.train(s, 3, coef=0.7, threads=1 + s % 3)\n"
        "for s in (1, 13, 31, 131): t.train(s, 1000)\n"
        "for d in (True, False):\n"
        "    for a in (True, False):\n"
        "        for s in range(1, 40): t.train(s, 4, decoupled=d, amsgrad=a, maximize=a, nan=True)\n"
        "t.zeros_of_both_signs()\n"
        "for g in t.DTYPES:\n"
        "    for o in t.DTYPES: t.test_gradient_and_copy_types(g, o)\n"
        "    t.test_a_large_copy_is_written_past_the_caches(g)\n"
    )
    env = {**os.environ, "TIERZERO_ISA": isa, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    subprocess.run([sys.executable, "-P", "-c", code], env=env, check=True, timeout=240)


@pytest.mark.parametrize("name", ["sse9", "neon" if "avx2" in ISAS else "avx2"])
def test_unusable_instruction_set_is_said(name: str) -> None:
    code = "from tierzero import _native as n; print(n.adam_isa())"
    env = {**os.environ, "TIERZERO_ISA": name}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert f"TIERZERO_ISA={name} cannot be used on this processor" in done.stderr
    assert done.stdout.strip() == _native.adam_isa()


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_gradient_and_copy_types(grad_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for size in (1, 7, 8, 9, 15, 16, 23, 24, 33, 64, 77, 1003):
        generator = torch.Generator().manual_seed(size)
        p, m = (torch.randn(size, generator=generator) for _ in range(2))
        v = torch.rand(size, generator=generator)
        grad = torch.randn(size, generator=generator).to(grad_dtype)
        out = torch.full((size,), 9.0, dtype=out_dtype)
        p2, m2, v2, x, x2 = p.clone(), m.clone(), v.clone(), v.clone(), v.clone()
        for decoupled in (True, False):
            s = scalars(3, 0.5, 0.01, decoupled, False)
            _native.adamw(p, m, v, grad, out, s, max_exp_avg_sq=x)
            _native.adamw(p2, m2, v2, grad.float(), None, s, max_exp_avg_sq=x2)
            assert same(p, p2)
            assert same(m, m2)
            assert same(v, v2)
            assert same(x, x2)
            assert same(out, p.to(out_dtype))


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_a_large_copy_is_written_past_the_caches(out_dtype: torch.dtype) -> None:
    size = (8 << 20) // torch.empty(0, dtype=out_dtype).element_size() + 13
    slab = torch.from_numpy(_native.Slab(4 * size + 64).array())
    p = torch.randn(size)
    for shift in (0, 2 if out_dtype.itemsize == 2 else 4):
        raw = slab[shift : shift + size * out_dtype.itemsize].zero_()
        _native.adamw(p, torch.zeros(size), torch.zeros(size), torch.randn(size), raw.view(out_dtype), SCALARS, 2)
        assert same(raw.view(out_dtype), p.to(out_dtype))


# ---- accumulate and finite norms


@pytest.mark.parametrize(
    ("into", "grad"), [(torch.float32, d) for d in DTYPES] + [(torch.bfloat16,) * 2, (torch.float16,) * 2]
)
def test_accumulate_equals_add_and_norm(into: torch.dtype, grad: torch.dtype) -> None:
    for size in [*range(1, 80), 4097]:
        generator = torch.Generator().manual_seed(size)
        a = torch.randn(size, generator=generator).to(into)
        b = (torch.randn(size, generator=generator) * 3).to(grad)
        want = a + b
        norm, finite = _native.accumulate(a, b)
        assert torch.equal(bits(a), bits(want))
        assert norm == float(torch.linalg.vector_norm(want.float()))
        assert finite
        b[size // 2] = float("inf")
        assert not _native.accumulate(a, b)[1]


def test_finite_norms_tell_overflow_from_infinity() -> None:
    big = torch.full((100,), 3e38)
    bad = torch.ones(100)
    bad[99] = float("nan")
    (overflow, finite), (_, nan_finite), (one, one_finite) = _native.finite_norms([big, bad, torch.ones(1)], 2)
    assert overflow == float("inf")
    assert finite
    assert not nan_finite
    assert (one, one_finite) == (1.0, True)
    for dtype in DTYPES:
        special = torch.ones(77, dtype=dtype)
        special[3] = float("-inf")
        assert not _native.finite_norms([special])[0][1]


def test_bad_arguments_raise() -> None:
    f, s = torch.zeros(16), scalars(1, 1.0, 0.0, True, False)
    with pytest.raises(ValueError, match="max_exp_avg_sq has 8"):
        _native.adamw(f, torch.zeros(16), torch.zeros(16), torch.zeros(16), None, s, max_exp_avg_sq=torch.zeros(8))
    with pytest.raises(ValueError, match="share memory"):
        _native.adamw(f, torch.zeros(16), torch.zeros(16), torch.zeros(16), None, s, max_exp_avg_sq=f)
    with pytest.raises(ValueError, match="scalars"):
        _native.adamw(f, torch.zeros(16), torch.zeros(16), torch.zeros(16), None, (*s, 1.0))
    with pytest.raises(TypeError, match="dtype of grad"):
        _native.accumulate(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))
    with pytest.raises(ValueError, match="elements"):
        _native.accumulate(torch.zeros(4), torch.zeros(5))
    with pytest.raises(ValueError, match="share memory"):
        _native.accumulate(f, f)
