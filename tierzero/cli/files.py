"""Small files written so that a crash leaves the old one or the new one."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, flushed to the disk before the name changes."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to tell
            fresh.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{path} cannot be written: {error.strerror}", str(path)) from None
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
