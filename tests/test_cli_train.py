"""`tierzero train` from end to end: what a run leaves, losses equal to plain PyTorch's, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_process import disk_use, losses, metrics, tierzero, tierzero_here, train, train_arguments
from pieces import in_slices
from safetensors.torch import load_file

from tierzero.cli.config import load
from tierzero.cli.data import Sampler
from tierzero.cli.decoder import build_decoder, init_decoder
from tierzero.cli.task import DecoderTask, open_task
from tierzero.cli.trainer import schedule, seed_everything

SUMMARY_KEYS = {
    *("steps", "first_loss", "last_loss", "params", "param_bytes", "state_bytes", "device_budget", "device_peak"),
    *("host_budget", "rss_before", "rss_peak", "nvme_read", "nvme_written", "nvme_read_expected"),
    *("nvme_written_expected", "step_s", "tokens_per_s"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole run and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = tierzero(*train_arguments(out))
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_summary(finished: tuple[Path, str]) -> None:
    out, _ = finished
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS
    assert summary["steps"] == 12
    assert summary["device_peak"] <= summary["device_budget"]
    assert summary["params"] * 2 == summary["param_bytes"]
    assert summary["params"] * 12 <= summary["state_bytes"]
    assert (summary["first_loss"], summary["last_loss"]) == (losses(out)[0], losses(out)[-1])
    for link in ("nvme_read", "nvme_written"):
        assert abs(summary[link] - summary[f"{link}_expected"]) <= 0.02 * summary[f"{link}_expected"]
    slack = summary["host_budget"] + summary["device_budget"] + summary["activation_bytes"] + (300 << 20)
    assert summary["rss_peak"] <= summary["rss_before"] + slack


def test_metrics(finished: tuple[Path, str]) -> None:
    lines = metrics(finished[0])
    assert len(lines) == 12
    for line in lines:
        assert set(line["stalls"]) == {"fetch", "update", "gradient", "activation"}
        assert set(line["bytes"]) == {"nvme_read", "nvme_written", "h2d", "d2h"}
        assert line["grad_norm_clipped"] <= min(1.0, line["grad_norm"])
        assert line["lr"] > 0


def test_output(finished: tuple[Path, str]) -> None:
    """The placement before the first step, a line per step, the sample and the summary after the last."""
    out, text = finished
    table, _, rest = text.partition("step 1/12")
    for word in ("parameters", "optimizer states", "gradients", "device", "host", "NVMe", "free"):
        assert word in table, word
    assert "step 12/12  loss " in rest
    assert "sample" in rest
    assert "summary" in rest
    assert (out / "sample.txt").read_text().startswith("def ")
    assert list((out / "tensorboard").iterdir())
    (note,) = (out / "checkpoints").iterdir()
    assert note.name == "step-00000012.json"
    assert json.loads(note.read_text())["store"] == str((out / "store").resolve())


def test_export_loads_strictly(finished: tuple[Path, str]) -> None:
    out, _ = finished
    task = DecoderTask(load(None, ["model.preset=tiny"]))
    model = build_decoder(task.shape, "cpu")
    weights = {}
    for path in sorted((out / "export").glob("*.safetensors")):
        weights |= load_file(path)
    model.load_state_dict(weights, strict=True)
    assert all(parameter.dtype == torch.bfloat16 for parameter in weights.values())
    assert json.loads((out / "export" / "config.json").read_text())["model_type"] == "llama"


def plain_run(*settings: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same training as a plain loop: losses, norms and last parameters."""
    config = load(None, settings)
    task = open_task(config)
    assert isinstance(task, DecoderTask)
    dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
    model = build_decoder(task.shape, "cpu", dtype, config.train.recompute and config.train.micro_batches == 1)
    in_slices(model, model.model.layers, config.train.micro_batches)
    seed_everything(config.train.seed)
    init_decoder(model)
    params = list(model.parameters())
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in params]
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": config.train.weight_decay},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(config))
    sampler = Sampler(task.corpus, config.data.sequence, config.data.batch, config.train.seed)
    seen, norms = [], []
    for step in range(config.train.steps):
        parts = []
        for micro in range(config.train.accumulate):
            loss = task.loss(model, sampler(step, micro)) / config.train.accumulate
            loss.backward()
            parts.append(loss.detach())
        for parameter, master in zip(params, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(masters, config.train.clip or float("inf"))
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for parameter, master in zip(params, masters, strict=True):
                parameter.copy_(master)
        seen.append(float(torch.stack(parts).sum()))
        norms.append(float(norm))
    return seen, norms, model.state_dict()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["train.dtype=float32", "train.accumulate=3", "train.clip=0", "train.steps=6"],
        ["train.recompute=false", "train.accumulate=2", "tiers.prefetch=0", "train.seed=9", "train.steps=6"],
        ["train.micro_batches=2", "data.batch=3", "train.dtype=float32", "train.steps=3", "train.steps=6"],
    ],
    ids=["default", "fp32-accumulate-noclip", "no-recompute-no-prefetch", "micro-batches"],
)
def test_losses_norms_and_weights_are_those_of_plain_pytorch(settings: list[str], tmp_path: Path) -> None:
    from cli_process import TINY

    done = train(tmp_path / "out", *settings)
    assert done.returncode == 0, done.stderr
    expected, norms, weights = plain_run(*TINY, *settings)
    assert losses(tmp_path / "out") == expected
    assert [line["grad_norm"] for line in metrics(tmp_path / "out")] == norms
    exported = {}
    for path in (tmp_path / "out" / "export").glob("*.safetensors"):
        exported |= load_file(path)
    assert set(exported) == set(weights)
    for name, value in weights.items():
        assert torch.equal(exported[name], value), name


