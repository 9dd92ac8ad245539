"""Loading and exporting take the memory of a part, whatever the size of the tensors (R7, R10)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import weights_memory

MIB = 1 << 20


def test_peaks(tmp_path: Path) -> None:
    """A tensor of 94 MiB passes through half of it, in all; fifty exports leave nothing behind."""
    command = [sys.executable, weights_memory.__file__, str(tmp_path)]
    subprocess.run(command, check=True)  # writes the files: their pages are not this process's
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["largest"] > 90 * MIB
    for what in ("load", "cast", "masters", "export", "one_more"):
        assert found[what] < 48 * MIB, found
    assert found["slope"] < 1 * MIB, found
