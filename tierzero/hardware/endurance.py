"""Wear: the rate at which a run writes, and how long a rating in bytes written (TBW) lasts. Pure arithmetic."""

from __future__ import annotations

DAY = 86_400.0  # seconds


def per_day(written: float, seconds: float) -> float:
    """Bytes per day at the rate of `written` bytes in `seconds`; 0 before any time has passed."""
    return written / seconds * DAY if seconds > 0 else 0.0


def days_left(rating: int | None, written: int, seconds: float) -> float | None:
    """Days until drives that were new when the `seconds` began have written their `rating` (bytes, all together).

    None without a rating, infinity while nothing is written.
    """
    if rating is None:
        return None
    rate = per_day(written, seconds)
    return max(rating - written, 0) / rate if rate else float("inf")


def steps_left(rating: int | None, step_written: int) -> int | None:
    """Optimizer steps of `step_written` bytes that new drives of this `rating` (bytes) stand.

    None without a rating, or if a step writes nothing.
    """
    return None if rating is None or not step_written else rating // step_written
