"""Checksums of records: two 64-bit sums over little-endian 32-bit words, which add up over disjoint ranges.

With words ``w_i`` (a tail shorter than 4 bytes is zero padded): ``s1 = sum w_i`` and ``s2 = sum (word_offset + i + 1)
* w_i``, both modulo 2**64. ``s2`` makes the pair sensitive to order; adding the pairs of consecutive ranges gives the
pair of the whole.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tierzero.native import NATIVE

Sums = tuple[int, int]

KIND = "s1s2-u32"
_MASK = (1 << 64) - 1
_BLOCK = 1 << 16  # words a block: the temporaries stay in the cache


def _as_bytes(data: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A flat uint8 view of a contiguous CPU tensor, numpy array or bytes-like object; never a copy."""
    if hasattr(data, "data_ptr"):
        if data.device.type != "cpu" or not data.is_contiguous():
            raise ValueError("checksum needs a contiguous tensor on the CPU: pass tensor.cpu().contiguous()")
        nbytes = data.numel() * data.element_size()
        if nbytes == 0:
            return np.empty(0, np.uint8)
        # not .numpy(): that would make the tensor's storage non-resizable
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(data.data_ptr()), np.uint8)
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("checksum needs a contiguous array: pass numpy.ascontiguousarray(array)")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def checksum(data: Any, word_offset: int = 0) -> Sums:
    """The pair (s1, s2) of ``data``: a contiguous CPU tensor, numpy array or bytes-like object of any dtype.

    ``word_offset`` is the position of the first byte in the record, in 4-byte words. Raises ValueError on a
    non-contiguous or non-CPU input.
    """
    raw = _as_bytes(data)
    if NATIVE is not None and raw.flags.writeable:
        s1, s2 = NATIVE.checksum(raw, word_offset)
        return int(s1), int(s2)
    return _checksum_numpy(raw, word_offset)


def _checksum_numpy(raw: np.ndarray[Any, np.dtype[np.uint8]], word_offset: int) -> Sums:
    whole = raw.nbytes // 4
    words = raw[: 4 * whole].view("<u4")
    index = np.arange(1, min(whole, _BLOCK) + 1, dtype=np.uint64)
    s1 = s2 = 0
    for start in range(0, whole, _BLOCK):
        block = words[start : start + _BLOCK].astype(np.uint64)
        b1 = int(block.sum(dtype=np.uint64))
        s1 += b1
        s2 += (word_offset + start) * b1 + int(np.dot(index[: block.size], block))
    if raw.nbytes % 4:
        tail = int.from_bytes(raw[4 * whole :].tobytes(), "little")
        s1 += tail
        s2 += (word_offset + whole + 1) * tail
    return s1 & _MASK, s2 & _MASK


def combine(*parts: Sums) -> Sums:
    """The pair of a whole from the pairs of its disjoint ranges, in any order."""
    return sum(p[0] for p in parts) & _MASK, sum(p[1] for p in parts) & _MASK


def to_hex(sums: Sums) -> str:
    """32 hexadecimal digits, s1 then s2."""
    return f"{sums[0]:016x}{sums[1]:016x}"


def from_hex(text: str) -> Sums:
    """The pair that :func:`to_hex` wrote; ValueError if ``text`` is not 32 hexadecimal digits."""
    if len(text) != 32:
        raise ValueError(f"a checksum is 32 hexadecimal digits, not {text!r}")
    return int(text[:16], 16), int(text[16:], 16)
