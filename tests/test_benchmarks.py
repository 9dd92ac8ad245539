"""Every benchmark runs, small, and prints one object with cases; what the figures are is nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tierzero.native import NATIVE

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = {
    "adam": ["--millions", "1", "--rounds", "1", "--threads", "1", "2"],
    "step": ["--records", "2", "--elements", "300000", "--rounds", "1"],
    "overlap waiting": ["--kind", "waiting", "--blocks", "2", "--rounds", "1", "--steps", "1"],
    "overlap real": ["--kind", "real", "--layers", "1", "--rounds", "1", "--steps", "1"],
    "plan": ["--small", "--rounds", "1", "--steps", "1", "--seconds", "2"],
    "overhead": ["--units", "50", "--rounds", "2"],
    "prefetch": ["--blocks", "3", "--steps", "3"],
    "tune waiting": ["--kind", "waiting", "--blocks", "4", "--rounds", "1", "--fetch", "1.5"],
    "tune decoder": ["--kind", "decoder", "--layers", "2", "--rounds", "1"],
    "save": ["--blocks", "1", "--layers", "1", "--rounds", "1", "--steps", "1"],
    "peers": ["--rounds", "1", "--steps", "1"],
}


@pytest.mark.skipif(NATIVE is None, reason="they measure the extension")
@pytest.mark.skipif(not BENCHMARKS.exists(), reason="tests without the rest of the repository")
@pytest.mark.parametrize("name", SMALL)
def test_it_runs(name: str, tmp_path: Path) -> None:
    script = BENCHMARKS / f"{name.split()[0]}.py"
    words = [] if name in ("adam", "overhead") else ["--nvme", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(script), "--json", *SMALL[name], *words], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = json.loads(done.stdout)["cases"]
    assert cases
    assert all(case["name"] and case["ratio"] >= 0 for case in cases)
    assert not list(tmp_path.iterdir()), "it left something behind"
