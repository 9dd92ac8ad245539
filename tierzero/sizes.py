"""Byte sizes as people write them: parse "64MiB", "1.5GB", "5e7", "60%", and print them back."""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "kib": 1024,
    "m": 1000**2,
    "mb": 1000**2,
    "mib": 1024**2,
    "g": 1000**3,
    "gb": 1000**3,
    "gib": 1024**3,
    "t": 1000**4,
    "tb": 1000**4,
    "tib": 1024**4,
    "p": 1000**5,
    "pb": 1000**5,
    "pib": 1024**5,
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(%|[a-zA-Z]*)\s*")


_TOO_MANY = 10**300  # bytes; no float counts them


def parse_size(value: int | float | str, *, of: int | None = None, what: str = "size") -> int:
    """Whole bytes for an int, a float or a string with an optional unit (B, kB, MB, GB, TB, PB and KiB, MiB, GiB, TiB,
    PiB) or `%` of `of`.

    Raises ValueError with a sentence for anything else, for negative sizes and for `%` where there is nothing to take
    it of.
    """
    given: Any = value  # which the caller's types may not say
    if isinstance(given, bool) or not isinstance(given, str | Real):
        raise ValueError(
            f"{what} must be a size in bytes such as 64MiB, got {repr(value)[:80]}; "
            'write a number or a string like "2GiB"'
        )
    if not isinstance(given, str):
        try:
            count: int | float = int(given) if isinstance(given, Integral) else float(given)  # of NumPy and others too
        except OverflowError:
            count = _TOO_MANY + 1
        if count != count or count in (float("inf"), float("-inf")) or count < 0:
            raise ValueError(f"{what} must be a size of zero bytes or more, got {value!r}")
        if count > _TOO_MANY:
            raise ValueError(f"{what} is more bytes than can be counted")
        return int(count)
    match = _PATTERN.fullmatch(given)
    if match is None:
        raise ValueError(
            f'{what} {value!r} is not a size; write bytes or a number with a unit, such as "64MiB", "1.5GB" or "5e7"'
        )
    number, unit = float(match.group(1)), match.group(2).lower()
    if unit == "%":
        if of is None:
            raise ValueError(
                f'{what} {value!r}: a percentage has nothing to be a part of here; write bytes such as "64MiB"'
            )
        if number > 100:
            raise ValueError(f"{what} {value!r} is more than all there is; write at most 100%")
        return int(of * number / 100)
    if unit not in _UNITS:
        raise ValueError(
            f"{what} {value!r} has the unknown unit {match.group(2)!r}; "
            'use one of B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB or "%"'
        )
    if number * _UNITS[unit] == float("inf"):
        raise ValueError(f"{what} {value!r} is more bytes than can be counted")
    return int(number * _UNITS[unit])


LEAST_RATE = 1_000_000  # bytes per second that a limit may be: below it a block takes longer than a deadline


def parse_rate(value: int | float | str, *, what: str = "rate") -> int:
    """Whole bytes per second for a number or a string such as "1.5GB/s"; ValueError with a sentence otherwise, and
    below LEAST_RATE.
    """
    given = re.sub(r"\s*/\s*s\s*\Z", "", value) if isinstance(value, str) else value
    try:
        rate = parse_size(given, what=what)
    except ValueError:
        raise ValueError(
            f'{what} {repr(value)[:80]} is not a rate; write bytes per second or a string such as "1.5GB/s"'
        ) from None
    if rate < LEAST_RATE:
        raise ValueError(f"{what} must be at least 1 MB/s, got {value!r}")
    return rate


def format_size(nbytes: int | float) -> str:
    """`nbytes` with a binary unit and three digits: 33.8 MiB."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_decimal(nbytes: int | float) -> str:
    """`nbytes` with a decimal unit, as drives are rated: 1.20 PB."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} PB"
