"""The "did you mean" at the end of a sentence about an unknown name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """`; did you mean train.lr?`, or nothing where no known name is near. Dotted names also match by the last part."""
    low = name.lower()
    by_case = {candidate.lower(): candidate for candidate in known}
    leaf = low.rpartition(".")[2]
    same_leaf = [candidate for key, candidate in by_case.items() if key.rpartition(".")[2] == leaf]
    if same_leaf:
        return f"; did you mean {' or '.join(same_leaf)}?"
    close = get_close_matches(low, by_case, n=1, cutoff=0.6)
    if not close:
        leaves = {key.rpartition(".")[2]: key for key in reversed(by_case)}
        close = [leaves[match] for match in get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    return f"; did you mean {by_case[close[0]]}?" if close else ""
