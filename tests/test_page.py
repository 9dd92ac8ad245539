"""`tierzero report`: the page of a real run, of odd ones, and sentences for what is none."""

from __future__ import annotations

import json
import math
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cli_process import metrics, tierzero_here, train
from hypothesis import given
from hypothesis import strategies as st

from tierzero.cli.page.charts import SIZE, groups, line_chart, share_chart, ticks
from tierzero.cli.page.rundata import median, number
from tierzero.cli.page.timeline import timeline
from tierzero.cli.steptrace import StepTrace, check_steps, parse_address, parse_steps
from tierzero.errors import ConfigError

VOID = {"meta", "path", "rect", "br"}  # as the page writes them


class Checked(HTMLParser):
    """Fails on tags that do not match and on anything that would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.bars = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href", "xlink:href"} & {name for name, _ in attrs}
        self.bars += tag == "rect"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def read(page: Path) -> tuple[str, Checked]:
    """The page's visible text, joined, and the parser that checked it."""
    text = page.read_text()
    assert "nan" not in text.split("</style>")[1].replace("finance", "")
    assert "url(" not in text
    assert "http" not in text
    checked = Checked()
    checked.feed(text)
    assert checked.open == []
    return " ".join(checked.text), checked


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run with everything that a report needs."""
    out = tmp_path_factory.mktemp("runs") / "a <run>"
    done = train(out, "train.steps=5", "train.sample=0", "tiers.nvme_tbw=1TB", flags=("--prometheus", "0"))
    assert done.returncode == 0, done.stderr
    assert "metrics for Prometheus at http://127.0.0.1:" in done.stdout
    return out


def test_the_page_of_a_run(finished: Path) -> None:
    done = tierzero_here("report", str(finished))
    assert done.returncode == 0
    assert done.stdout == f"wrote {finished / 'report.html'}: 5 of 5 steps\n"
    text, page = read(finished / "report.html")
    assert "a <run>" in text
    for word in (
        "Loss",
        "Tokens per second",
        "waiting for parameters",
        "Step 3,",
        "NVMe written",
        "days",
        "% of 1.00 TB",
    ):
        assert word in text, word
    assert page.bars > 20
    for link in ("NVMe read", "to the device"):
        ratio = text.split("GB/s while busy")[1].split(link)[1].split()[4]
        assert 0.5 < float(ratio) < 1.5


def test_what_train_writes_for_it(finished: Path) -> None:
    """Parts that add up in every line, and a trace of two steps."""
    for line in metrics(finished):
        assert sum(line["parts"].values()) == pytest.approx(line["wall_s"], rel=1e-9)
        assert line["wall_s"] >= line["step_s"] * 0.97 or line["step"] == 1
        assert 0 <= line["io"]["hit_rate"] <= 1
        assert set(line["busy"]) == set(line["bytes"])
    steps = [event["name"] for event in trace_of(finished) if event.get("cat") == "step"]
    assert steps == ["step 3", "step 4"]
    assert json.loads((finished / "run.json").read_text())["step_bytes"]["nvme_read"] > 0


def trace_of(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "trace.json").read_text())["traceEvents"]
    return found


def test_which_steps_are_traced(tmp_path: Path) -> None:
    """Those asked for, or none; a run of one step traces that one."""
    for flags, steps, expected in (
        ((), "1", ["step 1"]),
        (("--trace", "2-3"), "3", ["step 2", "step 3"]),
        (("--trace", "none"), "2", None),
    ):
        out = tmp_path / "run"
        done = train(out, f"train.steps={steps}", "train.sample=0", flags=(*flags, "--overwrite"))
        assert done.returncode == 0, done.stderr
        assert (out / "trace.json").exists() == (expected is not None)
        if expected is not None:
            assert [event["name"] for event in trace_of(out) if event.get("cat") == "step"] == expected
    assert tierzero_here("report", str(out)).returncode == 0
    text, _ = read(out / "report.html")
    assert "No step was recorded" in text
    done = train(out, "train.steps=4", "train.sample=0", flags=("--resume",))
    assert done.returncode == 0, done.stderr
    assert [event["name"] for event in trace_of(out) if event.get("cat") == "step"] == ["step 4"]
    done = train(tmp_path / "no", flags=("--trace", "soon"))
    assert done.returncode == 2
    assert "error: --trace takes a step" in done.stderr


def odd(run: Path, lines: list[Any], tail: str = "") -> str:
    """The text of the page for these lines of metrics.jsonl, and what a crash left of one more."""
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    done = tierzero_here("report", str(run), "--out", str(run / "page.html"))
    assert done.returncode == 0, done.stderr
    return read(run / "page.html")[0]


def test_odd_runs(finished: Path, tmp_path: Path) -> None:
    """One step, ten thousand, losses that are not finite, torn and foreign lines, files that are damaged or missing."""
    run = tmp_path / "odd"
    run.mkdir()
    lines = metrics(finished)
    assert "1 of 1" in odd(run, lines[:1])
    assert "3 of 3" in odd(run, lines[:3], '{"step": 4, "lo')
    assert "2 steps, the first of them step 2" in odd(
        run, [{**line, "loss": math.nan if line["step"] in (2, 3) else 1.0} for line in lines]
    )
    assert "No step has a finite value" in odd(run, [{**line, "loss": math.inf} for line in lines])
    assert "does not say" in odd(run, [{"step": line["step"], "loss": line["loss"]} for line in lines])
    strange = [
        {"step": 1},
        {"step": 2, "loss": "x", "parts": 3, "bytes": [1]},
        {"step": 2, "loss": True},
        [3],
        {"a": 1},
    ]
    assert "2 of 2" in odd(run, strange)
    for name in ("run.json", "summary.json", "trace.json"):
        shutil.copy(finished / name, run / name)
        assert "5 of 5" in odd(run, lines)
        (run / name).write_text((run / name).read_text()[:-20])
        assert "5 of 5" in odd(run, lines)
        (run / name).write_text("[]")
        assert "5 of 5" in odd(run, lines)
    many = [{**lines[index % 5], "step": index + 1} for index in range(10_000)]
    assert "10,000 of 10,000" in odd(run, many)
    assert (run / "page.html").stat().st_size < 1 << 20


def test_no_run(tmp_path: Path) -> None:
    """A sentence each, and no page."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text("")
    for name, words in (("gone", "not a directory"), ("empty", "holds no run"), ("begun", "not finished a step")):
        done = tierzero_here("report", str(tmp_path / name))
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert not (tmp_path / name / "report.html").exists()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"step": 1}\n')
    done = tierzero_here("report", str(tmp_path / "begun"), "--out", str(tmp_path / "no" / "page.html"))
    assert done.returncode == 1
    assert str(tmp_path / "no") in done.stderr


