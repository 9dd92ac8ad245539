"""Changing single keys of a TOML file and nothing else of it: comments, order and spelling stay."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierzero.errors import ConfigError, naming


def rewritten(text: str, values: Mapping[str, Any]) -> str:
    """`text` with `section.key` -> value set; sections that are not there are added at the end.

    ConfigError where the file is written in a way in which that cannot be done.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    expected = tomllib.loads(text)
    try:
        document = tomlkit.parse(text)
        for name, value in values.items():
            section, _, key = name.partition(".")
            if section not in document:
                document.add(section, tomlkit.table())
            document[section][key] = value
            expected.setdefault(section, {})[key] = value
        new = tomlkit.dumps(document)
        if tomllib.loads(new) == expected:
            return new
    except (TOMLKitError, tomllib.TOMLDecodeError, TypeError, AttributeError):
        pass
    raise ConfigError("the configuration's form does not allow changing it: set by hand\n" + as_toml(values))


def as_toml(values: Mapping[str, Any]) -> str:
    """The same as lines to paste."""
    import tomlkit

    document = tomlkit.document()
    for name, value in values.items():
        section, _, key = name.partition(".")
        if section not in document:
            document.add(section, tomlkit.table())
        document[section][key] = value
    return tomlkit.dumps(document).rstrip()


def read_to_change(path: Path) -> bytes:
    """What `path` holds; ConfigError if it is seen already that `replace` could not change it."""
    folder = path.resolve().parent
    if not path.is_file():  # a pipe can be read once only
        raise ConfigError(f"{path} is not a file that the values can be written to: give --dry-run to print them only")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the values cannot be written to {path}: {folder} is read-only. Give --dry-run to print them only"
        )
    return path.read_bytes()


def replace(path: Path, before: bytes, text: str) -> None:
    """Put `text` into the file, whole or not at all, if it still holds `before`; ConfigError otherwise.

    Its permissions stay; a symbolic link stays one.
    """
    target = path.resolve()
    if target.read_bytes() != before:
        raise ConfigError(f"{path} was changed while it was being tuned: it is left as it is")
    handle, fresh = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, fresh)
        os.replace(fresh, target)
    except BaseException:
        os.unlink(fresh)
        raise
