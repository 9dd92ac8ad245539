"""`tierzero bench nvme` from end to end: every path alone, all of them together, and what is kept of it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tierzero
from tierzero.bench import fio
from tierzero.bench.scratch import Scratch, check_directory, fit, native
from tierzero.bench.search import Found, Search, engines, settings_of, summary
from tierzero.bench.stream import KINDS
from tierzero.hardware import profiles
from tierzero.hardware.drives import drive_of
from tierzero.storage.stripes import stripe_weights


@dataclass
class Report:
    """paths: what was found on each; together: on all of them as one striped file, None for a single path."""

    paths: list[Path]
    found: list[Found]
    together: Found | None = None
    weights: list[int] = field(default_factory=list)
    saved: list[Path | None] = field(default_factory=list)
    engines: dict[str, str] = field(default_factory=dict)
    fio: str | None = None
    when: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def totals(self) -> tuple[int, int]:
        """(read, written) bytes of the whole run."""
        every = [found.totals() for found in [*self.found, *([self.together] if self.together else [])]]
        return sum(read for read, _ in every), sum(written for _, written in every)

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        whole = self.together or self.found[0]
        read, written = self.totals()
        return {
            **{kind: summary(whole, kind) for kind in KINDS},
            "paths": [
                {
                    "path": str(path),
                    "device": profiles.drive_key(path),
                    **_details(found),
                    "profile": None if saved is None else str(saved),
                }
                for path, found, saved in zip(self.paths, self.found, self.saved, strict=True)
            ],
            "together": None if self.together is None else {"weights": self.weights, **_details(self.together)},
            "size": whole.size,
            "huge_pages": whole.huge_pages,
            "engines": self.engines,
            "kernel": platform.release(),
            "fio": self.fio,
            "bytes_read": read,
            "bytes_written": written,
            "seconds": self.seconds,
            "when": self.when,
            "version": tierzero.__version__,
            "notes": self.notes,
        }


def _details(found: Found) -> dict[str, Any]:
    return {
        **{kind: summary(found, kind) for kind in KINDS},
        "size": found.size,
        "direct": found.direct,
        "alignment": found.alignment,
        "huge_pages": found.huge_pages,
        "fio_setting": None if found.fio_job is None else found.fio_job.label,
        "grid": [
            {
                "engine": setting.engine,
                "block": setting.block,
                "depth": setting.depth,
                **{kind: found.rate(setting, kind) / 1e9 for kind in KINDS},
                "cpu_s_per_GB": {kind: found.cpu(setting, kind) for kind in KINDS},
                "score": found.score(setting),
            }
            for setting in found.ranking()
        ],
    }


def measure(
    paths: Sequence[Path],
    size: int,
    *,
    seconds: float,
    compare: bool,
    progress: Callable[[str, float], None],
) -> Report:
    """Measures every path for its share of `seconds` and stores a profile of each drive. Leaves nothing on them.

    ConfigError for a path that is no directory, OSError where the drive refuses or is full.
    """
    start = time.perf_counter()
    native()
    for path in paths:
        check_directory(path)
    report = Report(list(paths), [], when=datetime.now(UTC).isoformat(timespec="seconds"))
    report.engines = engines()
    for engine, reason in report.engines.items():
        if reason:
            report.notes.append(f"{engine} does not work here ({reason}); the other engine was measured")
    if compare:
        report.fio = fio.version()
        if report.fio is None:
            report.notes.append("fio is not installed, so nothing was compared: install it (Debian: apt install fio)")
    working = [engine for engine, reason in report.engines.items() if not reason]
    parts = len(paths) + (len(paths) > 1)
    share = seconds / parts

    def search(targets: Sequence[Path], label: str, part: int, weights: Sequence[int] = (1,)) -> Found:
        nbytes, note = fit(targets, size, weights)
        if note:
            report.notes.append(note)
        with Scratch(targets, nbytes, weights) as scratch:
            found = Search(
                scratch,
                # io_uring is for direct I/O only
                settings_of(working if scratch.file.direct else ["pool"]),
                share,
                weights=weights,
                compare=report.fio is not None,
                progress=lambda what, done: progress(f"{label}: {what}", (part + done) / parts),
            ).run()
        if found.size < nbytes:
            report.notes.append(f"{label}: slow; the first {found.size >> 20} MiB of the file were written in the time")
        if not found.direct:
            report.notes.append(
                f"{label}: the file system refuses O_DIRECT; buffered I/O was measured, which costs CPU time"
            )
        return found

    for part, path in enumerate(paths):
        found = search([path], str(path), part)
        report.found.append(found)
        report.saved.append(_save(path, found, report))
    if len(paths) > 1:
        keys = [profiles.drive_key(path) for path in paths]
        if len(set(keys)) < len(keys):
            report.notes.append("some of these paths are on the same drive: together they cannot be faster than it")
        report.weights = stripe_weights([_pace(found) for found in report.found])
        report.together = search(paths, "together", len(paths), report.weights)
    report.seconds = time.perf_counter() - start
    return report


def _pace(found: Found) -> float:
    """Bytes/s of reads and writes at the same time, which is what an optimizer's step does."""
    assert found.winner is not None
    return found.rate(found.winner, "mixed")


def _save(path: Path, found: Found, report: Report) -> Path | None:
    """The profile's file; None, with a note, for what is no drive, and where it cannot be written."""
    if drive_of(path).in_memory:
        report.notes.append(f"{path}: this is memory, not a drive, and no profile of it is stored")
        return None
    winner = found.winner
    assert winner is not None
    try:
        return profiles.save(
            profiles.Profile(
                device=profiles.drive_key(path),
                path=os.path.realpath(path),
                when=report.when,
                kernel=platform.release(),
                engine=winner.engine,
                block=winner.block,
                depth=winner.depth,
                read=found.rate(winner, "read"),
                write=found.rate(winner, "write"),
                mixed=found.rate(winner, "mixed"),
                sustained_write=found.long["write"].sustained,
            )
        )
    except OSError as error:
        report.notes.append(f"the profile was not stored: {error.filename}: {error.strerror}; set TIERZERO_PROFILES")
        return None
