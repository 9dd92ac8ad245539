"""Small real file systems to try things on: mounted for a test, gone after it, however it ends."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def command(*words: str | Path) -> str:
    """Run it and return its output; skip the test where it is missing or not permitted."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]} here")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout.strip()


def unmount(where: Path) -> None:
    """At once, or as soon as nobody uses it any more."""
    if subprocess.run(["umount", str(where)], capture_output=True).returncode:
        subprocess.run(["umount", "-l", str(where)], capture_output=True)
    with suppress(OSError):
        where.rmdir()


@contextmanager
def memory_drive(where: Path, options: str = "size=8m", kind: str = "tmpfs") -> Iterator[Path]:
    """A tmpfs, or a ramfs, which has no direct I/O."""
    where.mkdir()
    command("mount", "-t", kind, "-o", options, "tierzero-test", where)
    try:
        yield where
    finally:
        unmount(where)


class LoopDrive:
    """An ext4 file system in a file, on a loop device."""

    def __init__(self, image: Path, where: Path, device: str) -> None:
        self.image, self.where, self.device = image, where, device
        self.frozen = False

    def freeze(self) -> None:
        """From now on every write to it blocks."""
        command("fsfreeze", "--freeze", self.where)
        self.frozen = True

    def thaw(self) -> None:
        """Let the writes go on."""
        subprocess.run(["fsfreeze", "--unfreeze", str(self.where)], check=self.frozen, capture_output=True)
        self.frozen = False


@contextmanager
def loop_drive(directory: Path, nbytes: int = 32 << 20) -> Iterator[LoopDrive]:
    """An ext4 file system of `nbytes` bytes mounted at directory/drive."""
    image, where = directory / "image", directory / "drive"
    with open(image, "wb") as file:
        file.truncate(nbytes)
    command("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image)
    device = command("losetup", "--find", "--show", image)
    try:
        where.mkdir()
        command("mount", device, where)
        drive = LoopDrive(image, where, device)
        try:
            yield drive
        finally:
            drive.thaw() if drive.frozen else None
            unmount(where)
    finally:
        subprocess.run(["losetup", "--detach", device], capture_output=True)
        image.unlink()


@contextmanager
def loop_device(image: Path, nbytes: int) -> Iterator[str]:
    """A bare block device of `nbytes` bytes."""
    with open(image, "wb") as file:
        file.truncate(nbytes)
    device = command("losetup", "--find", "--show", image)
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], capture_output=True)
