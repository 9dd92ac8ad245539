"""Trees of /proc and /sys, as machines that the tests do not run on have them."""

from __future__ import annotations

from pathlib import Path


class Tree:
    """A directory that stands for "/"."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mountinfo: list[str] = []

    def file(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def link(self, path: str, to: str) -> None:
        """A symbolic link inside the tree, to an absolute path of it."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(self.root / to.lstrip("/"))

    def mount(
        self,
        point: str,
        fs_type: str,
        source: str,
        *,
        device: str = "0:99",
        options: str = "rw,relatime",
        super_options: str = "rw",
        fs_root: str = "/",
    ) -> None:
        """One more line of mountinfo, with optional fields as shared mounts have them."""
        ident = 20 + len(self.mountinfo)
        self.mountinfo.append(
            f"{ident} 1 {device} {fs_root} {point} {options} shared:{ident} - {fs_type} {source} {super_options}"
        )
        self.file("proc/self/mountinfo", "\n".join(self.mountinfo))

    def disk(self, name: str, number: str, *, at: str = "", model: str = "", rotational: int = 0) -> str:
        """A whole disk; returns its directory."""
        home = f"{at or '/sys/devices/virtual/block'}/{name}"
        self.file(f"{home}/queue/rotational", str(rotational))
        self.file(f"{home}/queue/max_sectors_kb", "1280")
        self.file(f"{home}/queue/logical_block_size", "512")
        self.file(f"{home}/dev", number)
        if model:
            self.file(f"{home}/device/model", model)
        self.block(name, number, home)
        return home

    def block(self, name: str, number: str, home: str) -> None:
        """The names under which a block device is found."""
        self.link(f"/sys/dev/block/{number}", home)
        self.link(f"/sys/class/block/{name}", home)

    def over(self, name: str, number: str, below: list[str]) -> str:
        """A device mapper or RAID device over others."""
        home = f"/sys/devices/virtual/block/{name}"
        self.file(f"{home}/dev", number)
        for device in below:
            self.link(f"{home}/slaves/{Path(device).name}", device)
        self.block(name, number, home)
        return home
