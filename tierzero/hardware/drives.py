"""The drive under a path, as /proc and /sys describe it: mount, file system, block device and the disks below it.

`root` stands for "/" where /proc and /sys are read, so that another tree may be looked at; paths asked about stay
absolute inside it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MEMORY = ("tmpfs", "ramfs", "devtmpfs")  # file systems
_RAM_DISK = re.compile(r"z?ram\d+")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. `options`: the mount's own and the file system's; `fs_root`: the part that is mounted."""

    ident: int
    point: str
    fs_root: str
    device: str  # "major:minor"; of no block device for overlay, tmpfs, NFS, btrfs and their like
    fs_type: str
    source: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """The value of an option, "" where it has none, None where it is not set."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


@dataclass(frozen=True)
class Disk:
    """A whole disk: what no further layer is known below of. `max_request` and `block` are bytes, 0 where unknown."""

    name: str
    model: str
    rotational: bool
    numa_node: int  # -1 where there is one node, or none is known
    max_request: int
    block: int


@dataclass(frozen=True)
class Drive:
    """The path asked for, the part of it that exists, and what it lies on. `layers` are the block devices from the
    mounted one down to, not including, the disks.
    """

    asked: str
    path: str
    mount: Mount | None
    layers: tuple[str, ...]
    disks: tuple[Disk, ...]

    @property
    def in_memory(self) -> bool:
        """Whether this is RAM: a file system in memory, or RAM disks."""
        if self.mount is not None and self.mount.fs_type in _MEMORY:
            return True
        return bool(self.disks) and all(_RAM_DISK.fullmatch(disk.name) for disk in self.disks)


def unescape(field: str) -> str:
    """A field of mountinfo as it was: the kernel writes space, tab, newline, backslash as octal escapes."""
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), field)


def mounts(root: str | os.PathLike[str] = "/") -> list[Mount]:
    """What is mounted for this process, in the kernel's order. Empty where /proc does not tell."""
    try:
        text = (Path(root) / "proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return []
    return [mount for line in text.splitlines() if (mount := _parse(line)) is not None]


def _parse(line: str) -> Mount | None:
    head, separator, tail = line.partition(" - ")
    fields, rest = head.split(" "), tail.split(" ")
    if not separator or len(fields) < 6 or len(rest) < 2 or not fields[0].isdigit():
        return None
    options = [*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else [])]
    return Mount(
        ident=int(fields[0]),
        point=unescape(fields[4]),
        fs_root=unescape(fields[3]),
        device=fields[2],
        fs_type=rest[0],
        source=unescape(rest[1]),
        options=tuple(dict.fromkeys(unescape(option) for option in options)),
    )


def existing_parent(path: str | os.PathLike[str]) -> Path:
    """The path itself, or the nearest directory above it that exists; links resolved."""
    found = Path(os.path.realpath(path))
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent
    return found


def mount_of(path: str | os.PathLike[str], root: str | os.PathLike[str] = "/") -> Mount | None:
    """The mount that holds `path`, or the nearest part of it that exists. None where /proc does not tell."""
    table = mounts(root)
    if os.fspath(root) == "/":
        ident = _mount_ident(existing_parent(path))
        for mount in table:
            if mount.ident == ident:
                return mount
        path = existing_parent(path)
    best: Mount | None = None
    for mount in table:
        # among equals the last one lies on top
        if _inside(os.fspath(path), mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _mount_ident(path: Path) -> int:
    """The kernel's own answer, right where mounts hide one another; -1 where it gives none."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
                if line.startswith("mnt_id:"):
                    return int(line.split()[1])
        finally:
            os.close(descriptor)
    return -1


def _inside(path: str, point: str) -> bool:
    return point == "/" or path == point or path.startswith(point + "/")


def drive_of(path: str | os.PathLike[str], root: str | os.PathLike[str] = "/") -> Drive:
    """Everything known about the drive under `path`; nothing here raises for what is missing."""
    here = os.fspath(root) == "/"
    found = str(existing_parent(path)) if here else os.fspath(path)
    layers: dict[str, str] = {}
    disks: dict[str, Disk] = {}
    mount = _descend_from(found, Path(root), layers, disks)
    return Drive(os.fspath(path), found, mount, tuple(layers.values()), tuple(disks.values()))


def _descend_from(path: str, root: Path, layers: dict[str, str], disks: dict[str, Disk]) -> Mount | None:
    mount = mount_of(path, root)
    device = None if mount is None else _device_of(mount, root)
    if device is not None:
        _descend(device, root, layers, disks)
    return mount


def _device_of(mount: Mount, root: Path) -> Path | None:
    """The block device's directory in /sys: by number, or by name where the file system hides the number."""
    by_number = root / "sys/dev/block" / mount.device
    if by_number.exists():
        return by_number.resolve()
    if not mount.source.startswith("/dev/"):
        return None
    source = mount.source
    with suppress(OSError):
        link = os.readlink(root / source.lstrip("/"))  # /dev/mapper/name -> ../dm-0
        source = os.path.normpath(os.path.join(os.path.dirname(source), link))
    by_name = root / "sys/class/block" / os.path.basename(source)
    return by_name.resolve() if by_name.exists() else None


def _descend(device: Path, root: Path, layers: dict[str, str], disks: dict[str, Disk]) -> None:
    """Follow a block device down to whole disks; each is visited once."""
    name = device.name
    if name in layers or name in disks:
        return
    if (device / "partition").exists():
        layers[name] = name
        _descend(device.parent, root, layers, disks)
        return
    slaves = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
    backing = _text(device / "loop/backing_file")
    if slaves:
        layers[name] = name
        for slave in slaves:
            _descend(slave.resolve(), root, layers, disks)
    elif backing:
        layers[name] = f"{name} ({backing})"
        _descend_from(backing, root, layers, disks)
    else:
        disks[name] = _disk(device)


def _disk(device: Path) -> Disk:
    model = " ".join(_text(device / "device/model").split())
    return Disk(
        name=device.name,
        model=model,
        rotational=_text(device / "queue/rotational") == "1",
        numa_node=_numa_node(device),
        max_request=_number(device / "queue/max_sectors_kb") * 1024,
        block=_number(device / "queue/logical_block_size"),
    )


def _numa_node(device: Path) -> int:
    """The node of the nearest device above that has one: a controller's PCI function, say."""
    for place in (device / "device", device):
        with suppress(OSError):
            for directory in (resolved := place.resolve(), *resolved.parents):
                text = _text(directory / "numa_node")
                if text.lstrip("-").isdigit():
                    return int(text)
                if directory.name in ("devices", "sys"):
                    break
    return -1


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0
