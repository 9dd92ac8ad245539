"""Drives and control groups, as trees of /proc and /sys describe them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_root import Tree

from tierzero.hardware import cgroup
from tierzero.hardware.drives import Disk, drive_of, existing_parent, mount_of, mounts, unescape

GIB = 1 << 30


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def nvme(tree: Tree, index: int, node: int) -> tuple[str, str]:
    """A drive on a PCI bus with one partition; returns both directories."""
    pci = f"/sys/devices/pci0000:{index}0/0000:{index}1:00.0"
    tree.file(f"{pci}/numa_node", str(node))
    disk = tree.disk(f"nvme{index}n1", f"259:{10 * index}", at=f"{pci}/nvme/nvme{index}", model="Fast  Drive 9000  ")
    part = f"{disk}/nvme{index}n1p1"
    tree.file(f"{part}/partition", "1")
    tree.block(f"nvme{index}n1p1", f"259:{10 * index + 1}", part)
    return disk, part


def test_a_partition_is_led_back_to_its_disk(tree: Tree) -> None:
    nvme(tree, 0, node=1)
    tree.mount("/", "ext4", "/dev/sda1", device="8:1")
    tree.mount("/mnt/fast", "ext4", "/dev/nvme0n1p1", device="259:1", super_options="rw,data=ordered,stripe=32")
    drive = drive_of("/mnt/fast/run/store", tree.root)
    assert drive.mount is not None
    assert drive.mount.point == "/mnt/fast"
    assert drive.mount.option("data") == "ordered"
    assert drive.mount.option("relatime") == ""
    assert drive.mount.option("ro") is None
    assert drive.layers == ("nvme0n1p1",)
    assert drive.disks == (Disk("nvme0n1", "Fast Drive 9000", False, 1, 1280 * 1024, 512),)


def test_a_raid_below_a_mapped_volume_has_all_its_disks(tree: Tree) -> None:
    parts = [nvme(tree, index, node=index)[1] for index in (0, 1)]
    raid = tree.over("md0", "9:0", parts)
    tree.over("dm-0", "253:0", [raid])
    tree.mount("/data", "xfs", "/dev/mapper/vg-data", device="253:0")
    drive = drive_of("/data/x", tree.root)
    assert drive.layers == ("dm-0", "md0", "nvme0n1p1", "nvme1n1p1")
    assert [(disk.name, disk.numa_node) for disk in drive.disks] == [("nvme0n1", 0), ("nvme1n1", 1)]


@pytest.mark.parametrize(
    ("kind", "disk", "memory"),
    [("tmpfs", "", True), ("ramfs", "", True), ("ext4", "ram0", True), ("ext4", "zram1", True), ("ext4", "sda", False)],
)
def test_memory_is_told_from_drives(tree: Tree, kind: str, disk: str, memory: bool) -> None:
    if disk:
        tree.disk(disk, "1:0")
    tree.mount("/", kind, f"/dev/{disk}" if disk else kind, device="1:0" if disk else "0:40")
    assert drive_of("/x", tree.root).in_memory is memory


def test_a_loop_device_is_led_to_the_drive_of_its_file(tree: Tree) -> None:
    disk, _ = nvme(tree, 0, node=0)
    tree.disk("loop3", "7:3")
    tree.file("/sys/devices/virtual/block/loop3/loop/backing_file", "/big/image file")
    tree.mount("/big", "xfs", "/dev/nvme0n1", device="259:0")
    tree.mount("/small", "ext4", "/dev/loop3", device="7:3")
    drive = drive_of("/small", tree.root)
    assert drive.layers == ("loop3 (/big/image file)",)
    assert [found.name for found in drive.disks] == [Path(disk).name]


def test_a_file_system_with_a_number_of_its_own_is_found_by_its_source(tree: Tree) -> None:
    _, part = nvme(tree, 0, node=0)
    tree.mount("/btr", "btrfs", "/dev/nvme0n1p1", device="0:40", super_options="rw,compress=zstd:3,subvol=/@")
    assert [disk.name for disk in drive_of("/btr/x", tree.root).disks] == ["nvme0n1"]
    tree.over("dm-7", "253:7", [part])
    (tree.root / "dev/mapper").mkdir(parents=True)
    (tree.root / "dev/mapper/crypt").symlink_to("../dm-7")
    tree.mount("/crypt", "btrfs", "/dev/mapper/crypt", device="0:41")
    assert drive_of("/crypt", tree.root).layers == ("dm-7", "nvme0n1p1")


def test_mounts_with_escapes_binds_and_overmounts(tree: Tree) -> None:
    tree.mount("/", "ext4", "/dev/sda1", device="8:1")
    tree.mount(r"/my\040disk\011x", "nfs4", r"host:/a\134b", options="rw,nosuid")
    tree.mount("/bound", "ext4", "/dev/sda1", device="8:1", fs_root="/srv/data")
    tree.mount("/a", "xfs", "/dev/below", device="8:2")
    tree.mount("/a", "tmpfs", "tmpfs", device="0:5")
    tree.mount("/aa", "vfat", "/dev/sdz", device="8:9")
    found = {path: mount_of(path, tree.root) for path in ("/my disk\tx/y", "/bound/y", "/a/y", "/aa/y", "/aaa")}
    assert [mount and (mount.fs_type, mount.source) for mount in found.values()] == [
        ("nfs4", "host:/a\\b"),
        ("ext4", "/dev/sda1"),
        ("tmpfs", "tmpfs"),
        ("vfat", "/dev/sdz"),
        ("ext4", "/dev/sda1"),
    ]
    bound = found["/bound/y"]
    assert bound is not None
    assert bound.fs_root == "/srv/data"


@pytest.mark.parametrize(("field", "text"), [(r"a\040b", "a b"), (r"\134040", r"\040"), ("plain", "plain")])
def test_escapes(field: str, text: str) -> None:
    assert unescape(field) == text


def test_damaged_and_missing_tables_are_no_error(tree: Tree) -> None:
    assert mounts(tree.root) == []
    assert drive_of("/x", tree.root).mount is None
    tree.file(
        "proc/self/mountinfo", "nonsense\n1 2 3:4 / /x rw - \n1 2 3:4 / /x rw\n\nx 2 3:4 / /y rw - ext4 /dev/x rw"
    )
    assert [mount.point for mount in mounts(tree.root)] == []


def test_layers_that_lead_in_a_circle_end(tree: Tree) -> None:
    tree.over("dm-1", "253:1", ["/sys/devices/virtual/block/dm-2"])
    tree.over("dm-2", "253:2", ["/sys/devices/virtual/block/dm-1"])
    tree.mount("/x", "ext4", "/dev/dm-1", device="253:1")
    assert drive_of("/x", tree.root).disks == ()
    tree.disk("loop0", "7:0")
    tree.file("/sys/devices/virtual/block/loop0/loop/backing_file", "/round/image")
    tree.mount("/round", "ext4", "/dev/loop0", device="7:0")
    assert drive_of("/round", tree.root).disks == ()


def test_this_machine(tmp_path: Path) -> None:
    """The kernel's own statement for a real path, through a link and for what does not exist yet."""
    (tmp_path / "link").symlink_to(tmp_path)
    missing = tmp_path / "link" / "not" / "there"
    assert existing_parent(missing) == tmp_path.resolve()
    mount, direct = mount_of(missing), mount_of(tmp_path)
    assert mount == direct
    assert mount is not None
    assert str(tmp_path.resolve()).startswith(mount.point)
    assert drive_of(missing).path == str(tmp_path.resolve())
    if os.path.ismount("/dev/shm"):
        shm = mount_of("/dev/shm")
        assert shm is not None
        assert shm.fs_type == "tmpfs"


