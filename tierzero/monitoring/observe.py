"""Watching a model train: a trace of what happens when, and the counters for Prometheus."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from tierzero.api import engine_of, stats
from tierzero.engine import Engine
from tierzero.errors import TierzeroError
from tierzero.monitoring.prometheus import Endpoint, serve
from tierzero.monitoring.timeline import Recorder

TICK = 0.005  # seconds between samples of the links


@contextmanager
def trace(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what the engine of `model` does inside, and at the end write it to `path`: a Chrome trace (JSON), which
    https://ui.perfetto.dev and chrome://tracing open.

    Compute, waits and gradients of the training thread by unit; fetches and evictions; updates with their reads,
    arithmetic and writes; gradient norms; GB/s of each link every 5 ms. Enter it between two steps. It costs some
    microseconds per event, and memory for up to half a million of them. TierzeroError if a trace is being recorded
    already; OSError if `path` cannot be written.
    """
    engine = engine_of(model)
    check_target(path)
    recorder = begin(engine)
    try:
        yield
    finally:
        end(engine, recorder)
        recorder.write(path)


@contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """`trace` without a file: the recorder has what happened."""
    recorder = begin(engine)
    try:
        yield recorder
    finally:
        end(engine, recorder)


def check_target(path: str | os.PathLike[str]) -> None:
    """OSError if no trace can be written to `path`."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"cannot write a trace there, {folder} is not a directory", str(path))
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, "cannot write a trace there, it is a directory: name a file", str(path))


def begin(engine: Engine) -> Recorder:
    """Record from now on, until `end`. TierzeroError while another recorder does."""
    if engine.metrics.recorder is not None:
        raise TierzeroError("a trace of this model is being recorded already: leave that `with` block first")
    recorder = Recorder()
    engine.metrics.record(recorder)
    recorder.sampler = threading.Thread(target=_sample, args=(engine, recorder), name="tierzero-trace", daemon=True)
    recorder.sampler.start()
    return recorder


def end(engine: Engine, recorder: Recorder) -> None:
    """Stop recording."""
    engine.metrics.record(None)
    recorder.stop.set()
    if recorder.sampler is not None:
        recorder.sampler.join()
    recorder.track.clear()


def _sample(engine: Engine, recorder: Recorder) -> None:
    while True:
        read, written = engine.moved()
        metrics = engine.metrics
        recorder.sample(
            nvme_read=read, nvme_written=written, h2d=metrics.h2d, d2h=metrics.d2h, device_held=metrics.device_used
        )
        if recorder.stop.wait(TICK):
            return


def serve_metrics(model: nn.Module, port: int = 0, address: str = "127.0.0.1") -> Endpoint:
    """Answer Prometheus at http://ADDRESS:PORT/metrics with the counters of `model` until the result's `close()`.

    port: 0 for any free one, which the result names. address: whom it listens to; "0.0.0.0" for other machines, which
    may then read the counters too. Needs prometheus-client (`pip install 'tierzero[metrics]'`). OSError if the port is
    taken.
    """
    engine = engine_of(model)
    return serve(lambda: stats(model) if not engine.closed else None, port, address)


__all__ = ["begin", "check_target", "end", "recording", "serve_metrics", "trace"]
