"""The backends of the self-test, run in a child process one after the other; each yields what it did."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tierzero.doctor import exercise
from tierzero.doctor.finding import one_line
from tierzero.native import NATIVE
from tierzero.tiers.base import BlockFile

_TRAINING_SHARE = 0.3  # of the time


class Absent(Exception):
    """This backend is not to be had here; the message says why."""


def _native(path: str, kind: str, direct: bool) -> tuple[BlockFile, Any, str]:
    """The file, its engine, and what is worth noting."""
    if NATIVE is None:
        raise Absent("the native module is not built")
    if kind == "uring":
        reason = str(NATIVE.probe_uring())
        if reason:
            raise Absent(reason)
    from tierzero.tiers.nvme import NativeEngine, NativeFile

    engine = NativeEngine(kind=kind)
    try:
        file = NativeFile(path, engine, direct=direct)
    except BaseException:
        engine.close()
        raise
    note = "" if file.direct == direct else "O_DIRECT refused, through the page cache"
    return file, engine, note


def _uring(path: str) -> tuple[BlockFile, Any, str]:
    return _native(path, "uring", True)


def _pool(path: str) -> tuple[BlockFile, Any, str]:
    return _native(path, "pool", True)


def _buffered(path: str) -> tuple[BlockFile, Any, str]:
    return _native(path, "auto", False)


def _portable(path: str) -> tuple[BlockFile, Any, str]:
    from tierzero.tiers.portable import PortableFile

    return PortableFile(path), None, ""


OPENERS: dict[str, Callable[[str], tuple[BlockFile, Any, str]]] = {
    "uring": _uring,
    "pool": _pool,
    "buffered": _buffered,
    "portable": _portable,
}


def run(folder: str, names: list[str], seconds: float, most: int) -> Iterator[dict[str, Any]]:
    """In the child: every backend of `names` in turn, in about `seconds`, with at most `most` bytes of files at a time.

    Yields {"what": "start", "backend"} before each and {"what": "result", "backend", "ok", "error", ...} after it; "ok"
    is None where it is absent.
    """
    start = time.monotonic()
    far = exercise.sparse_reason(Path(folder))
    for index, name in enumerate(names):
        yield {"what": "start", "backend": name}
        began = time.monotonic()
        left = seconds - (began - start)
        trials = sum(other in OPENERS for other in names[index:])
        training = _TRAINING_SHARE * seconds if "training" in names[index:] else 0.0
        until = began + max(0.0, left - training) / max(1, trials)
        result: dict[str, Any] = {"what": "result", "backend": name, "ok": True, "error": "", "notes": []}
        try:
            if name in OPENERS:
                result.update(_trial(name, os.path.join(folder, name), until, most, far))
            elif name == "gpudirect":
                from tierzero.doctor.gpudirect_trial import trial

                result.update(trial(os.path.join(folder, name)))
            else:
                from tierzero.doctor.training import compare

                result.update(compare(Path(folder) / "store"))
        except Absent as reason:
            result.update(ok=None, error=one_line(reason))
        except Exception as error:  # whatever it is, it belongs into the report
            result.update(ok=False, error=describe(error))
        yield {**result, "seconds": time.monotonic() - began}


def describe(error: Exception) -> str:
    """Kind, errno and path on one line."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return one_line(f"{where}{error.strerror} [errno {error.errno}]")
    return one_line(f"{type(error).__name__}: {error}")


def _trial(name: str, path: str, until: float, most: int, far: str) -> dict[str, Any]:
    """One backend's score; its file is gone afterwards."""
    with open(path, "xb"):  # nothing that exists is touched
        pass
    score = exercise.Score()
    try:
        file, engine, note = OPENERS[name](path)
        try:
            asyncio.run(_work(file, score, until=until, most=most, far=not far))
        finally:
            file.close()
            if engine is not None:
                engine.close()
    finally:
        with suppress(OSError):
            os.unlink(path)
    notes = [note] if note else []
    if far:
        notes.append(f"offsets past 4 GiB not tried: {far}")
    return {**vars(score), "notes": notes}


async def _work(file: BlockFile, score: exercise.Score, *, until: float, most: int, far: bool) -> None:
    await exercise.verify(file, score, far=far, seed=len(file.path))
    await exercise.large(file, score, until=until, most=most)
