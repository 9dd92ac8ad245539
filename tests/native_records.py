"""State records in plain tensors, and what a step must make of them: shared by the stepper's tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierzero import _native

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SIZE = {"f32": 4, "bf16": 2, "f16": 2}


def scalars(step: int, coef: float) -> tuple[float, ...]:
    return (1 - 1e-5 * step, 0.1, 0.999, 1 - 0.999, 1e-8, 1e-3 / (1 - 0.9**step), math.sqrt(1 - 0.999**step), coef)


@dataclass
class Parameter:
    """One segment and its plain tensors."""

    first: int
    numel: int
    grad_type: str | None
    out_type: str | None
    step: int = 1
    coef: float = 1.0
    grad_at: int = -1
    out_at: int = -1

    def segment(self) -> Any:
        kinds = (self.grad_at, self.grad_type or "f32", self.out_at, self.out_type or "bf16")
        return (self.first, self.numel, *kinds, *scalars(self.step, self.coef))


@dataclass
class Case:
    """A record in plain tensors and what the step must make of it."""

    elements: int
    parameters: list[Parameter]
    seed: int = 0
    planes: torch.Tensor = field(init=False)  # f32[3, elements]
    grads: torch.Tensor = field(init=False)  # uint8
    out_size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.planes = torch.randn(3, self.elements, generator=generator)
        self.planes[2].abs_()
        parts: list[torch.Tensor] = []
        at = 0
        for p in self.parameters:
            if p.grad_type is not None:
                grad = torch.randn(p.numel, generator=generator).to(DTYPES[p.grad_type])
                parts.append(grad.view(torch.uint8))
                p.grad_at, at = at, at + grad.numel() * grad.element_size()
                pad = at % 3  # gradients may lie at any byte
                parts.append(torch.zeros(pad, dtype=torch.uint8))
                at += pad
        self.grads = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def gradient(self, p: Parameter) -> torch.Tensor:
        assert p.grad_type is not None
        raw = self.grads[p.grad_at : p.grad_at + p.numel * SIZE[p.grad_type]]
        return raw.clone().view(DTYPES[p.grad_type])

    def host_out(self) -> None:
        """Places the copies in a host record, odd gaps between them."""
        at = 5
        for p in self.parameters:
            if p.out_type is not None:
                p.out_at = at
                at += p.numel * SIZE[p.out_type] + 3
        self.out_size = at

    def file_out(self, out_first: int) -> None:
        """Places the copies in a file record: byte (e - out_first) * 2 belongs to state element e."""
        for p in self.parameters:
            keep = p.out_type in ("bf16", "f16") and p.first >= out_first
            p.out_at = (p.first - out_first) * 2 if keep else -1
            p.out_type = p.out_type if keep else None

    def expected(self) -> torch.Tensor:
        """f32[3, elements] after the step, each parameter as one whole array."""
        after = self.planes.clone()
        for p in self.parameters:
            if p.grad_type is not None and p.numel:
                part = after[:, p.first : p.first + p.numel]
                arrays = [part[i].clone() for i in range(3)]
                _native.adamw(arrays[0], arrays[1], arrays[2], self.gradient(p), None, scalars(p.step, p.coef))
                for i in range(3):
                    part[i] = arrays[i]
        return after

    def copies(self, after: torch.Tensor, size: int, fill: int) -> torch.Tensor:
        """uint8[size]: `fill`, with every copy in its place."""
        out = torch.full((size,), fill, dtype=torch.uint8)
        for p in self.parameters:
            if p.out_at >= 0 and p.out_type is not None and p.numel:
                copy = after[0, p.first : p.first + p.numel].to(DTYPES[p.out_type]).view(torch.uint8)
                out[p.out_at : p.out_at + copy.numel()] = copy
        return out

    def segments(self) -> list[Any]:
        return [p.segment() for p in self.parameters]


def to_layout(planes: torch.Tensor, chunk: int) -> torch.Tensor:
    """f32[3, n] -> f32[3 * n] in chunks of [master c][exp_avg c][exp_avg_sq c]."""
    return torch.cat([part.reshape(-1) for part in planes.split(chunk, dim=1)])


def slab_buffers(chunk: int, slots: int) -> NDArray[np.uint8]:
    buffers = _native.Slab(14 * chunk * slots).array()
    buffers[:] = 0xCC  # what an earlier record may have left
    return buffers


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@st.composite
def cases(draw: st.DrawFn, max_chunks: int = 4, out: bool = True) -> tuple[Case, int]:
    chunk = 2048 * draw(st.sampled_from([1, 1, 2, 3, 9]))  # 9: more than the compute stage takes at once
    elements = 1024 * draw(st.integers(1, max_chunks * chunk // 1024))
    parameters: list[Parameter] = []
    at = 64 * draw(st.integers(0, 3))
    while at < elements and len(parameters) < 12:
        room = elements - at
        numel = min(room, draw(st.one_of(st.integers(0, 200), st.integers(0, 9000), st.just(room))))
        grad = draw(st.sampled_from(["f32", "bf16", "f16", None]))
        copy = draw(st.sampled_from(["f32", "bf16", "f16", None])) if out else None
        parameters.append(Parameter(at, numel, grad, copy, draw(st.integers(1, 30)), draw(st.sampled_from([1.0, 0.3]))))
        at = -(-(at + numel) // 64) * 64 + 64 * draw(st.integers(0, 2))
    return Case(elements, parameters, draw(st.integers(0, 1000))), chunk


def plain_case(seed: int, elements: int = 5120) -> Case:
    return Case(elements, [Parameter(0, 1500, "bf16", "bf16"), Parameter(1536, 3001, "f32", None, 4, 0.5)], seed)
