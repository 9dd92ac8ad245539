"""`tierzero doctor --selftest`: every backend writes, reads and verifies on a path, in a directory of its own that is
removed however this process ends, except by a signal that it cannot see; the next self-test there removes it then.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierzero.doctor.child import Child
from tierzero.hardware.drives import existing_parent

BACKENDS = {
    "uring": "io_uring, O_DIRECT",
    "pool": "threads, O_DIRECT",
    "buffered": "native, page cache",
    "portable": "portable (aiofiles)",
    "gpudirect": "GPUDirect (kvikio)",
    "training": "training, end to end",
}
TARGET = "tierzero.doctor.backends:run"
OPTIONAL = ("gpudirect",)
SECONDS = 26.0  # for the child, torch's import included; the rest is for starting it and cleaning up
SILENCE = 45.0
_PREFIX = ".tierzero-selftest-"
_LEAST = 96 << 20  # bytes free: the records, and a little for the large passes


@dataclass(frozen=True)
class Trial:
    """`ok` None: not to be had here, `error` says why. Rates in bytes per second, 0 where none was measured."""

    backend: str
    ok: bool | None
    error: str = ""
    read: float = 0.0
    write: float = 0.0
    verified: int = 0
    requests: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether training would suffer."""
        return self.ok is False and self.backend not in OPTIONAL


@dataclass(frozen=True)
class Verdict:
    """The whole self-test."""

    path: str
    trials: tuple[Trial, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether everything that training needs works."""
        return not any(trial.failed for trial in self.trials)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": self.ok,
            "path": self.path,
            "seconds": self.seconds,
            "trials": [dict(vars(trial)) for trial in self.trials],
        }


def selftest(
    path: str | os.PathLike[str],
    seconds: float = SECONDS,
    silence: float = SILENCE,
    heard: Callable[[str], None] = lambda backend: None,
) -> Verdict:
    """Try every backend in the nearest existing directory of `path`. `heard` is told what is being tried.

    OSError for a path that is not a directory, that cannot be written, or without room; nothing is left behind then. A
    backend that dies or hangs takes only itself down.
    """
    start = time.monotonic()
    base = existing_parent(path)
    if not base.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "the self-test needs a directory and leaves files alone", str(base))
    free = shutil.disk_usage(base).free
    if free < _LEAST:
        raise OSError(errno.ENOSPC, f"the self-test needs {_LEAST >> 20} MiB, {free >> 20} MiB are free", str(base))
    remove_stale(base)
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base)  # new, so nothing that exists is touched
    held = _hold(folder)
    try:
        trials = _run(folder, start + seconds, silence, (free - _LEAST) // 2, heard)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
    if os.path.lexists(folder):
        trials.append(Trial("cleaning up", False, f"{folder} could not be removed: delete it"))
    return Verdict(str(base), tuple(trials), time.monotonic() - start)


def _hold(folder: str) -> int:
    """A descriptor whose lock says that the folder is in use; the kernel drops it however this process ends."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with suppress(OSError):  # without locks, nobody removes it for us
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


def remove_stale(base: Path) -> None:
    """Remove the directories of self-tests in `base` whose process was killed: nobody holds them, and their process is
    gone from this machine. Those of other users stay.
    """
    for entry in base.glob(f"{_PREFIX}*"):
        pid, dash, _ = entry.name.removeprefix(_PREFIX).partition("-")
        if not dash or not pid.isdecimal() or os.path.exists(f"/proc/{pid}") or not os.path.exists("/proc/self"):
            continue
        with suppress(OSError):
            held = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry, ignore_errors=True)
            finally:
                os.close(held)


def _run(folder: str, end: float, silence: float, most: int, heard: Callable[[str], None]) -> list[Trial]:
    """All backends; a new child goes on behind the one that a child died of."""
    trials: list[Trial] = []
    names = list(BACKENDS)
    while names:
        started: list[str] = []

        def take(line: dict[str, Any], started: list[str] = started) -> None:
            if line["what"] == "start":
                started.append(str(line["backend"]))
                heard(BACKENDS[started[-1]])

        home = tempfile.mkdtemp(dir=folder)  # a dead child's files are in nobody's way
        left = max(1.0, end - time.monotonic())
        with Child(TARGET, home, names, left, most) as child:
            outcome = child.listen(silence, take)
        results = [line for line in outcome.lines if line["what"] == "result"]
        trials += [_trial(line) for line in results]
        shutil.rmtree(home, ignore_errors=True)
        del names[: len(results)]
        if not names:
            break
        trials.append(Trial(names[0], False, outcome.ended or "ended without a result"))
        del names[0]
        if not started:  # it never began: nor would the next
            trials += [Trial(name, False, "not tried, since no child process starts") for name in names]
            break
    return trials


def _trial(line: dict[str, Any]) -> Trial:
    known = {name: value for name, value in line.items() if name in Trial.__dataclass_fields__}
    return Trial(**{**known, "notes": tuple(known.get("notes", ()))})
