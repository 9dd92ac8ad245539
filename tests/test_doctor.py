"""doctor's findings: what trees of /proc and /sys, limits and mounts come to."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest
from fake_root import Tree

from tierzero.doctor import direct, filesystems, libraries, limits, machine, native, paths
from tierzero.doctor.finding import Finding
from tierzero.hardware.drives import Drive, Mount, drive_of

GIB = 1 << 30


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def mounted(tree: Tree, fs_type: str, source: str = "/dev/vda1", super_options: str = "rw", **more: str) -> Drive:
    tree.mount("/mnt/my data", fs_type, source, super_options=super_options, **more)
    tree.file("proc/self/mountinfo", tree.mountinfo[-1].replace("my data", r"my\040data"))
    return drive_of("/mnt/my data/store", tree.root)


@pytest.mark.parametrize(
    ("fs_type", "source", "status", "said"),
    [
        ("ext4", "/dev/nvme0n1p1", "ok", ""),
        ("xfs", "/dev/nvme0n1p1", "ok", ""),
        ("overlay", "overlay", "warn", "mount a volume"),
        ("tmpfs", "tmpfs", "warn", "memory, not a drive"),
        ("nfs4", "host:/x", "warn", "network"),
        ("fuse.sshfs", "me@host:", "warn", "FUSE"),
        ("9p", "share", "warn", "9p"),
        ("virtiofs", "share", "warn", "virtiofs"),
        ("btrfs", "/dev/sda1", "warn", "copy-on-write"),
        ("zfs", "tank/x", "warn", "copy-on-write"),
        ("vfat", "/dev/sda1", "warn", "4 GiB"),
        ("reiserfs", "/dev/sda1", "note", "not tested"),
    ],
)
def test_file_systems_are_named_with_the_consequence(
    tree: Tree, fs_type: str, source: str, status: str, said: str
) -> None:
    """N12."""
    found = filesystems.file_system(mounted(tree, fs_type, source))
    assert found.status == status
    assert said in found.advice
    assert found.value.startswith(f"{fs_type} from {source} on /mnt/my data")


@pytest.mark.parametrize(
    ("fs_type", "options", "super_options", "status", "said"),
    [
        ("ext4", "ro,relatime", "ro", "fail", "mount -o remount,rw '/mnt/my data'"),
        ("ext4", "rw", "rw,nobarrier", "warn", "remount,barrier '/mnt/my data'"),
        ("ext4", "rw", "rw,barrier=0", "warn", "power cut"),
        ("ext4", "rw", "rw,data=journal", "warn", "twice"),
        ("ext4", "rw", "rw,data=writeback", "note", "power cut"),
        ("btrfs", "rw", "rw,compress=zstd:3", "warn", "chattr +m"),
        ("nfs4", "rw", "rw,soft,vers=4.2", "warn", "hard"),
        ("xfs", "rw,sync", "rw", "warn", "async"),
        ("ext4", "rw,noatime", "rw,discard", "ok", ""),
    ],
)
def test_mount_options(tree: Tree, fs_type: str, options: str, super_options: str, status: str, said: str) -> None:
    (found,) = filesystems.mount_options(mounted(tree, fs_type, super_options=super_options, options=options))
    assert found.status == status
    assert said in found.advice


def test_ext4_without_spelled_out_ordering_has_its_mount_line(tree: Tree) -> None:
    """N14. A remount would not make the kernel show it."""
    drive = mounted(tree, "ext4", super_options="rw,stripe=4", options="rw,noatime")
    found = filesystems.gpudirect_mount(drive, wanted=True)
    assert found is not None
    assert found.status == "warn"
    at = "'/mnt/my data'"
    assert f"sudo umount {at} && sudo mount -o noatime,data=ordered /dev/vda1 {at}" in found.advice
    top = filesystems.gpudirect_mount(Drive("/", "/", Mount(1, "/", "/", "8:1", "ext4", "x", ("rw",)), (), ()), True)
    assert top is not None
    assert "rootflags=data=ordered" in top.advice
    assert filesystems.gpudirect_mount(mounted(tree, "ext4", super_options="rw,data=ordered"), wanted=True) is None
    assert filesystems.gpudirect_mount(mounted(tree, "overlay"), wanted=False) is None
    refused = filesystems.gpudirect_mount(mounted(tree, "overlay"), wanted=True)
    assert refused is not None
    assert "host memory" in refused.advice


def test_a_turning_disk_is_not_a_virtual_one(tree: Tree) -> None:
    for name, number, status in (("sda", "8:0", "warn"), ("vda", "254:0", "note")):
        tree.disk(name, number, rotational=1, model="Spinner 7200")
        tree.mount(f"/{name}", "ext4", f"/dev/{name}", device=number)
        found = filesystems.disks(drive_of(f"/{name}", tree.root))
        assert found.status == status
        assert found.value == f"{name}, Spinner 7200, requests up to 1.2 MiB"


@pytest.mark.parametrize(
    ("release", "status"), [("6.1.0-13-amd64", "ok"), ("5.4.0-200-generic", "note"), ("6.6.1-microsoft-WSL2", "note")]
)
def test_kernels(tree: Tree, release: str, status: str) -> None:
    tree.file("proc/sys/kernel/osrelease", release)
    assert machine.kernel(tree.root).status == status


def test_memory_of_the_group_and_of_the_machine(tree: Tree) -> None:
    """R17."""
    tree.file("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nSwapTotal: 1048576 kB\nSwapFree: 0 kB")
    assert machine.memory(tree.root).status == "ok"
    tree.mount("/sys/fs/cgroup", "cgroup2", "cgroup2")
    tree.file("proc/self/cgroup", "0::/pod/job")
    tree.file("sys/fs/cgroup/pod/memory.max", str(8 * GIB))
    found = machine.memory(tree.root)
    assert (found.status, found.facts["allowed"]) == ("note", 8 * GIB)
    assert "allows 8.0 GiB" in found.value
    tree.file("sys/fs/cgroup/pod/job/memory.max", str(GIB))
    assert machine.memory(tree.root).status == "warn"


def test_swap_and_overcommit(tree: Tree) -> None:
    """R19."""
    tree.file("proc/meminfo", "SwapTotal: 4096 kB\nSwapFree: 4096 kB\nCommitLimit: 1048576 kB\nCommitted_AS: 0 kB")
    assert machine.swap(tree.root).status == "ok"
    tree.file("proc/sys/vm/overcommit_memory", "2")
    strict = machine.overcommit(tree.root)
    assert (strict.status, strict.value) == ("warn", "strict, 1.0 GiB left to promise")
    tree.file("proc/meminfo", "SwapTotal: 4194304 kB\nSwapFree: 1048576 kB")
    used = machine.swap(tree.root)
    assert (used.status, used.value) == ("warn", "3.0 GiB of 4.0 GiB in use")


def test_processors_and_their_quota(tree: Tree) -> None:
    tree.file("proc/cpuinfo", "\n\n".join(f"processor\t: {i}\nmodel name\t: Some  CPU" for i in range(8)))
    assert machine.processor(tree.root, 8).value == "Some CPU, 8 of 8 cores usable"
    tree.mount("/sys/fs/cgroup", "cgroup2", "cgroup2")
    tree.file("proc/self/cgroup", "0::/")
    tree.file("sys/fs/cgroup/cpu.max", "250000 100000")
    found = machine.processor(tree.root, 8)
    assert found.status == "warn"
    assert "OMP_NUM_THREADS=2" in found.advice


def test_nodes(tree: Tree) -> None:
    """D5: cores need not be in sequence, and the GPU decides."""
    assert machine.numa((), tree.root, {0, 1}).status == "ok"
    tree.file("sys/devices/system/node/node0/cpulist", "0-1,8-9")
    tree.file("sys/devices/system/node/node1/cpulist", "2-7")
    tree.file("sys/bus/pci/devices/0000:5e:00.0/numa_node", "1")
    assert machine.numa((), tree.root, {0, 9}).status == "ok"
    (tree.root / "proc/driver/nvidia/gpus/0000:5E:00.0").mkdir(parents=True)
    away = machine.numa((), tree.root, {0, 9})
    assert away.status == "note"
    assert "--cpunodebind=1" in away.advice
    assert machine.numa((), tree.root, {3}).status == "ok"


@pytest.mark.parametrize(
    ("mode", "got", "status", "said"),
    [
        ("always [madvise] never", 32 << 20, "ok", ""),
        ("always madvise [never]", 0, "warn", "echo madvise"),
        ("[always] madvise never", 2 << 20, "warn", "compact_memory"),
        (None, 0, "warn", "CONFIG_TRANSPARENT_HUGEPAGE"),
        ("always [madvise] never", None, "note", "native module"),
    ],
)
def test_huge_pages(tree: Tree, mode: str | None, got: int | None, status: str, said: str) -> None:
    if mode is not None:
        tree.file("sys/kernel/mm/transparent_hugepage/enabled", mode)
    found = machine.huge_pages(got, 32 << 20, tree.root)
    assert found.status == status
    assert said in found.advice


@pytest.mark.parametrize(
    ("reason", "disabled", "seccomp", "said"),
    [
        ("io_uring_setup: Operation not permitted", "2", "0", "io_uring_disabled=0"),
        ("io_uring_setup: Operation not permitted", "1", "0", "io_uring_group"),
        ("io_uring_setup: Operation not permitted", "0", "2", "seccomp"),
        ("io_uring_setup: Function not implemented", "", "0", "does not offer it"),
        ("io_uring_setup: Cannot allocate memory", "0", "0", "memlock"),
        ("io_uring_enter: Operation not supported", "0", "0", "may forbid it"),
    ],
)
def test_io_uring_says_what_forbids_it(tree: Tree, reason: str, disabled: str, seccomp: str, said: str) -> None:
    """N20: what counts is the round trip."""
    tree.file("proc/sys/kernel/io_uring_disabled", disabled)
    tree.file("proc/self/status", f"Name: x\nSeccomp:\t{seccomp}\nSeccomp_filters:\t0")
    found = native.io_uring_of(reason, tree.root)
    assert (found.status, found.value) == ("warn", reason)
    assert said in found.advice
    works = native.io_uring_of("", tree.root)
    assert (works.status, works.value) == ("ok", "works (real round trip)")
    assert native.io_uring_of(None, tree.root).status == "note"


def test_what_the_engine_uses_on_a_drive() -> None:
    drive = {"engine": "uring", "reason": "", "flags": ["SINGLE_ISSUER"], "fixed_files": True, "fixed_buffers": True}
    described = {"engine": "uring", "reason": "", "block": 4 << 20, "depth": 8, "drives": [drive]}
    found = native.engine_of(described, True, "/x")
    assert found.status == "ok"
    assert found.value == "uring, block 4.0 MiB, depth 8: SINGLE_ISSUER, fixed files, fixed buffers"
    assert "see locked memory" in native.engine_of(described, False, "/x").advice
    drive.update(engine="pool", reason="io_uring_setup: Operation not permitted")
    pool = native.engine_of(described, False, "/x")
    assert (pool.status, pool.advice) == ("note", "io_uring_setup: Operation not permitted")


def test_limits(tree: Tree) -> None:
    unlimited = resource.RLIM_INFINITY
    assert limits.locked_memory(unlimited, unlimited, False).status == "ok"
    assert limits.locked_memory(64 << 10, 64 << 10, True).status == "ok"
    small = limits.locked_memory(64 << 10, 64 << 10, False)
    assert (small.status, small.value) == ("warn", "64.0 KiB")
    assert "raise memlock" in small.advice
    assert "ulimit -l unlimited" in limits.locked_memory(64 << 10, unlimited, False).advice
    assert limits.open_files(20, 1024).status == "warn"
    assert limits.open_files(1024, 1024).status == "ok"
    tree.file("proc/self/status", "CapEff:\t0000000000004000")
    assert limits.may_lock(tree.root)
    tree.file("proc/self/status", "CapEff:\t0000000000003fff")
    assert not limits.may_lock(tree.root)


def test_room() -> None:
    assert [found.status for found in paths.room_of("/x", 40 * GIB, 99 * GIB, 0, 0)] == ["ok"]
    assert [found.status for found in paths.room_of("/x", GIB, 99 * GIB, 1000, 2000)] == ["note"]
    assert [found.status for found in paths.room_of("/x", 1 << 20, 99 * GIB, 3, 2000)] == ["fail", "fail"]


def test_what_cannot_be_written_says_why() -> None:
    for code, said in ((errno.ENOSPC, "full"), (errno.EACCES, "chown"), (errno.EROFS, "read-only"), (errno.EIO, "")):
        tried = direct.Direct(OSError(code, os.strerror(code)), unwritable=True)
        found = paths.writable(tried, "/x")
        assert found.status == "fail"
        assert said in found.advice
        assert direct.finding(tried, "/x").status == "note"


def test_direct_io_is_really_tried(tmp_path: Path) -> None:
    tried = direct.try_direct(tmp_path)
    assert not list(tmp_path.iterdir())
    assert not tried.unwritable
    if tried.error is None:
        assert tried.offset in (512, 1024, 2048, 4096, 8192, 16384, 65536)
        assert direct.finding(tried, "x").value.startswith("works; offsets to")
    else:
        assert direct.finding(tried, "x").status == "warn"
    missing = direct.try_direct(tmp_path / "missing")
    assert missing.unwritable


def test_direct_io_that_is_refused_or_too_coarse() -> None:
    refused = direct.finding(direct.Direct(OSError(errno.EINVAL, "Invalid argument")), "/x")
    assert (refused.status, refused.value) == ("warn", "refused: Invalid argument")
    assert direct.finding(direct.Direct(None, False, 4, 65536, True), "/x").status == "warn"
    ignored = direct.finding(direct.Direct(None, False, 0, 512, True, ignored=True), "/x")
    assert (ignored.status, ignored.value) == ("warn", "accepted, but not used (statx)")
    assert direct.finding(direct.Direct(None, False, 4, 512, True), "/x").status == "ok"


def test_a_path_that_is_missing_or_a_file(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in paths.findings(drive_of(tmp_path / "a/b"), gpu=False)}
    assert found["path"].facts == {"asked": str(tmp_path / "a/b")}
    assert found["writable"].status == "ok"
    file = tmp_path / "file"
    file.write_text("mine")
    found = {finding.name: finding for finding in paths.findings(drive_of(file), gpu=False)}
    assert found["writable"].status == "fail"
    assert file.read_text() == "mine"


def test_no_profile_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERZERO_PROFILES", str(tmp_path))
    mount = Mount(1, "/", "/", "8:1", "ext4", "/dev/sda1", ("rw",))
    found = paths.profile(Drive(str(tmp_path), str(tmp_path), mount, (), ()))
    assert (found.status, found.advice) == ("note", f"no profile: run tierzero bench nvme {tmp_path}")


def test_a_package_that_is_missing_prevents_training() -> None:
    versions = {**libraries.versions(), "aiofiles": "missing"}
    found = libraries.packages(versions)
    assert (found.status, found.advice) == ("fail", "pip install aiofiles")


def test_findings_are_json(tmp_path: Path) -> None:
    found = [*limits.findings(), *paths.findings(drive_of(tmp_path), gpu=True), machine.kernel(), native.module()]
    for finding in found:
        assert json.loads(json.dumps(dict(vars(finding))))["name"] == finding.name
        assert isinstance(finding, Finding)
        assert bool(finding.advice) == (finding.status != "ok")
        assert "\n" not in finding.value + finding.advice