def test_dry_run_prints_the_table_and_writes_nothing(tmp_path: Path) -> None:
    done = train(tmp_path / "out", flags=("--dry-run",))
    assert done.returncode == 0
    assert "optimizer states" in done.stdout
    assert not list(tmp_path.iterdir())


def test_dry_run_warns_of_a_host_budget_above_the_memory(tmp_path: Path) -> None:
    """A host budget above the memory that there is: offload warns of it, and the dry run in the same words."""
    huge = ("tiers.host=64TiB", "tiers.activations=32TiB")
    done = train(tmp_path / "out", *huge, flags=("--dry-run",))
    assert done.returncode == 0
    (told,) = [line for line in done.stderr.splitlines() if "the host budget lets the model use" in line]
    assert told.startswith("warning: ")
    assert not list(tmp_path.iterdir())


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    done = train(tmp_path / "out", "train.steps=2", flags=("--quiet",))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_run_is_not_mixed_with_another_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train(out, "train.steps=2").returncode == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    refused = train(out, "train.steps=2")
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    assert "--overwrite" in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    used = disk_use(out)
    (out / "mine.txt").write_text("not the run's")
    again = train(out, "train.steps=1", "train.seed=3", flags=("--overwrite",))
    assert again.returncode == 0, again.stderr
    assert len(losses(out)) == 1
    assert (out / "mine.txt").exists()
    assert disk_use(out) <= used + (64 << 10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["tiers.host=1KiB"], "the smallest host budget that works is"),
        (["tiers.device=1KiB"], "the smallest device budget that works is"),
        (["tiers.nvme={tmp}/file"], "{tmp}/file"),
        (["tiers.nvme={tmp}/file/deeper"], "{tmp}/file"),
        (["train.out={tmp}/file/deeper"], "{tmp}/file"),
        (["tiers.nvme=/proc/tierzero"], "/proc/tierzero"),
        (["data.path={tmp}/file"], "fewer than data.sequence + 1"),
    ],
)
def test_what_cannot_work_is_said(settings: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("short")
    done = train(tmp_path / "out", *(setting.format(tmp=tmp_path) for setting in settings))
    assert done.returncode in (1, 2)
    assert said.format(tmp=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())
    assert (tmp_path / "file").read_text() == "short"


def test_a_store_that_is_in_use_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train(out, "train.steps=1").returncode == 0
    with (out / "store" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for flag in ("--resume", "--overwrite"):
            done = train(out, "train.steps=2", flags=(flag,))
            assert done.returncode == 1
            assert "held by a living process" in done.stderr
    assert len(losses(out)) == 1
    assert (out / "summary.json").exists()


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_manifest_is_said_and_kept(damage: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train(out, "train.steps=1").returncode == 0
    manifest = out / "store" / "manifest.json"
    text = manifest.read_bytes()
    broken = text[: len(text) // 2] if damage == "truncate" else text.replace(b'"step":1', b'"step":2', 1)
    assert broken != text
    manifest.write_bytes(broken)
    done = train(out, "train.steps=2", flags=("--resume",))
    assert done.returncode == 1
    assert str(manifest) in done.stderr
    assert "Traceback" not in done.stderr
    assert manifest.read_bytes() == broken
    manifest.write_bytes(text)
    assert train(out, "train.steps=2", flags=("--resume",)).returncode == 0


def test_a_damaged_record_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train(out, "train.steps=1").returncode == 0
    (data,) = (path for path in (out / "store").iterdir() if path.suffix == ".bin")
    size = data.stat().st_size
    with data.open("r+b") as file:
        for offset in range(0, size, 4096):
            file.seek(offset + 100)
            byte = file.read(1)
            file.seek(offset + 100)
            file.write(bytes([byte[0] ^ 0x40]))
    done = train(out, "train.steps=3", flags=("--resume",))
    assert done.returncode == 1
    assert "checksum" in done.stderr
    assert "Traceback" not in done.stderr


def test_token_ids(tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "ids.npy", (np.arange(5000) ** 2 % 97).astype(np.uint16))
    done = train(tmp_path / "out", f"data.path={tmp_path / 'ids.npy'}", "model.vocab=97", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert all(0 <= int(token) < 97 for token in (tmp_path / "out" / "sample.txt").read_text().split())


def test_a_configuration_file(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("to be or not to be, that is the question. " * 50)
    toml = tmp_path / "run.toml"
    toml.write_text(f'[data]\npath = "{text}"\n[train]\nsteps = 99\n')
    arguments = train_arguments(tmp_path / "out", "train.steps=2")
    done = tierzero_here("train", str(toml), *arguments[1:])
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "out")) == 2
    assert (tmp_path / "out" / "sample.txt").read_text().startswith("to be or not to ")


def test_an_error_of_the_system_names_its_path() -> None:
    from tierzero.errors import describe

    assert describe(OSError(errno.ENOSPC, "No space left", "/x")) == f"/x: No space left [errno {errno.ENOSPC}]"
    assert describe(OSError(errno.EIO, "cannot read /x", "/x")) == f"cannot read /x [errno {errno.EIO}]"


def test_the_store_of_another_program_is_never_given_up(tmp_path: Path) -> None:
    """Its snapshot is named, no advice leads to losing it, and --overwrite does not remove it."""
    import torch

    import tierzero as tz

    store = tmp_path / "store"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    tz.offload(model, tz.Tiers(nvme=store, host="64MiB", device="1MiB", compute="cpu"))
    optimizer = tz.AdamW(model.parameters())
    tz.snapshot(model, optimizer, name="mine")
    tz.close(model)
    before = (store / "manifest.json").read_bytes()
    for flags, said in (
        ((), "already holds a store"),
        (("--resume",), "go on with it"),
        (("--overwrite",), "runs only"),
    ):
        done = train(tmp_path / "out", f"tiers.nvme={store}", flags=flags)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "'mine'" in done.stderr
        assert str(store) in done.stderr
        assert ("tiers.nvme=DIR" in done.stderr) == (flags != ("--resume",))
        assert (store / "manifest.json").read_bytes() == before
        assert not (tmp_path / "out").exists()


def test_a_store_of_a_run_elsewhere(tmp_path: Path) -> None:
    """The advice is about the store where only that is taken, and each of its parts works."""
    short = ("train.steps=2", "train.save_every=2", f"tiers.nvme={tmp_path / 'store'}")
    assert train(tmp_path / "first", *short).returncode == 0
    done = train(tmp_path / "second", *short)
    assert done.returncode == 2
    assert str(tmp_path / "store") in done.stderr
    assert "tiers.nvme=DIR" in done.stderr
    for flags in ((), ("--resume",), ("--overwrite",)):
        done = train(tmp_path / "second", *short, flags=flags)
        assert done.returncode == 2
        assert f"the run in {tmp_path / 'first'}" in done.stderr
    shutil.rmtree(tmp_path / "first")
    for flags in (("--resume",), ("--overwrite",)):
        done = train(tmp_path / "second", *short, flags=flags)
        assert done.returncode == 0, done.stderr


def test_a_directory_in_the_place_of_a_file(tmp_path: Path) -> None:
    """No run makes it: it is named, and stays."""
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "out" / "metrics.jsonl" / "mine").touch()
    done = train(tmp_path / "out", flags=("--overwrite",))
    assert done.returncode == 2
    assert "metrics.jsonl is a directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "metrics.jsonl" / "mine").exists()


@pytest.mark.parametrize("case", ["beside an empty one", "part of a striped one", "damaged", "its keys", "in export"])
def test_overwrite_gives_up_nothing_of_others(case: str, tmp_path: Path) -> None:
    """Whatever state the store of another program is in."""
    import torch

    import tierzero as tz

    out, store = tmp_path / "out", tmp_path / "store"
    if case == "in export":
        store = out / "export" / "deep"
    places = [store, tmp_path / "second"] if case == "part of a striped one" else [store]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    tz.offload(model, tz.Tiers(nvme=places, host="64MiB", device="1MiB", compute="cpu"))
    meta = {}
    if case == "its keys":
        meta = {"model": {}, "random": None, "step": "one", "scheduler": [], "settings": {}, "text": "x"}
    tz.snapshot(model, tz.AdamW(model.parameters()), name="mine", meta=meta)
    tz.close(model)
    if case == "damaged":
        manifest = store / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"mine", b"nine", 1))
    before = {path: path.read_bytes() for place in places for path in place.iterdir() if path.name != "lock"}
    chosen = {"beside an empty one": f'tiers.nvme=["{store}", "{tmp_path / "empty"}"]', "in export": "train.seed=0"}
    for flags in (("--overwrite",), ("--resume",)):
        done = train(out, chosen.get(case, f"tiers.nvme={store}"), flags=flags)
        assert done.returncode in (1, 2), (flags, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert {path: path.read_bytes() for path in before} == before
