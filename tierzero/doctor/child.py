"""Code that may abort, hang or print what it likes, run in a process of its own.

The child calls a generator function and sends what it yields, one JSON object a line. What arrived before it died
counts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_CODE = "from tierzero.doctor.child import main; main()"
_PR_SET_PDEATHSIG = 1
_KEPT = 4096  # bytes of stderr
_DYING = 5.0  # seconds; who waits on a drive that hangs cannot die


@dataclass(frozen=True)
class Outcome:
    """`lines`: what the child sent. `ended`: "" when it came to its end, else what became of it, as a clause."""

    lines: list[dict[str, Any]]
    ended: str

    @property
    def end(self) -> str:
        """`ended`, for one that should have said more than it did: never empty."""
        return self.ended or "ended early, with exit code 0"

    def last(self, what: str) -> dict[str, Any] | None:
        """The last line whose "what" is this."""
        return next((line for line in reversed(self.lines) if line.get("what") == what), None)


class Child:
    """A call of `target` ("module:function") with JSON-able arguments, in a process that is gone when this is left, or
    dies as soon as the kernel lets it.
    """

    def __init__(self, target: str, *arguments: Any) -> None:
        self._lines: list[dict[str, Any]] = []
        self._errors = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._refused = ""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE, target, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the parent alone
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(_whole, sys.path)))},
            )
        except OSError as error:
            self._refused = f"could not be started: {error}"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it started
        with suppress(subprocess.TimeoutExpired):
            process.wait(_DYING)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def listen(self, silence: float, heard: Callable[[dict[str, Any]], None] | None = None) -> Outcome:
        """Until it ends, or has been silent for `silence` seconds. `heard` is given each line as it arrives. Never
        raises for what the child does.
        """
        if self._process is None:
            return Outcome(self._lines, self._refused)
        if self._silent(self._process, silence, heard):
            return Outcome(self._lines, f"did not answer within {silence:.0f} s and was killed")
        try:
            code = self._process.wait(silence)
        except subprocess.TimeoutExpired:
            return Outcome(self._lines, f"did not end within {silence:.0f} s and was killed")
        return Outcome(self._lines, _end(code, self._errors.decode(errors="replace")))

    def _silent(
        self, process: subprocess.Popen[bytes], silence: float, heard: Callable[[dict[str, Any]], None] | None
    ) -> bool:
        """Takes lines until the child closes its output; True if it kept silent for too long."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            selector.register(process.stderr, selectors.EVENT_READ)  # type: ignore[arg-type]
            until = time.monotonic() + silence
            while selector.get_map():
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready and time.monotonic() >= until:
                    return True
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        self._errors += data
                        del self._errors[:-_KEPT]
                    else:
                        *whole, rest = (rest + data).split(b"\n")
                        for line in whole:
                            self._take(line, heard)
                        until = time.monotonic() + silence
        return False

    def _take(self, line: bytes, heard: Callable[[dict[str, Any]], None] | None) -> None:
        value = None
        with suppress(ValueError):
            value = json.loads(line)
        if isinstance(value, dict):
            self._lines.append(value)
            if heard is not None:
                heard(value)


def _whole(entry: str) -> str:
    """An entry of sys.path for a process elsewhere; "" where it was the working directory and that is gone."""
    try:
        return entry or os.getcwd()
    except FileNotFoundError:
        return ""


def _end(code: int, errors: str) -> str:
    said = [line for line in errors.splitlines() if line.strip()]
    last = f": {' '.join(said[-1].split())}" if said else ""
    if code == 0:
        return ""
    if code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}{last}"
    return f"ended with exit code {code}{last}"


def main() -> None:
    """The child: argv is target and JSON arguments."""
    target, arguments = sys.argv[1], json.loads(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the parent
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is none of ours
    module, _, name = target.partition(":")
    for value in getattr(importlib.import_module(module), name)(*arguments):
        out.write(json.dumps(value) + "\n")
        out.flush()
    out.close()
    sys.stderr.flush()
    os._exit(0)  # no library's exit handler can spoil the result
