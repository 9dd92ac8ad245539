"""Layouts and placements, for any shapes and budgets: pieces cover exactly, offsets are disjoint and aligned, budgets
hold.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tierzero.errors import BudgetError
from tierzero.planning import placement as placements
from tierzero.planning.placement import IO_BYTES, MIN_SLOTS, UnitSize, device_needs
from tierzero.units.fit import Fit, fit
from tierzero.units.layout import (
    CHUNK_ALIGN,
    CHUNK_MAX,
    PAGE,
    PARAM_ALIGN,
    SLOT_BYTES,
    STATE_ALIGN,
    ParamSpec,
    UnitLayout,
    chunk_elements,
    round_up,
    state_pieces,
    unit_layout,
)
from tierzero.units.state_format import PLAIN, StateFormat

SIZES = {"f32": 4, "bf16": 2, "f16": 2, "int64": 8, "float64": 8, "uint8": 1}
shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    st.tuples(st.integers(1, 70_000)),
    st.sampled_from(
        [(1,), (7,), (127,), (128,), (129,), (1023,), (1024,), (2048,), (2049,), (262_143,), (262_144,), (600_001,)]
    ),
)


@st.composite
def specs(draw: st.DrawFn, trainable: bool | None = None) -> ParamSpec:
    trains = draw(st.booleans()) if trainable is None else trainable
    dtype = draw(st.sampled_from(["f32", "bf16", "f16"] if trains else list(SIZES)))
    return ParamSpec(draw(st.text("abc.", min_size=1, max_size=3)), draw(shapes), dtype, SIZES[dtype], trains)


units = st.lists(specs(), max_size=12)


@given(units)
@example([ParamSpec("a", (size,), "bf16", 2, True) for size in range(41)] + [ParamSpec("b", (), "f32", 4, True)])
def test_a_unit(params: list[ParamSpec]) -> None:
    """Parameters, gradients and state elements are disjoint and aligned, and lie inside their regions (F7, M20)."""
    layout = unit_layout(params)
    assert [place.spec for place in layout.places] == params
    assert layout.flat_bytes % PAGE == 0 or layout.flat_bytes == 0
    edges = sorted(layout.regions.values())
    assert all(offset % PAGE == 0 and nbytes > 0 for offset, nbytes in edges)
    assert all(offset + nbytes <= following for (offset, nbytes), (following, _) in pairwise(edges))
    assert not edges or sum(edges[-1]) <= layout.flat_bytes < sum(edges[-1]) + PAGE
    assert layout.elements % STATE_ALIGN == 0
    assert layout.low_first % CHUNK_ALIGN == 0
    for kind in ("flat", "grad", "elem", *{place.region for place in layout.places}):
        runs = []
        for place in layout.places:
            spec = place.spec
            if (
                not spec.numel
                or (kind in ("grad", "elem") and not spec.trainable)
                or (kind not in ("flat", "grad", "elem") and place.region != kind)
            ):
                continue
            start = {"flat": layout.flat_offset(place), "grad": place.grad, "elem": place.elem}.get(kind, place.offset)
            runs.append((start, start + (spec.numel if kind == "elem" else spec.nbytes)))
            assert start % (PARAM_ALIGN if kind == "elem" else 256) == 0
        runs.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(runs))
        limit = {"flat": layout.flat_bytes, "grad": layout.grad_bytes, "elem": layout.elements}.get(
            kind, layout.region_bytes(kind)
        )
        assert not runs or (runs[0][0] >= 0 and runs[-1][1] <= limit)
    for place in layout.places:
        assert (place.elem >= 0) == (place.grad >= 0) == place.spec.trainable
        if place.region == "param":
            assert place.offset == 2 * (place.elem - layout.low_first)
        elif place.region == "fp32":
            assert place.offset == 4 * place.elem <= 4 * layout.elements
        else:
            assert not place.spec.trainable
    assert (layout.elements == 0) == (not any(spec.trainable and spec.numel for spec in params))
    assert layout.state_bytes == 12 * layout.elements


@given(units)
def test_padding_is_bounded(params: list[ParamSpec]) -> None:
    """A unit never takes more than its parameters, an alignment step for each and a few pages."""
    layout = unit_layout(params)
    assert layout.flat_bytes <= sum(round_up(spec.nbytes, 1024) for spec in params) + 4 * PAGE + 2 * STATE_ALIGN
    trained = [spec for spec in params if spec.trainable]
    assert layout.elements <= sum(round_up(spec.numel, PARAM_ALIGN) for spec in trained) + CHUNK_ALIGN + STATE_ALIGN


def test_what_cannot_be_trained() -> None:
    """Other dtypes may be frozen only."""
    with pytest.raises(ValueError, match=r"w is trainable with dtype float64.*freeze it"):
        unit_layout([ParamSpec("w", (3,), "float64", 8, True)])
    assert unit_layout([ParamSpec("w", (3,), "float64", 8, False)]).elements == 0


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 2), st.data())
def test_state_pieces_cover_exactly(blocks: int, chunks: int, part: int, data: st.DataObject) -> None:
    """Every element of a range is in exactly one piece, at the place the chunked layout gives it."""
    elements, chunk = blocks * STATE_ALIGN, chunks * CHUNK_ALIGN
    first = data.draw(st.integers(0, elements))
    last = data.draw(st.integers(first, elements))
    expected = first
    for piece in state_pieces(elements, chunk, part, first, last):
        assert piece.count > 0
        assert piece.elem == expected
        start = piece.elem // chunk * chunk
        size = min(chunk, elements - start)
        assert piece.elem + piece.count <= start + size
        assert piece.offset == 12 * start + 4 * (part * size + piece.elem - start)
        expected += piece.count
    assert expected == last


@given(st.integers(1, 30), st.integers(1, 8))
def test_state_parts_tile_the_record(blocks: int, chunks: int) -> None:
    """The three parts together are every byte of the record once, each part of each chunk on a page."""
    elements, chunk = blocks * STATE_ALIGN, chunks * CHUNK_ALIGN
    runs = sorted(
        (piece.offset, 4 * piece.count)
        for part in range(3)
        for piece in state_pieces(elements, chunk, part, 0, elements)
    )
    assert all(offset % PAGE == 0 for offset, _ in runs)
    assert runs[0][0] == 0
    assert all(offset + nbytes == following for (offset, nbytes), (following, _) in pairwise(runs))
    assert sum(runs[-1]) == 12 * elements


@given(st.lists(units, max_size=4))
def test_chunks(groups: list[list[ParamSpec]]) -> None:
    """A chunk is a whole number of pages in both forms and no larger than it need be."""
    layouts = [unit_layout(params) for params in groups]
    chunk = chunk_elements(layouts)
    assert chunk % CHUNK_ALIGN == 0
    assert CHUNK_ALIGN <= chunk <= CHUNK_MAX
    largest = max((layout.elements for layout in layouts), default=0)
    assert chunk <= round_up(max(largest, 1), CHUNK_ALIGN)


# -- placement ---------------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> list[UnitSize]:
    """A root and units below it, some of them nested."""
    count = draw(st.integers(1, 6))
    sizes = []
    for index in range(count):
        around: tuple[int, ...] = ()
        if index:
            parent = draw(st.integers(0, index - 1))
            around = (*sizes[parent].around, parent)
        sizes.append(UnitSize(f"u{index}", unit_layout(draw(st.lists(specs(), min_size=1, max_size=6))), around))
    return sizes


def needs(error: BudgetError) -> int:
    found = re.search(r"budget that works is (\d+) bytes", str(error))
    assert found is not None
    return int(found.group(1))


def used_by(sizes: list[UnitSize], placement: object, drives: int, native: bool, cuda: bool) -> int:
    """The host bytes of a placement, added up here from its parts."""
    p = placement
    total = sum(round_up(unit.layout.grad_bytes, PAGE) for unit in sizes)
    total += sum(round_up(u.layout.flat_bytes, PAGE) for u, there in zip(sizes, p.param_host, strict=True) if there)  # type: ignore[attr-defined]
    total += sum(round_up(u.layout.state_bytes, PAGE) for u, there in zip(sizes, p.state_host, strict=True) if there)  # type: ignore[attr-defined]
    if native and any(u.layout.state_bytes for u in sizes):
        total += p.slots * SLOT_BYTES * p.chunk  # type: ignore[attr-defined]
    if native:
        total += IO_BYTES * drives
    return total + p.staging_blocks * p.staging_block + p.work_bytes  # type: ignore[attr-defined]


flags = st.tuples(st.integers(0, 3), st.booleans(), st.booleans())


@given(models(), flags, st.integers(0, 1 << 27), st.sampled_from([0, 4095, 4096, 10_000_000]))
def test_host_budgets(sizes: list[UnitSize], kind: tuple[int, bool, bool], extra: int, activations: int) -> None:
    """No placement exceeds its budget; too small a one names the smallest that works, exactly (F4, F5, R4)."""
    drives, native, cuda = kind
    roomy = 1 << 60
    with pytest.raises(BudgetError) as caught:
        placements.place(sizes, host=-1, device=roomy, drives=drives, native=native, cuda=cuda, activations=activations)
    least = needs(caught.value)
    for host in (least, least + extra):
        placement = placements.place(
            sizes, host=host, device=roomy, drives=drives, native=native, cuda=cuda, activations=activations
        )
        assert placement.host_needed <= host
        assert placement.host_min == least
        assert placement.activations == activations // PAGE * PAGE
        assert used_by(sizes, placement, drives, native, cuda) + placement.activations <= placement.host_needed
        steps = native and any(unit.layout.elements for unit in sizes)
        assert placement.slots >= MIN_SLOTS if steps else placement.slots == 0
        if not drives:
            assert all(placement.param_host)
            assert all(placement.state_host)
    with pytest.raises(BudgetError) as again:
        placements.place(
            sizes, host=least - 1, device=roomy, drives=drives, native=native, cuda=cuda, activations=activations
        )
    assert needs(again.value) == least


@given(models(), flags)
def test_device_budgets(sizes: list[UnitSize], kind: tuple[int, bool, bool]) -> None:
    """The smallest device budget holds every unit with those around it and its two largest gradients."""
    drives, native, cuda = kind
    least, reserve = device_needs(sizes)
    for unit in sizes:
        chain = unit.layout.flat_bytes + sum(sizes[index].layout.flat_bytes for index in unit.around)
        grads = sorted(place.spec.nbytes for place in unit.layout.places if place.spec.trainable)
        assert chain + reserve <= least
        assert sum(grads[-2:]) <= reserve
    placement = placements.place(sizes, host=1 << 60, device=least, drives=drives, native=native, cuda=cuda)
    assert placement.grad_reserve == reserve
    if least:
        with pytest.raises(BudgetError) as caught:
            placements.place(sizes, host=1 << 60, device=least - 1, drives=drives, native=native, cuda=cuda)
        assert needs(caught.value) == least


@given(models(), st.booleans(), st.integers(0, 1 << 26), st.integers(0, 1 << 26))
def test_more_memory_never_does_worse(sizes: list[UnitSize], native: bool, one: int, two: int) -> None:
    """With all the memory there is, everything lies in host memory; state records go there only behind their
    parameters.
    """
    with pytest.raises(BudgetError) as caught:
        placements.place(sizes, host=-1, device=1 << 60, drives=1, native=native, cuda=False)
    least = needs(caught.value)
    for host in sorted((least + one, least + two)):
        placement = placements.place(sizes, host=host, device=1 << 60, drives=1, native=native, cuda=False)
        assert all(
            param or not state or not unit.layout.state_bytes
            for unit, param, state in zip(sizes, placement.param_host, placement.state_host, strict=True)
        )
    everything = placements.place(sizes, host=1 << 50, device=1 << 60, drives=1, native=native, cuda=False)
    assert all(everything.param_host)
    assert all(everything.state_host)


def test_chunk_does_not_depend_on_budgets() -> None:
    """A store written under one budget opens under another."""
    layout = unit_layout([ParamSpec("w", (300_000,), "bf16", 2, True)])
    assert isinstance(layout, UnitLayout)
    sizes = [UnitSize("u", layout)]
    chunks = {
        placements.place(sizes, host=host, device=1 << 40, drives=1, native=native, cuda=False).chunk
        for host in (1 << 25, 1 << 40)
        for native in (True, False)
    }
    assert len(chunks) == 1


@given(models(), flags, st.integers(0, 1 << 25), st.sampled_from(["f32", "bf16", "u8"]), st.booleans(), st.booleans())
def test_formats_fit(
    sizes: list[UnitSize], kind: tuple[int, bool, bool], extra: int, moments: Any, split: bool, amsgrad: bool
) -> None:
    """float32 states fit as they were placed, others within the budget; too small a one names one that works."""
    drives, native, cuda = kind
    with pytest.raises(BudgetError) as caught:
        placements.place(sizes, host=-1, device=1 << 60, drives=drives, native=native, cuda=cuda)
    host = needs(caught.value) + extra
    placement = placements.place(sizes, host=host, device=1 << 60, drives=drives, native=native, cuda=cuda)
    layouts = [unit.layout for unit in sizes]

    def fitted(wanted: StateFormat, host: int) -> Fit:
        return fit(wanted, layouts, placement, placement.param_host, host, nvme=drives > 0)

    plain = fitted(PLAIN, host)
    assert plain.host_needed == placement.host_needed
    assert plain.state_host == placement.state_host
    wanted = StateFormat("split" if split else "f32", moments, amsgrad)
    try:
        found = fitted(wanted, host)
    except BudgetError as error:
        assert amsgrad or split
        host = int(str(error).split("at least ")[1].split()[0])
        found = fitted(wanted, host)
    assert found.host_needed <= host
    assert all(before or not there for before, there in zip(placement.state_host, found.state_host, strict=True))
    assert drives or found.state_host == placement.state_host
