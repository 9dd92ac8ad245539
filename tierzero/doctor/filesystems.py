"""What a file system and its mount options mean for a store. Pure: facts of `drives` in, findings out."""

from __future__ import annotations

import shlex

from tierzero.doctor.finding import Finding, Status
from tierzero.hardware.drives import Drive, Mount
from tierzero.sizes import format_size

_NETWORK = "every read and write crosses the network, and fsync is the server's: keep the store on a local drive"
_PASSED = "each request passes through another process or host: put the store on a local ext4 or xfs"
_COPIES = (
    "copy-on-write: rewriting records fragments them and checksums cost time; use ext4 or xfs, or chattr +C on the "
    "empty store directory"
)
_FAT = "no file above 4 GiB, no sparse files and no permissions: use ext4 or xfs"

KINDS: dict[str, tuple[Status, str]] = {
    "ext4": ("ok", ""),
    "xfs": ("ok", ""),
    "f2fs": ("ok", ""),
    "ext2": ("note", "no journal: after a power cut it needs a check before a store can be trusted; use ext4"),
    "ext3": ("note", "blocks are allocated one by one, slower for large files: use ext4"),
    "overlay": (
        "warn",
        "a container's own layer: slow first writes, gone with the container, no GPUDirect; mount a volume (docker -v)",
    ),
    "aufs": ("warn", "a container's own layer, gone with the container: mount a volume (docker -v)"),
    "tmpfs": ("warn", "this is memory, not a drive: what is stored here takes RAM or swap and is gone after a restart"),
    "ramfs": ("warn", "this is memory, not a drive, and nothing limits it: use a directory on a drive"),
    "nfs": ("warn", _NETWORK),
    "nfs4": ("warn", _NETWORK),
    "cifs": ("warn", _NETWORK),
    "smb3": ("warn", _NETWORK),
    "ceph": ("warn", _NETWORK),
    "afs": ("warn", _NETWORK),
    "lustre": ("note", "shared with everyone else on the network: measure it with tierzero bench nvme"),
    "gpfs": ("note", "shared with everyone else on the network: measure it with tierzero bench nvme"),
    "beegfs": ("note", "shared with everyone else on the network: measure it with tierzero bench nvme"),
    "wekafs": ("note", "shared with everyone else on the network: measure it with tierzero bench nvme"),
    "fuse": ("warn", f"FUSE: {_PASSED}"),
    "fuseblk": ("warn", f"FUSE: {_PASSED}"),
    "9p": ("warn", f"9p: {_PASSED}"),
    "virtiofs": ("warn", f"virtiofs: {_PASSED}"),
    "vboxsf": ("warn", f"a folder of the host: {_PASSED}"),
    "drvfs": ("warn", f"a Windows folder: {_PASSED}"),
    "btrfs": ("warn", _COPIES),
    "bcachefs": ("warn", "copy-on-write: rewriting records fragments them; use ext4 or xfs for the store"),
    "zfs": (
        "warn",
        "copy-on-write through its own cache: use a dataset with recordsize=1M compression=off primarycache=metadata",
    ),
    "ecryptfs": ("warn", "encrypted file by file, without O_DIRECT: use a LUKS volume with ext4"),
    "ntfs": ("warn", "slow and without crash safety for this use: use ext4 or xfs"),
    "ntfs3": ("warn", "slow and without crash safety for this use: use ext4 or xfs"),
    "vfat": ("warn", _FAT),
    "msdos": ("warn", _FAT),
    "exfat": ("note", "no journal and no sparse files: use ext4 or xfs"),
}
_KEPT = ("noatime", "nodiratime", "lazytime", "nosuid", "nodev", "noexec", "discard", "ro")  # by a mount made anew


def file_system(drive: Drive) -> Finding:
    """The kind, what it is mounted from, and the consequence where it is not made for a store (N12)."""
    mount = drive.mount
    if mount is None:
        return Finding("file system", "unknown", "note", "/proc/self/mountinfo does not tell: mount /proc", drive.path)
    part = "" if mount.fs_root == "/" else f", the part {mount.fs_root} of it"
    value = f"{mount.fs_type} from {mount.source} on {mount.point}{part}"
    kind = "fuse" if mount.fs_type.startswith("fuse.") else mount.fs_type
    status, advice = KINDS.get(kind, ("note", "tierzero is not tested on it: run tierzero doctor --selftest here"))
    facts = {
        "type": mount.fs_type,
        "source": mount.source,
        "mounted_on": mount.point,
        "part": mount.fs_root,
        "device": mount.device,
        "options": list(mount.options),
    }
    return Finding("file system", value, status, advice, drive.path, facts)


