"""Drive profiles: what is saved comes back, and nothing that is damaged or of another drive does."""

from __future__ import annotations

import errno
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from tierzero.doctor import paths
from tierzero.hardware import profiles
from tierzero.hardware.drives import drive_of
from tierzero.hardware.profiles import Profile


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERZERO_PROFILES", str(tmp_path / "profiles"))


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return Profile(
        device=profiles.drive_key(tmp_path),
        path=str(tmp_path),
        when="2026-01-01T00:00:00+00:00",
        kernel="6.18",
        engine="uring",
        block=4 << 20,
        depth=8,
        read=3.5e9,
        write=2.25e9,
        mixed=2.5e9,
        sustained_write=1.125e9,
    )


def test_round_trip(tmp_path: Path, profile: Profile) -> None:
    assert profiles.load(tmp_path) is None
    file = profiles.save(profile)
    assert profiles.load(tmp_path) == profile
    assert profiles.load(tmp_path / "not" / "there" / "yet") == profile
    faster = replace(profile, read=7e9, depth=16, engine="pool")
    assert profiles.save(faster) == file
    assert profiles.load(tmp_path) == faster
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no temporary file is left"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"7",
        b'{"format": 2}',
        b'{"format": 1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b" " * 1_000_000,
        b'{"format": ' + b"9" * 10_000 + b"}",
    ],
)
def test_damage_is_ignored_with_one_warning(tmp_path: Path, profile: Profile, text: bytes) -> None:
    file = profiles.save(profile)
    file.write_bytes(text)
    with pytest.warns(RuntimeWarning, match="is ignored") as caught:
        assert profiles.load(tmp_path) is None
    assert len(caught) == 1
    assert str(file) in str(caught[0].message)
    profiles.save(profile)
    assert profiles.load(tmp_path) == profile


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", "aio"),
        ("engine", 4),
        ("block", 4095),
        ("block", 0),
        ("block", 4096.0),
        ("block", "4096"),
        ("block", 2 << 30),
        ("block", (1 << 30) + 4096),
        ("block", 4096 * 10**400),
        ("depth", 257),
        ("depth", 2**64),
        ("depth", 10**400),
        ("read", 10**400),
        ("mixed", 1e300),
        ("write", [[]]),
        ("depth", -1),
        ("depth", True),
        ("read", 0),
        ("read", float("nan")),
        ("mixed", float("inf")),
        ("write", None),
        ("sustained_write", "fast"),
        ("when", 3),
        ("device", "/dev/other ext4 1:1"),
    ],
)
def test_a_value_that_cannot_be(tmp_path: Path, profile: Profile, field: str, value: object) -> None:
    file = profiles.save(profile)
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {field: value}))
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert profiles.load(tmp_path) is None


def test_a_directory_in_its_place(tmp_path: Path, profile: Profile) -> None:
    profiles.file_of(profile.device).mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="Is a directory"):
        assert profiles.load(tmp_path) is None
    with pytest.raises(OSError):
        profiles.save(profile)
    assert len(list(profiles.directory().iterdir())) == 1, "no temporary file is left"


def test_what_is_no_file_in_its_place(tmp_path: Path, profile: Profile) -> None:
    file = profiles.file_of(profile.device)
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        assert profiles.load(tmp_path) is None
    file.unlink()
    file.symlink_to(file)
    with pytest.warns(RuntimeWarning, match="symbolic links"):
        assert profiles.load(tmp_path) is None


def test_the_engine_takes_every_value_that_is_taken(tmp_path: Path, profile: Profile) -> None:
    native = pytest.importorskip("tierzero._native")
    profiles.save(replace(profile, block=1 << 30, depth=256))
    loaded = profiles.load(tmp_path)
    assert loaded is not None
    native.Engine(kind="pool", block=loaded.block, depth=1).close()
    native.Engine(kind="pool", block=4096, depth=loaded.depth).close()


def test_without_a_home_there_is_no_profile(tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIERZERO_PROFILES", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profiles.load(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="no home directory"):
        profiles.save(profile)
    found = paths.profile(drive_of(tmp_path))
    assert "no home directory" in found.value
    assert "TIERZERO_PROFILES" in found.advice


def test_whole_numbers_are_rates_too(tmp_path: Path, profile: Profile) -> None:
    file = profiles.save(profile)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"read": 3}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = profiles.load(tmp_path)
    assert loaded is not None
    assert (loaded.read, type(loaded.read)) == (3.0, float)


def test_keys_tell_file_systems_apart(tmp_path: Path) -> None:
    key = profiles.drive_key(tmp_path)
    source, kind, device = key.split(" ")
    assert source
    assert kind
    assert device == f"{os.major(tmp_path.stat().st_dev)}:{os.minor(tmp_path.stat().st_dev)}"
    assert profiles.drive_key(tmp_path / "a" / "b") == key
    (tmp_path / "link").symlink_to("/proc")
    assert profiles.drive_key(tmp_path / "link") == profiles.drive_key("/proc") != key
    assert profiles.drive_key("/proc").split(" ")[1] == "proc"


def test_where_they_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert profiles.directory() == tmp_path / "profiles"
    monkeypatch.delenv("TIERZERO_PROFILES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert profiles.directory() == tmp_path / "cache" / "tierzero" / "nvme"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert profiles.directory() == tmp_path / "home" / ".cache" / "tierzero" / "nvme"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_write_names_the_file_and_leaves_the_former(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: Profile, call: str
) -> None:
    file = profiles.save(profile)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write and fsync raise it: without a name

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space") as failed:
            profiles.save(replace(profile, depth=16))
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(file))
    assert list(file.parent.iterdir()) == [file]
    assert profiles.load(tmp_path) == profile
