"""A measured program in a process of its own: asked by lines of JSON on stdin, answering by lines of JSON on stdout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TextIO


class Worker:
    """The parent's side. RuntimeError with the program's own words when it fails."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.command = command
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - close() ends it
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | (environment or {}),
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """The answer to one question."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = self.process.stdout.readline()
        if not line:
            self.process.communicate()
            self._said.seek(0)
            said = " ".join(self._said.read().split())[-400:]
            ending = f"ended with {self.process.returncode}"
            if self.process.returncode == -signal.SIGKILL:
                ending = "was killed (out of memory?)"
            raise RuntimeError(f"{' '.join(self.command)} {ending}: {said or 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the program."""
        if self.process.poll() is None:
            self.process.communicate()
        self._said.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answers() -> TextIO:
    """Where the program's side answers. From now on, what anything prints to stdout is thrown away."""
    out = os.fdopen(os.dup(1), "w")
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.close(sink)
    return out


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], out: TextIO) -> None:
    """The program's side, until stdin ends."""
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()