def mount_options(drive: Drive) -> list[Finding]:
    """One finding for each option that matters here, or one that says that none does."""
    mount = drive.mount
    if mount is None:
        return []
    found: list[Finding] = []

    def say(option: str, status: Status, advice: str) -> None:
        found.append(Finding("mount option", option, status, advice, drive.path, {"option": option}))

    point = shlex.quote(mount.point)
    if mount.option("ro") is not None:
        say("ro", "fail", f"nothing can be written: sudo mount -o remount,rw {point}, or choose another directory")
    if mount.option("nobarrier") is not None or mount.option("barrier") == "0":
        say("nobarrier", "warn", f"a power cut can lose committed steps: sudo mount -o remount,barrier {point}")
    if mount.option("data") == "journal":
        say("data=journal", "warn", "every byte is written twice and O_DIRECT is off: mount with data=ordered")
    if mount.option("data") == "writeback":
        say("data=writeback", "note", "after a power cut files can show old bytes; records are checked when read")
    if mount.option("sync") is not None:
        say("sync", "warn", f"every write waits for the drive: sudo mount -o remount,async {point}")
    for name in ("compress", "compress-force"):
        if mount.option(name) is not None:
            say(
                f"{name}={mount.option(name)}",
                "warn",
                "weights do not compress, trying costs time and turns O_DIRECT off: chattr +m on the store directory",
            )
    if mount.fs_type in ("nfs", "nfs4") and (mount.option("soft") is not None or mount.option("softerr") is not None):
        say("soft", "warn", "a slow server turns into I/O errors: mount with hard")
    if not found:
        found.append(Finding("mount options", ",".join(mount.options), path=drive.path))
    return found


def gpudirect_mount(drive: Drive, wanted: bool) -> Finding | None:
    """Whether GPUDirect Storage would take this mount; `wanted` where there is a GPU. None if nothing stands against
    it, or it is not ext4 and there is no GPU.
    """
    mount = drive.mount
    if mount is None or (mount.fs_type == "ext4" and mount.option("data") == "ordered") or mount.fs_type == "xfs":
        return None
    status: Status = "warn" if wanted else "note"
    if mount.fs_type == "ext4":
        advice = f"for GPUDirect only: {spelled_out(mount)}"
        return Finding("GPUDirect mount", "ext4 without data=ordered", status, advice, drive.path)
    if not wanted:
        return None
    advice = "GPUDirect works on ext4 and xfs only; elsewhere data passes through host memory"
    return Finding("GPUDirect mount", mount.fs_type, "note", advice, drive.path)


def spelled_out(mount: Mount) -> str:
    """What mounts an ext4 with data=ordered written out (N14). A remount is no help: the kernel accepts it and goes on
    showing nothing, since that mode is the default.
    """
    if mount.point == "/":
        return "boot with rootflags=data=ordered (GRUB_CMDLINE_LINUX in /etc/default/grub)"
    options = ",".join([*(option for option in mount.options if option in _KEPT), "data=ordered"])
    point = shlex.quote(mount.point)
    return f"sudo umount {point} && sudo mount -o {options} {shlex.quote(mount.source)} {point}, and in /etc/fstab"


def disks(drive: Drive) -> Finding:
    """The disks below the path."""
    facts = {"layers": list(drive.layers), "disks": [dict(vars(disk)) for disk in drive.disks]}
    if not drive.disks:
        return Finding("drive", "no block device is known below it", path=drive.path, facts=facts)
    parts = []
    for disk in drive.disks:
        words = [disk.name, disk.model, f"node {disk.numa_node}" if disk.numa_node >= 0 else ""]
        words.append(f"requests up to {format_size(disk.max_request)}" if disk.max_request else "")
        parts.append(", ".join(word for word in words if word))
    value = "; ".join(parts)
    if drive.layers:
        value += f" (below {', '.join(drive.layers)})"
    turning = [disk.name for disk in drive.disks if disk.rotational]
    virtual = all(name.startswith(("vd", "xvd")) for name in turning)
    if turning and not virtual:
        advice = "a turning disk seeks between records, 10 to 100 times slower than NVMe: use a solid-state drive"
        return Finding("drive", value, "warn", advice, drive.path, facts)
    if turning:
        advice = "a virtual disk: what it can do shows only when measured, with tierzero bench nvme"
        return Finding("drive", value, "note", advice, drive.path, facts)
    return Finding("drive", value, path=drive.path, facts=facts)
