"""Counters of one engine: bytes per link, stalls by cause, hits, and the analytic bytes they are held against."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Metrics:
    """Times are seconds, sizes bytes, both since `offload`. Written from the training thread and the loop thread."""

    device_budget: int = 0
    device_used: int = 0
    device_peak: int = 0
    host_budget: int = 0
    nvme_read_expected: int = 0
    nvme_written_expected: int = 0
    h2d: int = 0
    d2h: int = 0
    stall_fetch_s: float = 0.0
    stall_update_s: float = 0.0
    stall_grad_s: float = 0.0
    stall_activation_s: float = 0.0
    update_s: float = 0.0
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    prefetch_wasted: int = 0
    forced_evictions: int = 0
    faults: int = 0
    activations_offloaded: int = 0
    activations_restored: int = 0
    activations_written: int = 0
    activations_read: int = 0
    activations_kept: int = 0
    activation_hits: int = 0
    activation_misses: int = 0
    steps: int = 0
    skipped_steps: int = 0
    guesses: int = 0
    guesses_right: int = 0
    guesses_redone: int = 0
    guesses_dropped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to one counter, atomically."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def device(self, delta: int) -> None:
        """Bytes taken (or given back, negative) in the device tier; keeps the high-water mark."""
        with self._lock:
            self.device_used += delta
            self.device_peak = max(self.device_peak, self.device_used)

    def device_passing(self, nbytes: int) -> None:
        """Bytes in the device tier that are gone again when this is called; they count for the high-water mark."""
        with self._lock:
            self.device_peak = max(self.device_peak, self.device_used + nbytes)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the counter `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def snapshot(self) -> dict[str, float]:
        """All counters at this moment."""
        with self._lock:
            return {name: value for name, value in vars(self).items() if not name.startswith("_")}


__all__ = ["Metrics"]
