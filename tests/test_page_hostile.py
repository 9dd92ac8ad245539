"""`tierzero report` of files that hold any JSON at all, places where no page can be written, ports that are taken."""

from __future__ import annotations

import copy
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from cli_process import tierzero_here, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_page import Checked

NASTY = [
    *(None, True, 0, -1, 5e-324, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 10**400, -(10**400)),
    *("", "<b>&\"'</b>", "\ud800", "</style><script>alert(1)</script>", [], [3], {}, {"name": "<i>"}),
]
FILES = ("run.json", "summary.json", "trace.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run."""
    out = tmp_path_factory.mktemp("runs") / "run"
    done = train(out, "train.steps=3", "train.sample=0", "tiers.nvme_tbw=1TB", flags=("--trace", "2"))
    assert done.returncode == 0, done.stderr
    return out


def places(value: Any) -> list[tuple[Any, Any]]:
    """Everything that can be replaced in nested lists and dicts, with what holds it."""
    found: list[tuple[Any, Any]] = []
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found += [(value, key), *places(value[key])]
    return found


def page_of(run: Path, contents: dict[str, str], folder: Path) -> Checked:
    """The page for these files, which has to be well-formed and load nothing."""
    for name, text in contents.items():
        (folder / name).write_text(text, errors="surrogatepass")
    done = tierzero_here("report", str(folder))
    assert done.returncode == 0, done.stderr
    checked = Checked()
    checked.feed((folder / "report.html").read_text(encoding="utf-8"))
    assert checked.open == []
    return checked


@given(st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_json_is_a_page(run: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Some values anywhere in any of the files are replaced by others."""
    files = {name: json.loads((run / name).read_text()) for name in FILES}
    files["trace.json"]["traceEvents"] = files["trace.json"]["traceEvents"][:60]
    files["metrics.jsonl"] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = copy.deepcopy(files)
    for _ in range(data.draw(st.integers(1, 20))):
        name = data.draw(st.sampled_from(sorted(files)))
        holder, key = data.draw(st.sampled_from([*places(files[name]), (files, name)]))
        if name != "metrics.jsonl" or holder is not files:
            holder[key] = copy.deepcopy(data.draw(st.sampled_from(NASTY)))
    files["metrics.jsonl"].append({"step": 4})  # the one line that there always is
    lines = "".join(json.dumps(line) + "\n" for line in files.pop("metrics.jsonl"))
    page_of(run, {"metrics.jsonl": lines} | {name: json.dumps(value) for name, value in files.items()}, tmp_path)


def test_numbers_and_nesting_that_no_parser_takes(run: Path, tmp_path: Path) -> None:
    lines = ['{"step": 1}', '{"step": ' + "9" * 5000 + "}", "[" * 100_000, '{"step": 1e400}', '{"step": -3}']
    page_of(run, {"metrics.jsonl": "\n".join(lines)}, tmp_path)


def test_names_that_are_no_text_or_html(run: Path, tmp_path: Path) -> None:
    for name in (b"<script>&amp;'\"", b"\xff\xfe", "né \U0001f600\n".encode(), b"-"):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        page_of(run, {"metrics.jsonl": '{"step": 1, "loss": 2.0}\n'}, folder)


def test_a_port_in_use_makes_and_removes_nothing(run: Path, tmp_path: Path) -> None:
    """Neither a run that was not there nor, with --overwrite, one that was."""
    before = sorted(path.name for path in run.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for out, more in ((tmp_path / "new", ()), (run, ("--overwrite",))):
            done = train(out, "train.steps=1", "train.sample=0", flags=("--prometheus", port, *more))
            assert done.returncode == 1
            assert f"cannot serve metrics at 127.0.0.1:{port}" in done.stderr
    assert sorted(path.name for path in run.rglob("*")) == before
    assert not (tmp_path / "new").exists()


def test_where_no_page_can_be(run: Path, tmp_path: Path) -> None:
    """What is no file is not replaced, a link stays one, and a write that fails leaves nothing."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dir").mkdir()
    for target in (tmp_path / "pipe", tmp_path / "dir", "/", "..", "", "/dev/full"):
        done = tierzero_here("report", str(run), "--out", str(target))
        assert done.returncode == 2
        assert "is not a file that a page can be written to" in done.stderr
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    assert tierzero_here("report", str(run), "--out", str(tmp_path / "link.html")).returncode == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").is_file()
    assert sorted(os.listdir(tmp_path)) == ["dir", "link.html", "page.html", "pipe"]


def test_a_full_disk_is_named_and_leaves_no_half_of_a_page(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".page.html.new").symlink_to("/dev/full")
    done = tierzero_here("report", str(run), "--out", str(tmp_path / "page.html"))
    assert done.returncode == 1
    assert f"{tmp_path / 'page.html'} cannot be written: No space left on device" in done.stderr
    assert not list(tmp_path.iterdir())


def test_training_goes_on_without_its_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk for the trace is a warning, and nothing of it stays."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "trace.json.part").symlink_to("/dev/full")
    done = train(out, "train.steps=3", "train.sample=0", flags=("--trace", "2"))
    assert done.returncode == 0, done.stderr
    assert "the trace could not be written" in caplog.text
    assert not list(out.glob("trace*"))