def unified(tree: Tree, own: str, *, fs_root: str = "/") -> None:
    tree.mount("/sys/fs/cgroup", "cgroup2", "cgroup2", fs_root=fs_root)
    tree.file("proc/self/cgroup", f"0::{own}")


def test_no_groups_no_limit(tree: Tree) -> None:
    assert cgroup.memory_limit(tree.root) is None
    assert cgroup.cpu_quota(tree.root) is None


def test_version_2_takes_the_lowest_level(tree: Tree) -> None:
    """R17: a limit on any level above counts, and the root group has none."""
    unified(tree, "/user.slice/job.scope")
    tree.file("sys/fs/cgroup/user.slice/memory.max", str(8 * GIB))
    tree.file("sys/fs/cgroup/user.slice/cpu.max", "350000 100000")
    tree.file("sys/fs/cgroup/user.slice/job.scope/memory.max", "max")
    tree.file("sys/fs/cgroup/user.slice/job.scope/memory.high", "max")
    tree.file("sys/fs/cgroup/user.slice/job.scope/cpu.max", "max 100000")
    assert cgroup.memory_limit(tree.root) == 8 * GIB
    assert cgroup.cpu_quota(tree.root) == 3.5
    tree.file("sys/fs/cgroup/user.slice/job.scope/memory.high", str(5 * GIB))
    assert cgroup.memory_limit(tree.root) == 5 * GIB


