"""`tierzero plan`: what it says, its exit codes, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierzero.cli.main import app
from tierzero.cli.plan import count
from tierzero.errors import ConfigError
from tierzero.hardware.drives import drive_of
from tierzero.hardware.machine import GPUS, parse_drives, preset, together
from tierzero.sim.links import DriveRates

SEVENTY = ["--params", "70e9", "--layers", "80", "--hidden", "8192"]
SERVER = ["--gpu", "h200", "--nvme", "4x7GB/s", "--ram", "256GiB", "--tokens", "8192", "--dtype", "bf16"]
SMALL = ["--params", "10e6", "--layers", "4", "--hidden", "256", "--vocab", "1000", "--gpu", "rtx4090"]


def plan(*words: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, JSON, stderr)."""
    done = CliRunner().invoke(app, ["plan", "--json", *words])
    return done.exit_code, json.loads(done.stdout) if done.stdout.startswith("{") else {}, done.stderr


def test_seventy_billion_parameters() -> None:
    """Parameters as asked for, the bytes of the table in how-it-works.md, and links no busier than the step is long."""
    code, found, _ = plan(*SEVENTY, *SERVER, "--tbw", "4.8PB")
    assert (code, found["fits"], found["why"]) == (0, True, [])
    params = found["params"]
    assert params == pytest.approx(70e9, rel=1e-3)
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert phases["step"]["d2h"] == pytest.approx(2 * params, rel=0.01)
    assert 12 * params * 0.99 < phases["step"]["written"] < 14 * params
    assert len(phases["step"]["drives"]) == 4
    forecast = found["forecast"]
    written = phases["step"]["written"]
    assert forecast["moved"]["nvme_written"] == pytest.approx(written, rel=0.02)
    assert forecast["seconds"] >= (written + phases["step"]["read"]) / 28e9 * 0.99
    assert sum(forecast["stalls"].values()) == pytest.approx(forecast["seconds"], rel=1e-3)
    assert forecast["bottleneck"] == "the drives"
    assert forecast["hidden_tokens"] > 8192
    assert found["placement"]["steps_to_tbw"] == pytest.approx(4.8e15 / written, rel=0.01)
    assert set(found["smallest"]) == {"host", "device", "nvme"}


def test_io_hides_behind_enough_tokens() -> None:
    _, few, _ = plan(*SMALL, "--nvme", "1GB/s", "--ram", "4GiB", "--host", "64MiB", "--tokens", "1024")
    tokens = few["forecast"]["hidden_tokens"]
    assert few["forecast"]["seconds"] > 1.05 * few["forecast"]["compute_seconds"]
    words = ["--nvme", "1GB/s", "--ram", "4GiB", "--host", "64MiB", "--device", "200MB"]
    _, many, _ = plan(*SMALL, *words, "--tokens", str(2 * tokens))
    assert many["forecast"]["seconds"] < 1.06 * many["forecast"]["compute_seconds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nvme", "7GB/s", "--host", "1MiB", "--ram", "8GiB"], "the smallest host budget that works is"),
        (["--nvme", "7GB/s", "--device", "1MiB", "--ram", "8GiB"], "the smallest device budget that works is"),
        (["--nvme", "none", "--ram", "64MiB"], "without an NVMe path"),
        (["--nvme", "7GB/s", "--ram", "8GiB", "--tokens", "4000000"], "give fewer --tokens"),
    ],
)
def test_what_does_not_fit_exits_1_with_the_reason(words: list[str], said: str) -> None:
    code, found, _ = plan(*SMALL, *words)
    assert code == 1
    assert not found["fits"]
    assert any(said in sentence for sentence in found["why"]), found["why"]
    assert found["smallest"]["host"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no model to plan for"),
        (["--params", "7e9"], "--layers, --hidden missing"),
        (["--params", "1e6", "--layers", "80", "--hidden", "8192"], "is too few for 80 layers"),
        ([*SEVENTY, "--gpu", "h2000"], "there is no preset for the GPU 'h2000': use one of h200"),
        ([*SMALL, "--nvme", "x7GB/s"], "write 7GB/s, 4x7GB/s"),
        ([*SMALL, "--nvme", "7GB/s", "--nvme", "/tmp"], "not both at once"),
        ([*SMALL, "--dtype", "int8"], "use bfloat16 (bf16)"),
        ([*SMALL, "--tokens", "-1"], "1 or more"),
        ([*SMALL, "--micro-batches", "0"], "a number of pieces"),
        ([*SMALL, "--activations", "3x"], "--activations"),
        ([*SMALL, "--nvme", "4x7GB"], "rates end in /s"),
        ([*SMALL, "--nvme", "4x7"], "rates end in /s"),
        ([*SMALL, "--nvme", "7GBps"], "rates end in /s"),
        (["--params", "7Q", "--layers", "2", "--hidden", "64"], "give a number such as 7e9"),
        (["--params", "nan", "--layers", "2", "--hidden", "64"], "give a number such as 7e9"),
        (["/nowhere/config.json"], "/nowhere/config.json does not exist"),
        (["/nowhere.toml"], "there is no configuration file /nowhere.toml"),
        ([*SMALL, "--set", "train.steps=3"], "name one"),
    ],
)
def test_errors_say_what_to_do(words: list[str], said: str) -> None:
    code, _, err = plan(*words)
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("text", "number"), [("7B", 7e9), ("350m", 350e6), ("1.5T", 1.5e12), ("70e9", 70e9), (" 8 ", 8)]
)
def test_numbers_of_parameters(text: str, number: float) -> None:
    assert count(text) == number