finite = st.floats(-1e300, 1e300)


@given(finite, finite)
def test_ticks(a: float, b: float) -> None:
    """Between the ends, rising, and not too many."""
    low, high = min(a, b), max(a, b)
    found = ticks(low, high)
    assert 1 <= len(found) <= 8
    if len(found) > 1:
        room = 1e-6 * (high - low)
        assert all(low - room <= at <= high + room for at in found)
        assert found == sorted(found)


@given(st.integers(0, 5000), st.integers(1, 300))
def test_groups(count: int, most: int) -> None:
    found = groups(count, most)
    assert [index for group in found for index in group] == list(range(count))
    assert all(found)
    assert len(found) == min(count, most)


@given(st.lists(st.floats(), min_size=1, max_size=900))
def test_charts_take_any_numbers(values: list[float]) -> None:
    """Nothing leaves the frame but by a rounding."""
    xs = [float(index + 1) for index in range(len(values))]
    chart = line_chart(xs, values, "compute", "it")
    positive = [abs(value) if math.isfinite(value) else value for value in values]
    chart += share_chart(xs, [("compute", positive), ("fetch", [1.0] * len(xs))], "it")
    for path in chart.split(' d="')[1:]:
        for word in path.split('"')[0].replace("M", " ").replace("L", " ").replace("h0.01", "").split():
            for each in word.replace("V", ",").replace("H", ",").replace("z", "").split(","):
                assert -0.1 <= float(each) <= SIZE + 0.1


def test_a_timeline_needs_a_step() -> None:
    assert timeline([]) is None
    assert timeline([{"ph": "X", "cat": "step", "ts": 0, "dur": 0}, {"ph": "X", "cat": "step", "ts": None}]) is None
    assert timeline([{"ph": "X", "cat": "step", "ts": 0, "dur": 5, "args": 7}]) is not None


def test_numbers() -> None:
    assert number({"a": {"b": 2}}, "a", "b") == 2
    assert all(math.isnan(number(value, "a")) for value in ({"a": True}, {"a": "1"}, {}, [], None))
    assert median([math.nan, 3.0, math.inf, 1.0]) == 2.0
    assert math.isnan(median([]))


def test_options(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_steps("10-12") == (10, 12)
    assert parse_steps("none") == (0, 0)
    for text in ("", "0", "3-2", "1-", "x", "1-2-3", "-1", "9" * 10):
        with pytest.raises(ConfigError, match="--trace takes"):
            parse_steps(text)
    with pytest.raises(ConfigError, match="the run has 9 steps"):
        check_steps("10-12", 9)
    check_steps("9-12", 9)
    for asked in (None, "4", "5-7"):  # after 4 of 4 steps, only what was asked for is missed
        caplog.clear()
        StepTrace(Path("trace.json"), asked, 4, 4)
        assert ("no trace is recorded" in caplog.text) == (asked == "4")
    assert parse_address("9400") == ("127.0.0.1", 9400)
    assert parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("", ":80", "x", "80:", "1:99999", "-1", "٣", "1" * 5000):
        with pytest.raises(ConfigError, match="--prometheus takes"):
            parse_address(text)