def test_version_2_in_a_container_with_its_own_namespace(tree: Tree) -> None:
    unified(tree, "/")
    tree.file("sys/fs/cgroup/memory.max", str(3 * GIB))
    assert cgroup.memory_limit(tree.root) == 3 * GIB


@pytest.mark.parametrize("own", ["/../../outside", "/elsewhere"])
def test_a_group_that_cannot_be_seen_leaves_what_can(tree: Tree, own: str) -> None:
    unified(tree, own)
    tree.file("sys/fs/cgroup/memory.max", str(2 * GIB))
    assert cgroup.memory_limit(tree.root) == 2 * GIB


def test_version_1_in_a_container_shows_the_hosts_path(tree: Tree) -> None:
    """R17: the mount shows only the container's group, /proc names it as the host does."""
    tree.mount("/sys/fs/cgroup/memory", "cgroup", "cgroup", super_options="rw,memory", fs_root="/docker/abc")
    tree.mount("/sys/fs/cgroup/cpu", "cgroup", "cgroup", super_options="rw,cpu,cpuacct", fs_root="/docker/abc")
    tree.file("proc/self/cgroup", "7:memory:/docker/abc/job\n5:cpu,cpuacct:/docker/abc\n0::/docker/abc")
    tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", str(6 * GIB))
    tree.file("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712")
    tree.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000")
    tree.file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert cgroup.memory_limit(tree.root) == 6 * GIB
    assert cgroup.cpu_quota(tree.root) == 1.5
    tree.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert cgroup.cpu_quota(tree.root) is None


def test_both_versions_at_once(tree: Tree) -> None:
    tree.mount("/sys/fs/cgroup/unified", "cgroup2", "cgroup2")
    tree.mount("/sys/fs/cgroup/memory", "cgroup", "cgroup", super_options="rw,memory")
    tree.file("proc/self/cgroup", "8:memory:/batch/1:2\n0::/init.scope")
    tree.file("sys/fs/cgroup/memory/batch/memory.limit_in_bytes", str(4 * GIB))
    tree.file("sys/fs/cgroup/memory/batch/1:2/memory.limit_in_bytes", str(7 * GIB))
    tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert cgroup.memory_limit(tree.root) == 4 * GIB


def test_the_budgets_share_of_memory_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a percentage is of what the group allows."""
    from tierzero import Tiers
    from tierzero.tiers import config

    monkeypatch.setattr(config.cgroup, "memory_limit", lambda: 1 * GIB)
    assert config.memory_limit() == 1 * GIB
    assert Tiers(host="50%").host_bytes() == GIB // 2
    monkeypatch.setattr(config.cgroup, "memory_limit", lambda: None)
    assert config.memory_limit() > GIB