def test_from_a_configuration(tmp_path: Path) -> None:
    """Its batch, accumulation and budgets are those of `tierzero train`."""
    file = tmp_path / "config.toml"
    file.write_text(
        '[model]\npreset = "tiny"\n[data]\nbatch = 2\nsequence = 32\n[train]\naccumulate = 3\n[tiers]\nhost = "24MiB"\n'
    )
    assert "say what those beside the --gpu do" in plan(str(file), "--gpu", "a100")[2]
    _, found, _ = plan(str(file), "--gpu", "a100", "--nvme", "5GB/s", "--ram", "1GiB")
    assert found["fits"], found["why"]
    assert found["budgets"]["host"] == 24 << 20
    forecast, step = found["forecast"], found["phases"][1]
    assert forecast["tokens"] == 3 * 2 * 32
    assert forecast["moved"]["h2d"] == pytest.approx(step["h2d"], rel=0.02)
    assert forecast["moved"]["d2h"] == pytest.approx(step["d2h"], rel=0.02)
    assert forecast["moved"]["nvme_read"] == pytest.approx(step["read"], rel=0.02)


def test_from_a_hugging_face_config(tmp_path: Path) -> None:
    """No weights and no tokenizer are there."""
    pytest.importorskip("transformers")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        code, found, _ = plan(str(path), "--gpu", "rtx4090", "--nvme", "7GB/s", "--ram", "2GiB")
        assert code == 0
        blocks = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
        assert found["params"] == blocks + 2 * 500 * 64 + 64


def test_pieces_and_activations() -> None:
    """Pieces take room on the device and save activations; what moves is the same."""
    words = [*SMALL, "--nvme", "7GB/s", "--ram", "8GiB", "--host", "100MiB", "--tokens", "4096"]
    _, whole, _ = plan(*words)
    _, cut, _ = plan(*words, "--micro-batches", "4", "--activations", "10%")
    assert cut["fits"], cut["why"]
    assert cut["placement"]["activation_bytes"] == (10 << 20)
    assert cut["smallest"]["host"] - whole["smallest"]["host"] == 10 << 20
    assert cut["smallest"]["device"] > whole["smallest"]["device"]
    assert cut["activations"] < whole["activations"]
    for key in ("step_h2d", "step_d2h"):
        assert cut["placement"][key] == whole["placement"][key]


