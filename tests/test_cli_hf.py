"""Hugging Face directories: built without values, own tokenizer, the same losses as plain PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_process import losses, metrics, tierzero_here
from torch import nn

from tierzero.cli.config import load
from tierzero.cli.data import Sampler
from tierzero.errors import ConfigError


def test_a_missing_extra_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tierzero.cli.hf import import_transformers

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'tierzero\[hf\]'"):
        import_transformers()


@pytest.mark.parametrize(
    ("present", "said"), [([], "has no config.json"), (["config.json"], r"has no \*.safetensors files")]
)
def test_incomplete_directories_are_said(present: list[str], said: str, tmp_path: Path) -> None:
    from tierzero.cli.hf import check_folder

    for name in present:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=said):
        check_folder(tmp_path)


def test_parameters_go_to_meta_and_buffers_keep_their_values() -> None:
    """C23: what no checkpoint holds must not be lost."""
    from tierzero import parameters_on_meta

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 4)
            self.two.weight = self.one.weight
            self.register_buffer("table", torch.arange(5.0), persistent=False)

    with parameters_on_meta():
        toy = Toy()
    assert all(parameter.is_meta for parameter in toy.parameters())
    assert toy.one.weight is toy.two.weight
    assert len(list(toy.parameters())) == 3
    assert torch.equal(toy.table, torch.arange(5.0))  # type: ignore[arg-type]
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with tied embeddings and a tokenizer, saved as transformers saves them."""
    pytest.importorskip("transformers")
    from hf_folder import save_folder

    path = tmp_path_factory.mktemp("model")
    save_folder(path)
    return path


def settings(folder: Path) -> list[str]:
    return [
        f"model.path={folder}",
        f"data.path={folder / 'text.txt'}",
        "data.sequence=24",
        "data.batch=2",
        "train.steps=5",
        "train.accumulate=1",
        "train.lr=1e-3",
        "train.sample=4",
    ]


def run(folder: Path, out: Path, *more: str, flags: tuple[str, ...] = ()) -> Any:
    chosen = [*settings(folder), f"train.out={out}", *more]
    return tierzero_here("train", *flags, *(word for setting in chosen for word in ("--set", setting)))


def test_losses_are_those_of_plain_pytorch(folder: Path, tmp_path: Path) -> None:
    import transformers

    from tierzero.cli.hf import HuggingFaceTask, recompute_activations
    from tierzero.cli.trainer import schedule

    out = tmp_path / "out"
    done = run(folder, out)
    assert done.returncode == 0, done.stderr

    config = load(None, [*settings(folder), f"train.out={out}"])
    task = HuggingFaceTask(config, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    recompute_activations(model)
    model.config.use_cache = False
    params = list(model.parameters())
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in params]
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": 0.1},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(config))
    sampler = Sampler(task.corpus, 24, 2, 0)
    expected = []
    for step in range(5):
        loss = task.loss(model, sampler(step))
        loss.backward()
        expected.append(loss.item())
        for parameter, master in zip(params, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for parameter, master in zip(params, masters, strict=True):
                parameter.copy_(master)
    assert losses(out) == expected

    again = transformers.AutoModelForCausalLM.from_pretrained(out / "export", dtype=torch.bfloat16)
    for (name, trained), plain in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(trained, plain), name
    assert transformers.AutoTokenizer.from_pretrained(out / "export")("fox")["input_ids"]
    assert json.loads((out / "summary.json").read_text())["params"] == sum(p.numel() for p in params)


def test_resume_finds_the_tokens(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(folder, out, "train.steps=2", "train.warmup=1").returncode == 0
    (cache,) = out.glob("tokens-*.u32")
    written = cache.stat().st_mtime_ns
    done = run(folder, out, "train.steps=4", "train.warmup=1", flags=("--resume",))
    assert done.returncode == 0, done.stderr
    assert cache.stat().st_mtime_ns == written
    assert len(metrics(out)) == 4


@pytest.mark.parametrize(
    ("more", "said"),
    [(["data.sequence=65"], "more than the 64 positions"), (["model.layers=2"], "model.layers has no effect")],
)
def test_settings_that_do_not_fit_the_model(folder: Path, tmp_path: Path, more: list[str], said: str) -> None:
    done = run(folder, tmp_path / "out", *more)
    assert done.returncode == 2
    assert said in done.stderr
