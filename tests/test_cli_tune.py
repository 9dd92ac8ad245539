"""`tierzero tune` on a tiny model, from end to end: what it prints and writes, and that nothing else changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cli_process import CODE, TINY, default_signals, tierzero_here, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierzero.cli.tune
from tierzero.api import engine_of
from tierzero.cli.config import load
from tierzero.cli.rewrite import as_toml, replace, rewritten
from tierzero.cli.trial import beside, largest_depth, opened
from tierzero.cli.tune import candidates
from tierzero.cli.tune_show import CAUSES
from tierzero.errors import ConfigError

CONFIG = """# of mine
[model]
preset = "tiny"        # small

[data]
sequence = 16
batch = 2

[train]
out = "{out}"
[tiers]   # budgets
device = "8MiB"
prefetch = 7   # a guess
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(out=tmp_path / "runs" / "mine"))
    path.chmod(0o640)
    return path


def tune(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return tierzero_here("tune", "--seconds", "2", *map(str, arguments))


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_file_gets_the_depth_and_keeps_the_rest(config: Path, tmp_path: Path) -> None:
    done = tune(config)
    assert done.returncode == 0, done.stderr
    text = config.read_text()
    chosen = tomllib.loads(text)["tiers"]["prefetch"]
    before = CONFIG.format(out=tmp_path / "runs" / "mine")
    assert text == before.replace("prefetch = 7", f"prefetch = {json.dumps(chosen)}")
    assert config.stat().st_mode & 0o777 == 0o640
    assert load(config).tiers.prefetch == chosen
    for words in ("s/step by prefetch", "above the bound", "tokens/s", "nothing left behind", f"written to {config}"):
        assert words in done.stdout, words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml"]


def test_json_and_plots_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = ["depth.svg"] if find_spec("matplotlib") else []  # the `plots` extra
    monkeypatch.chdir(tmp_path)
    settings = [word for setting in TINY for word in ("--set", setting)]
    done = tune(
        "--json", *(word for name in drawn for word in ("--plot", name)), *settings, "--set", "tiers.link_limit=1GB/s"
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    depths = [row["depth"] for row in data["depths"]]
    assert depths == sorted(depths)
    assert data["largest_depth"] in depths
    assert data["chosen"]["tiers.prefetch"] in ("auto", *depths)
    assert data["written"] is None
    assert set(data["bounds"]) >= {"compute", "link"}
    assert data["bound_s"] == max(data["bounds"].values())
    assert data["above_bound"] == pytest.approx(max(0.0, data["step_s"] / data["bound_s"] - 1))
    for row in data["depths"]:
        assert row["step_s"] > 0
        assert set(row["stalls"]) == set(CAUSES)
    assert all("<svg" in (tmp_path / name).read_text() for name in drawn)
    assert [path.name for path in tmp_path.iterdir()] == drawn


def test_a_run_that_is_there_is_not_touched(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "mine"
    assert train(out, "train.steps=2", "train.save_every=1").returncode == 0
    before = contents(out)
    done = tune(config, "--dry-run", "--sweep", "state_dtype")
    assert done.returncode == 0, done.stderr
    assert contents(out) == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    assert "prefetch = 7" in config.read_text()
    assert "train.state_dtype" in done.stdout
    assert "for your configuration" in done.stdout


def test_a_signal_leaves_the_file_and_the_drive(config: Path, tmp_path: Path) -> None:
    before = config.read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CODE, "tune", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )
    until = time.monotonic() + 120
    while not list(tmp_path.glob(".tierzero-tune-*/store/data.bin")) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "the configuration is as it was" in errors
    assert output == ""
    assert config.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seconds", "0"], "--seconds 0: give 1 or more"),
        (["--seconds", "nan"], "--seconds nan: give 1 or more"),
        (["--sweep", "colour"], "--sweep colour: there are accumulate, block, state_dtype"),
        (["--plot", "plot.bmp"], "--plot plot.bmp: a plot is a .png, .svg, .pdf file"),
        (["--plot", "no/where/plot.png"], "--plot no/where/plot.png: there is no directory no/where"),
        (["--set", "tiers.device=1KiB"], "the device budget of 1.0 KiB is too small"),
        (["nowhere.toml"], "there is no configuration file nowhere.toml"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = tierzero_here("tune", "--set", "model.preset=tiny", *arguments)
    assert done.returncode in (1, 2)
    assert f"error: {sentence}" in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierzero.cli.tune.tune", None)  # would be a TypeError
    done = tierzero_here("tune", "/dev/null")
    assert done.returncode == 2
    assert "/dev/null is not a file that the values can be written to" in done.stderr
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # the tests' user may be root
    done = tierzero_here("tune", str(config))
    assert done.returncode == 2
    assert f"{tmp_path} is read-only" in done.stderr


def test_what_was_measured_is_shown_though_it_cannot_be_written(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes meanwhile; both forms of the output have the values, and the exit code says that it failed."""
    own = tierzero.cli.tune.tune

    def changed(*arguments: Any) -> Any:
        config.write_text(config.read_text() + "# more\n")
        return own(*arguments)

    monkeypatch.setattr("tierzero.cli.tune.tune", changed)
    done = tune(config)
    assert done.returncode == 2
    assert "was changed while it was being tuned" in done.stderr
    assert "for your configuration:\n[tiers]\nprefetch = " in done.stdout
    done = tune(config, "--json")
    assert done.returncode == 2
    data = json.loads(done.stdout)
    assert data["written"] is None
    assert "tiers.prefetch" in data["chosen"]
    assert "prefetch = 7" in config.read_text()


def test_it_measures_what_would_be_trained(tmp_path: Path) -> None:
    """With micro-batches, recomputation and activations as they are configured."""
    shared = [*TINY, f"train.out={tmp_path / 'out'}", "data.batch=4", "tiers.activations=1MiB"]
    for pieces in (1, 2):
        config = load(None, [*shared, f"train.micro_batches={pieces}"])
        with opened(config) as trial:
            engine = engine_of(trial.model)
            assert engine.placement.activations == 1 << 20
            assert engine.micro_batches.pieces == pieces


@pytest.mark.parametrize("when", ["a library that catches everything", "a finalizer"])
def test_a_signal_that_something_swallows_still_stops(
    when: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, own = config.read_bytes(), tierzero.cli.tune.Stages.begin

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def begin(stages: Any) -> None:
        if when == "a finalizer":
            monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
            Finalized()
        else:
            with suppress(BaseException):
                signal.raise_signal(signal.SIGTERM)
        own(stages)

    monkeypatch.setattr("tierzero.cli.tune.Stages.begin", begin)
    done = tune(config)
    assert done.returncode == 128 + signal.SIGTERM
    assert "the configuration is as it was" in done.stderr
    assert config.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_help() -> None:
    done = tierzero_here("tune", "--help")
    for words in ("--sweep", "--seconds", "--plot", "--json", "--dry-run", "Ctrl-C"):
        assert words in done.stdout


# ---- parts


VALUES = {"tiers.prefetch": 3, "train.state_dtype": "8bit"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only words\n",
        "[tiers]\nprefetch = 'auto' # why\n\n[train]\nsteps=3",
        "[train]\r\nsteps = 3 # three\r\n",
        "tiers = {host = 5}  # inline\n",
        "tiers.host = 5\ntrain.steps = 2\n",
        '["tiers"]\n"prefetch" = 1\n[model]\nlayers = 2\n',
        "[tiers]\nnvme = [ # two\n  'a',\n  'b', # the other\n]\n",
    ],
)
def test_rewriting_sets_the_keys_and_keeps_the_comments(text: str) -> None:
    expected = tomllib.loads(text)
    for name, value in VALUES.items():
        section, key = name.split(".")
        expected.setdefault(section, {})[key] = value
    new = rewritten(text, VALUES)
    assert tomllib.loads(new) == expected
    assert [line.partition("#")[2] for line in text.splitlines() if "#" in line] == [
        line.partition("#")[2] for line in new.splitlines() if "#" in line
    ]
    assert rewritten(new, VALUES) == new


words = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
lines = st.one_of(
    st.builds(lambda key, value: f"{key} = {value}", words, st.sampled_from(["1", '"x"', "[1, 2]", "true", "1e3"])),
    st.builds(lambda text: f"# {text}", words),
    st.just(""),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a loaded machine
@given(st.dictionaries(st.sampled_from(["model", "data", "train", "tiers"]), st.lists(lines, max_size=6)))
def test_rewriting_any_file(tables: dict[str, list[str]]) -> None:
    text = "".join(f"[{name}]\n" + "".join(f"{line}\n" for line in rows) for name, rows in tables.items())
    try:
        expected = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # a key twice
    expected.setdefault("tiers", {})["prefetch"] = 3
    new = rewritten(text, {"tiers.prefetch": 3})
    assert tomllib.loads(new) == expected
    kept = [line for line in text.splitlines() if line and not line.startswith("prefetch =")]
    assert [line for line in new.splitlines() if line in kept] == kept


def test_a_file_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("new")
    with pytest.raises(ConfigError, match="was changed while"):
        replace(path, b"old", "tuned")
    assert path.read_text() == "new"
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    replace(link, b"new", "tuned")
    assert link.is_symlink()
    assert path.read_text() == "tuned"
    assert sorted(os.listdir(tmp_path)) == ["link.toml", "run.toml"]


def test_lines_to_paste() -> None:
    text = as_toml({"tiers.prefetch": "auto", "tiers.nvme_block": "4MiB", "train.accumulate": 2})
    assert tomllib.loads(text) == {"tiers": {"prefetch": "auto", "nvme_block": "4MiB"}, "train": {"accumulate": 2}}


def test_what_the_sweeps_try() -> None:
    config = load(None, ["data.batch=3", "train.accumulate=4", "tiers.nvme_block=2MiB"])
    tried: list[dict[str, Any]] = candidates(config, "accumulate")
    assert tried[0] == {"train.accumulate": 4, "data.batch": 3}
    assert all(values["train.accumulate"] * values["data.batch"] == 12 for values in tried)
    assert len({values["train.accumulate"] for values in tried}) == len(tried) == 4
    blocks = [values["tiers.nvme_block"] for values in candidates(config, "block")]
    assert blocks[0] == "2MiB"
    assert len(set(blocks)) == len(blocks)
    for block in blocks:
        load(None, [f"tiers.nvme_block={block}"])
    for pieces in (1, 2, 4):  # none that `tierzero train` would refuse
        for values in candidates(load(None, ["data.batch=4", f"train.micro_batches={pieces}"]), "accumulate"):
            load(None, [f"train.micro_batches={pieces}", *(f"{key}={value}" for key, value in values.items())])
    assert candidates(config, "state_dtype")[0] == {"train.state_dtype": "float32"}


def test_where_it_measures(tmp_path: Path) -> None:
    """Beside the store, in its nearest directory that is there."""
    store = tmp_path / "a" / "store"
    assert beside(store) == tmp_path
    store.mkdir(parents=True)
    assert beside(store) == tmp_path / "a"


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 1000))
def test_the_largest_depth(sizes: list[int], budget: int) -> None:
    depth = largest_depth(sizes, budget)
    assert 1 <= depth <= max(1, len(sizes) - 1)
    assert depth == 1 or sum(sorted(sizes)[: depth + 1]) <= budget
