"""The training thread's spans as ranges of torch.profiler."""

from __future__ import annotations

import threading

from torch.profiler import record_function

from tierzero.monitoring.watch import Nest


class ProfilerRanges:
    """A watch.Sink. A range must end on the thread that it began on: on CUDA, backward runs on autograd's own, and what
    is open there belongs to it alone.
    """

    def __init__(self) -> None:
        self._nests: dict[int, Nest[record_function]] = {}

    def _nest(self) -> Nest[record_function]:
        return self._nests.setdefault(threading.get_ident(), Nest())

    def begin(self, key: object, kind: str, name: str) -> None:
        nest = self._nest()
        if key not in nest:
            shown = f"{kind} {name}" if kind in ("forward", "recompute", "backward") else name
            range = record_function(f"tierzero::{shown}")
            range.__enter__()
            nest.push(key, range)

    def end(self, key: object) -> None:
        for range in self._nest().pop(key):
            range.__exit__(None, None, None)

    def clear(self) -> None:
        for range in self._nest().pop_all():
            range.__exit__(None, None, None)


__all__ = ["ProfilerRanges"]
