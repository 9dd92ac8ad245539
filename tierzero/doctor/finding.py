"""One thing that was looked at, and what it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "warn", "fail"]
RANK: dict[Status, int] = {"ok": 0, "note": 1, "warn": 2, "fail": 3}


@dataclass(frozen=True)
class Finding:
    """`status`: "note" costs nothing or cannot be helped, "warn" costs speed or safety, "fail" prevents training.

    `advice` is one line, empty only where the status is "ok". `path` is set where the finding is about one path.
    `facts` are the numbers behind `value`, in bytes and seconds.
    """

    name: str
    value: str
    status: Status = "ok"
    advice: str = ""
    path: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def one_line(text: object) -> str:
    """Text of a foreign origin (an exception, a library) on one line."""
    return " ".join(str(text).split())
