"""Paths that name nothing, for all that takes one: a sentence, and not a byte anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from models import Net
from oracle import make, tiers_for
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")

CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "save": lambda model, path: tz.save(model, path).result(),
    "load": tz.load,
    "export": tz.export,
}


@contextmanager
def offloaded(directory: Path) -> Iterator[nn.Module]:
    model = make(Net)
    tz.offload(model, tiers_for(model, "nvme", directory))
    try:
        yield model
    finally:
        tz.close(model)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("path", ["", "a\0b"])
def test_no_name_at_all(path: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty path, of a variable that was never set say, is not the current directory."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with offloaded(tmp_path / "store") as model:
        with pytest.raises(ValueError, match=r"cannot name .*give its path, '.' for the current directory"):
            CALLS[call](model, path)
        assert not list(here.iterdir())
        tz.export(model, ".")
        assert [path.name for path in here.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("call", CALLS)
def test_a_current_directory_that_is_gone(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths name what is missing; absolute ones work."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with offloaded(tmp_path / "store") as model:
        with pytest.raises(FileNotFoundError, match=r"current directory was removed: give an absolute path .*'x'"):
            CALLS[call](model, "x")
        tz.save(model, tmp_path / "x").result()
        tz.export(model, tmp_path / "y")
        CALLS[call](model, tmp_path / ("x" if call == "load" else "z"))


@pytest.mark.parametrize("to", ["nowhere", "link"])
def test_an_export_to_a_link_that_leads_nowhere(to: str, tmp_path: Path) -> None:
    """A dangling link, also one to itself, is neither replaced nor followed."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / to)
    with offloaded(tmp_path / "store") as model:
        with pytest.raises(tz.StoreError, match="is a dangling link: give export"):
            tz.export(model, link)
        assert link.is_symlink()
        assert not (tmp_path / "nowhere").exists()
