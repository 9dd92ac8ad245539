"""The counters of `stats` in Prometheus' text format over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tierzero.errors import ConfigError
from tierzero.monitoring.clock import PARTS

Stats = Callable[[], dict[str, Any] | None]
# name here, name in stats, what it is; a name that ends in _total is a counter
NUMBERS = (
    ("steps_total", "steps", "Optimizer steps done"),
    ("skipped_steps_total", "skipped_steps", "Steps skipped for a gradient that was not finite"),
    ("hits_total", "hits", "Uses of a unit that was on the device"),
    ("misses_total", "misses", "Uses that waited for a fetch"),
    ("prefetched_total", "prefetched", "Units fetched ahead"),
    ("prefetch_wasted_total", "prefetch_wasted", "Units fetched ahead and evicted unused"),
    ("departures_total", "departures", "Uses that were not the expected ones"),
    ("forced_evictions_total", "forced_evictions", "Units evicted in the middle of their backward"),
    ("update_seconds_total", "update_s", "Seconds that updates took, side by side"),
    ("device_bytes", "device_used", "Bytes in the device tier"),
    ("device_peak_bytes", "device_peak", "High-water mark of the device tier"),
    ("device_budget_bytes", "device_budget", "Its budget"),
    ("host_peak_bytes", "host_peak", "High-water mark of the host tier"),
    ("host_budget_bytes", "host_budget", "Its budget"),
    ("resident_units", "resident_units", "Units on the device"),
    ("nvme_written_per_day_bytes", "nvme_written_per_day", "Bytes a day at the rate since offload"),
    ("drive_days_left", "drive_days_left", "Days until the drives' rating is written"),
)
BYTES = ("nvme_read", "nvme_written", "h2d", "d2h")
STALLS = {
    "fetch": "stall_fetch_s",
    "update": "stall_update_s",
    "gradient": "stall_grad_s",
    "activation": "stall_activation_s",
    "save": "stall_save_s",
}


class Endpoint:
    """A running server; `port` is the one it listens on."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server = server
        self._thread = thread
        self.port = int(server.server_port)

    def close(self) -> None:
        """Stop answering. Harmless when done already."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve(stats: Stats, port: int, address: str) -> Endpoint:
    """Serve what `stats` returns at the time; nothing where that is None."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError(
            "metrics for Prometheus need prometheus-client: pip install 'tierzero[metrics]', or leave them out"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Collector(stats))
    try:
        return Endpoint(*start_http_server(port, address, registry=registry))
    except OSError as error:
        raise OSError(
            error.errno, f"cannot serve metrics at {address}:{port}: {error.strerror}. Choose another port"
        ) from None


def check(port: int, address: str) -> None:
    """Raises what `serve` would raise now."""
    serve(lambda: None, port, address).close()


class _Collector:
    """What Prometheus' registry asks at each scrape."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats

    def describe(self) -> list[Any]:
        return []  # names are known from a scrape alone

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = self.stats()
        if found is None:
            return
        for name, key, help in NUMBERS:
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            if found[key] is not None:
                yield family(f"tierzero_{name.removesuffix('_total')}", help, value=float(found[key]))
        yield _labelled(
            CounterMetricFamily("tierzero_link_bytes", "Bytes moved", labels=["link"]),
            {link: found[link] for link in BYTES},
        )
        yield _labelled(
            CounterMetricFamily("tierzero_stall_seconds", "Seconds waited", labels=["cause"]),
            {cause: found[key] for cause, key in STALLS.items()},
        )
        step = found["last_step"]
        if step is not None:
            yield GaugeMetricFamily("tierzero_step_seconds", "Wall time of the last step", value=step["wall_s"])
            yield _labelled(
                GaugeMetricFamily("tierzero_step_part_seconds", "The last step, by part", labels=["part"]),
                {part: step["parts_s"][part] for part in PARTS},
            )
            yield _labelled(
                GaugeMetricFamily("tierzero_link_busy_seconds", "Of the last step, by link", labels=["link"]),
                {link: of["busy_s"] for link, of in step["links"].items()},
            )


def _labelled(family: Any, values: dict[str, float]) -> Any:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


__all__ = ["Endpoint", "check", "serve"]