def test_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration as it is: bytes and the drive's room; a time only if the drive was measured or is given."""
    if drive_of(tmp_path).in_memory:
        pytest.skip("temporary files lie in memory here, which is never measured")
    monkeypatch.setenv("TIERZERO_PROFILES", str(tmp_path / "profiles"))
    file = tmp_path / "config.toml"
    store = tmp_path / "store"
    file.write_text(
        f'[model]\npreset = "tiny"\n[train]\nmicro_batches = 2\n[tiers]\nnvme = "{store}"\nnvme_limit = "1MB/s"\n'
    )
    code, found, _ = plan(str(file))
    assert (code, found["fits"], found["forecast"]) == (0, True, None)
    (note,) = found["notes"]
    assert note.startswith(f"no time is predicted: the drive under {store} was never measured")
    assert f"run `tierzero bench nvme {tmp_path}` first" in note
    assert not store.exists()
    code, timed, _ = plan(str(file), "--nvme", "1GB/s", "--flops", "1e12")
    assert (code, timed["notes"]) == (0, [])
    assert timed["phases"][1]["written"] == found["phases"][1]["written"]
    assert timed["forecast"]["seconds"] > timed["phases"][1]["written"] / 1e6 * 0.9  # the limit holds
    assert timed["sources"]["drives"] == "1 given, 1GB/s, held below 0.001 GB/s"


def test_a_host_budget_above_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a warning, as of offload; of the machine that --ram names, if it names one. An unused budget is fine."""
    monkeypatch.setattr("tierzero.cli.plan.memory_limit", lambda: 1 << 40)
    words = [*SMALL, "--nvme", "7GB/s", "--host", "2GiB"]
    for ram, told in ((["--ram", "64MiB"], True), (["--ram", "1GiB"], False), ([], False)):
        code, found, _ = plan(*words, *ram)
        assert (code, found["fits"], len(found["warnings"])) == (0, True, told)
        shown = CliRunner().invoke(app, ["plan", *words, *ram]).stdout
        assert ("warning: the host budget lets the model use" in shown) is told
    monkeypatch.setattr("tierzero.cli.plan.memory_limit", lambda: 64 << 20)
    warning = plan(*words)[1]["warnings"][0]
    assert "and this process may use 64.0 MiB" in warning
    assert warning == plan(*words, "--ram", "64MiB")[1]["warnings"][0]
    assert not plan(*words, "--ram", "1GiB")[1]["warnings"]  # another machine


def test_the_table() -> None:
    done = CliRunner().invoke(app, ["plan", *SMALL, "--nvme", "7GB/s", "--ram", "8GiB"])
    assert done.exit_code == 0
    for word in ("load", "step", "save", "resume", "budget", "tokens/s", "smallest budgets", "yes: it fits"):
        assert word in done.stdout


def test_drives_as_people_write_them() -> None:
    assert parse_drives("4x7GB/s")[0] == [DriveRates(7e9, 7e9, 7e9)] * 4
    assert parse_drives("2x7/5GB/s, 1GiB/s")[0] == [DriveRates(7e9, 5e9, 5e9)] * 2 + [DriveRates(*[float(1 << 30)] * 3)]
    for wrong in ("", "0x7GB/s", "7GB", "7/0GB/s", "1..2GB/s"):
        with pytest.raises(ConfigError, match="write 7GB/s"):
            parse_drives(wrong)
    striped = together(parse_drives("6GB/s,3GB/s")[0], [2, 1])
    assert striped == DriveRates(9e9, 9e9, 9e9)
    assert together([], []) is None


def test_presets_take_their_share_of_the_peak() -> None:
    for name, gpu in GPUS.items():
        _, machine = preset(name.upper(), None, utilisation=0.4)
        assert machine.flops == pytest.approx(0.4 * gpu.flops)
        assert machine.rates.h2d < gpu.bus
        assert preset(name, None, flops=1e12)[1].flops == 1e12
