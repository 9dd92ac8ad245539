"""Findings about one path: file system, drive, O_DIRECT, room, and the measured profile."""

from __future__ import annotations

import errno
import os
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierzero.doctor import direct, filesystems, native
from tierzero.doctor.finding import Finding, one_line
from tierzero.hardware import profiles
from tierzero.hardware.drives import Drive, drive_of
from tierzero.sizes import format_size

_LEAST = 64 << 20
_LITTLE = 4 << 30
_STORE_BYTES = 28  # per parameter: bf16 weights, float32 master and moments, and the room that copy-on-write takes
_FEW_INODES = 64


def probe(asked: str, gpu: bool) -> Iterator[dict[str, Any]]:
    """In a child, since any step may hang: the path and disks of the drive, then each finding as it is made."""
    drive = drive_of(asked)
    yield {"what": "drive", "path": drive.path, "disks": [vars(disk) for disk in drive.disks]}
    for finding in findings(drive, gpu):
        yield {"what": "finding", "finding": vars(finding)}


def findings(drive: Drive, gpu: bool) -> Iterator[Finding]:
    """All that can be said about the drive under a path."""
    folder = Path(drive.path)
    if drive.path != os.path.realpath(drive.asked):
        advice = f"{drive.asked} does not exist: the nearest directory that does was looked at"
        yield Finding("path", drive.path, "note", advice, drive.path, {"asked": drive.asked})
    yield filesystems.file_system(drive)
    yield from filesystems.mount_options(drive)
    yield filesystems.disks(drive)
    yield from room(drive)
    refused = filesystems.gpudirect_mount(drive, gpu)
    if refused is not None:
        yield refused
    yield profile(drive)
    if folder.is_dir():  # last, what a drive may never answer
        tried = direct.try_direct(folder)
        yield writable(tried, drive.path)
        yield direct.finding(tried, drive.path)
        if not tried.unwritable:
            yield native.engine_on(drive.path)
    else:
        advice = "a store is a directory: give one, or the directory that this file lies in"
        yield Finding("writable", "not a directory", "fail", advice, drive.path)


def silent(path: str, ended: str, seconds: float) -> Finding:
    """What became of a path whose `probe` came to no end; `ended` is the clause that says how."""
    if "did not answer" in ended:
        value = f"the file system did not answer within {seconds:.0f} s"
        advice = "it is frozen, its server is away or the drive is failing: see dmesg, or choose another directory"
        return Finding("path", value, "fail", advice, path, {"silent": True})
    advice = "run tierzero doctor there again, and report it if that happens again"
    return Finding("path", f"the process that looked at it {ended}", "fail", advice, path, {"silent": True})


def writable(tried: direct.Direct, path: str) -> Finding:
    """Whether a file can be made and filled."""
    if not tried.unwritable or tried.error is None:
        return Finding("writable", "yes", path=path)
    code = tried.error.errno
    reason = f"no: {tried.error.strerror} [errno {code}]"
    if code in (errno.ENOSPC, errno.EDQUOT):
        advice = "the file system or a quota is full: free some space, or choose another directory"
    elif code in (errno.EACCES, errno.EPERM):
        advice = f"this user may not write here: sudo chown {os.getuid()} {shlex.quote(path)}, or another directory"
    elif code == errno.EROFS:
        advice = "it is mounted read-only: choose another directory"
    else:
        advice = "choose another directory"
    return Finding("writable", reason, "fail", advice, path)


def room(drive: Drive) -> list[Finding]:
    """Free bytes and inodes."""
    try:
        stat = os.statvfs(drive.path)
    except OSError as error:
        advice = "the file system does not answer: check that the drive or server is there"
        return [Finding("free space", f"{error.strerror} [errno {error.errno}]", "fail", advice, drive.path)]
    return room_of(
        drive.path, stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize, stat.f_favail, stat.f_files
    )


def room_of(path: str, free: int, total: int, inodes: int, all_inodes: int) -> list[Finding]:
    """Bytes that this user may take, of all bytes; inodes likewise, 0 of 0 where their number is not fixed."""
    facts = {"free": free, "total": total, "free_inodes": inodes, "inodes": all_inodes}
    value = f"{format_size(free)} of {format_size(total)}, a store of {free / _STORE_BYTES / 1e9:.2f} B parameters"
    found = []
    if free < _LEAST:
        advice = f"less than {format_size(_LEAST)}: free some space, or choose a directory on another drive"
        found.append(Finding("free space", value, "fail", advice, path, facts))
    elif free < _LITTLE:
        advice = f"a store takes up to {_STORE_BYTES} bytes a parameter, and each checkpoint of a run more"
        found.append(Finding("free space", value, "note", advice, path, facts))
    else:
        found.append(Finding("free space", value, path=path, facts=facts))
    if all_inodes and inodes < _FEW_INODES:
        advice = "no room for new files, whatever bytes are free: remove some files"
        found.append(Finding("free inodes", str(inodes), "fail" if inodes < 8 else "warn", advice, path))
    return found


def profile(drive: Drive) -> Finding:
    """What `tierzero bench nvme` measured here, if it did."""
    try:
        profiles.directory()
    except OSError as error:
        advice = "set TIERZERO_PROFILES to a directory, for tierzero bench nvme and for training"
        return Finding("profile", f"none: {error.strerror}", "note", advice, drive.path)
    missing = f"no profile: run tierzero bench nvme {shlex.quote(drive.path)}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        known = profiles.load(drive.path)
    if warned:
        return Finding("profile", "unreadable", "warn", one_line(warned[0].message), drive.path)
    if known is None and drive.in_memory:
        return Finding("profile", "none: memory has none", path=drive.path)
    if known is None:
        return Finding("profile", "none", "note", missing, drive.path)
    speeds = ", ".join(f"{what} {getattr(known, what) / 1e9:.2f}" for what in ("read", "write", "mixed"))
    value = f"{known.engine}, block {format_size(known.block)}, depth {known.depth}: {speeds} GB/s ({known.when})"
    return Finding("profile", value, path=drive.path, facts=dict(vars(known)))
