"""Every benchmark runs, small, and prints one object with cases; what the figures are is nobody's business here."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest

from tierzero.native import NATIVE

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = {
    "adam": ["--millions", "1", "--rounds", "1", "--threads", "1", "2"],
    "step": ["--records", "2", "--elements", "300000", "--rounds", "1"],
    "overlap waiting": ["--kind", "waiting", "--blocks", "2", "--width", "256", "--rounds", "1", "--steps", "1"],
    "overlap real": ["--kind", "real", "--layers", "1", "--hidden", "256", "--rounds", "1", "--steps", "1"],
    "plan": ["--small", "--rounds", "1", "--steps", "1", "--seconds", "2"],
    "overhead": ["--units", "50", "--rounds", "2"],
    "prefetch": ["--blocks", "3", "--steps", "3"],
    "tune waiting": ["--kind", "waiting", "--blocks", "4", "--rounds", "1", "--fetch", "1.5"],
    "tune decoder": ["--kind", "decoder", "--layers", "2", "--rounds", "1"],
    "save": ["--blocks", "1", "--width", "256", "--layers", "1", "--rounds", "1", "--steps", "1"],
    "peers": ["--small", "--rounds", "1", "--steps", "1"],
}
SLOW = ("save", "peers")  # they start processes of their own


@pytest.mark.skipif(NATIVE is None, reason="they measure the extension")
@pytest.mark.skipif(not BENCHMARKS.exists(), reason="tests without the rest of the repository")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SMALL]
)
def test_it_runs(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    errors = tmp_path_factory.mktemp("said") / "errors"
    script = BENCHMARKS / f"{name.split()[0]}.py"
    words = [] if name in ("adam", "overhead") else ["--nvme", str(tmp_path)]
    process, output = forked.start(forked.script, script, ["--json", *SMALL[name], *words], errors=errors)
    with output:
        said = output.read()
    assert forked.code_of(process) == 0, errors.read_text()[-2000:]
    cases = json.loads(said)["cases"]
    assert cases
    assert all(case["name"] and case["ratio"] >= 0 for case in cases)
    assert not list(tmp_path.iterdir()), "it left something behind"
