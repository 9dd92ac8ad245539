"""Which steps of a run are recorded, and where metrics are served: what the command's options say."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from tierzero.api import engine_of
from tierzero.engine import Engine
from tierzero.errors import ConfigError
from tierzero.monitoring.observe import begin, end
from tierzero.monitoring.timeline import Recorder

log = logging.getLogger("tierzero")
SETTLED = 3  # the first step whose order of use is known and whose updates have begun in backward


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """(first, last) step of `12`, `10-12` or `none`, which is (0, 0); None for None. ConfigError otherwise."""
    if text is None:
        return None
    if text == "none":
        return 0, 0
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if first < 1 or last < first:
        raise ConfigError(f"--trace takes a step, such as 12, a range, such as 10-12, or none, not {text!r}")
    return first, last


def check_steps(text: str | None, total: int) -> None:
    """ConfigError for what `parse_steps` refuses, and for steps that a run of `total` steps does not have."""
    asked = parse_steps(text)
    if asked is not None and asked[0] > total:
        raise ConfigError(f"--trace {text}: the run has {total} steps, so nothing would be recorded")


def parse_address(text: str | None) -> tuple[str, int] | None:
    """(address, port) of `9400` or `0.0.0.0:9400`. ConfigError for anything else."""
    if text is None:
        return None
    address, colon, port = text.rpartition(":")
    address = address.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
    if not address or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"--prometheus takes a port, such as 9400, or ADDRESS:PORT, not {text!r}")
    return address, int(port)


class StepTrace:
    """Records the steps that were asked for into `path`; by default one as soon as the engine has settled, and the one
    after it, under which its updates end.
    """

    def __init__(self, path: Path, asked: str | None, done: int, total: int) -> None:
        self.path = path
        steps = parse_steps(asked)
        if steps is None:
            steps = min(done + SETTLED, total), min(done + SETTLED + 1, total)
        self.first, self.last = steps
        if asked is not None and 0 < self.last <= done:  # nobody misses what was not asked for
            log.warning("no trace is recorded: step %d, the last one to record, was done before", self.last)
        self._recorder: tuple[Engine, Recorder] | None = None

    @contextmanager
    def around(self, model: nn.Module, step: int) -> Iterator[None]:
        """Around each step of the run."""
        if self.first <= step <= self.last and self._recorder is None:
            engine = engine_of(model)
            self._recorder = engine, begin(engine)
            self._recorder[1].steps_before = step - 1 - engine.metrics.steps - engine.metrics.skipped_steps
        yield
        if step >= self.last:
            self.close()

    def close(self) -> None:
        """Write what was recorded. Harmless when done already."""
        if self._recorder is not None:
            (engine, recorder), self._recorder = self._recorder, None
            end(engine, recorder)
            try:
                recorder.write(self.path)
            except OSError as error:  # training does not end for that
                log.warning("the trace could not be written to %s: %s", self.path, error.strerror)
