"""Everything that doctor looks at, collected."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tierzero.doctor import gpudirect, libraries, limits, machine, native, paths
from tierzero.doctor.child import Child
from tierzero.doctor.finding import Finding
from tierzero.hardware.drives import Disk, Drive

SILENCE = 20.0  # seconds; a drive that takes longer to make a small file is of no use


@dataclass(frozen=True)
class Report:
    """Findings in the order they are shown: the machine's, then each path's."""

    when: str
    versions: dict[str, str]
    paths: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """What prevents training."""
        return tuple(finding for finding in self.findings if finding.status == "fail")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": not self.failed,
            "when": self.when,
            "versions": self.versions,
            "paths": list(self.paths),
            "findings": [dict(vars(finding)) for finding in self.findings],
        }


def examine(asked: Sequence[str | os.PathLike[str]]) -> Report:
    """Look at this machine and at the drives under `asked`. Takes as long as importing torch."""
    found_versions = libraries.versions()
    with Child("tierzero.doctor.libraries:torch_probe") as torch, Child("tierzero.doctor.gpudirect:probe") as direct:
        found = [machine.memory(), machine.swap(), machine.overcommit(), *limits.findings(), *native.findings()]
        outcome = torch.listen(libraries.SILENCE)
        cuda = outcome.last("cuda")
        gpu = bool(cuda and cuda["devices"])
        more = [libraries.packages(found_versions), *libraries.torch_findings(outcome)]
        more.append(gpudirect.finding(direct.listen(gpudirect.SILENCE), gpu))
    drives, there = [], []
    for path in dict.fromkeys(os.fspath(path) for path in asked):
        drive, about = _look(path, gpu)
        drives.append(drive)
        there += about
    found = [machine.kernel(), machine.processor(), machine.numa(drives), *found, *more, *there]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Report(when, found_versions, tuple(drive.path for drive in drives), tuple(found))


def _look(path: str, gpu: bool) -> tuple[Drive, list[Finding]]:
    """The drive under a path, as far as it is told, and what was found; in a child, which may hang with the drive."""
    with Child("tierzero.doctor.paths:probe", path, gpu) as child:
        outcome = child.listen(SILENCE)
    told = outcome.last("drive") or {"path": path, "disks": []}
    drive = Drive(path, told["path"], None, (), tuple(Disk(**disk) for disk in told["disks"]))
    found = [Finding(**line["finding"]) for line in outcome.lines if line["what"] == "finding"]
    if outcome.ended:
        found.append(paths.silent(drive.path, outcome.ended, SILENCE))
    return drive, found
