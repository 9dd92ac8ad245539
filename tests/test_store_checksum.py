"""The checksum pair: against its definition, additive over ranges, the same in numpy and native code."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierzero.native import NATIVE
from tierzero.storage import checksum as module
from tierzero.storage.checksum import checksum, combine, from_hex, to_hex

M = 1 << 64


def by_definition(data: bytes, word_offset: int) -> tuple[int, int]:
    padded = data + b"\0" * (-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)]
    return sum(words) % M, sum((word_offset + i + 1) * w for i, w in enumerate(words)) % M


@given(st.binary(max_size=300), st.integers(0, 1 << 40))
def test_is_what_it_is_defined_to_be(data: bytes, word_offset: int) -> None:
    expected = by_definition(data, word_offset)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    assert checksum(data, word_offset) == expected
    assert checksum(bytearray(data), word_offset) == expected
    assert checksum(np.frombuffer(bytearray(data), np.uint8), word_offset) == expected
    assert checksum(tensor, word_offset) == expected
    assert module._checksum_numpy(np.frombuffer(data, np.uint8), word_offset) == expected


@given(
    st.binary(min_size=8, max_size=400), st.lists(st.integers(0, 100), max_size=4), st.randoms(use_true_random=False)
)
def test_ranges_add_up_in_any_order(data: bytes, cuts: list[int], random) -> None:
    edges = sorted({0, len(data), *(4 * (cut % (len(data) // 4)) for cut in cuts)})
    parts = [checksum(data[a:b], a // 4) for a, b in pairwise(edges)]
    random.shuffle(parts)
    assert combine(*parts) == checksum(data)


def test_a_large_range_and_overflow_are_the_same_everywhere() -> None:
    data = np.full(3_000_001, 0xFF, np.uint8)
    expected = by_definition(data.tobytes(), 1 << 62)
    assert module._checksum_numpy(data, 1 << 62) == expected
    if NATIVE is not None:
        assert tuple(NATIVE.checksum(data, 1 << 62)) == expected


@given(st.binary(min_size=1, max_size=200), st.integers(0, 10_000), st.integers(1, 255))
def test_one_changed_byte_changes_it(data: bytes, where: int, flip: int) -> None:
    other = bytearray(data)
    other[where % len(other)] ^= flip
    assert checksum(bytes(other)) != checksum(data)


def test_swapped_words_change_it() -> None:
    assert checksum(b"abcdefgh") != checksum(b"efghabcd")


@given(st.tuples(st.integers(0, M - 1), st.integers(0, M - 1)))
def test_hex_round_trip(sums: tuple[int, int]) -> None:
    assert from_hex(to_hex(sums)) == sums


@pytest.mark.parametrize("text", ["", "12", "g" * 32, "0" * 33])
def test_bad_hex_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_hex(text)


def test_any_dtype_and_no_copy_of_the_storage() -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    assert checksum(tensor) == checksum(tensor.numpy().tobytes())
    low = torch.ones(7, dtype=torch.bfloat16)
    assert checksum(low) == checksum(low.view(torch.uint8))
    fresh = torch.zeros(64, dtype=torch.uint8)
    checksum(fresh)
    fresh.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="contiguous"):
        checksum(tensor[::2])
    with pytest.raises(ValueError, match="contiguous"):
        checksum(np.arange(10)[::2])
