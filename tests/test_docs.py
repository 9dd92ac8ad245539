"""The documentation's code runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(8)]


def test_the_loop_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (source,) = code_blocks(ROOT / "README.md")
    model, plain = build(), build()
    names: dict[str, Any] = {"model": model, "loader": batches(), "loss_fn": F.cross_entropy, "accum": 2}
    exec(source.replace("/mnt/nvme0/tz", str(tmp_path / "store")), names)

    opt = torch.optim.AdamW(plain.parameters(), lr=2e-5, weight_decay=0.1, fused=True)
    for i, (inputs, targets) in enumerate(batches()):
        (F.cross_entropy(plain(inputs), targets) / 2).backward()
        if i % 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, exported[name]) for name, value in plain.state_dict().items())


def test_the_snapshots_of_the_checkpoint_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tierzero as tz

    monkeypatch.chdir(tmp_path)
    snapshot, resume, rollback, *_ = (
        block.replace("/mnt/nvme0/tz", str(tmp_path / "store"))
        for block in code_blocks(ROOT / "docs" / "checkpoint.md")
    )
    model = tz.offload(build(), tz.Tiers(nvme=tmp_path / "store", host="8GiB"))
    opt = tz.AdamW(model.parameters(), lr=2e-5)
    F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
    opt.step()
    sched = torch.optim.lr_scheduler.ConstantLR(opt)
    names: dict[str, Any] = {"tz": tz, "torch": torch, "model": model, "opt": opt, "sched": sched}
    exec(snapshot, names)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    tz.close(model)

    names = {"tz": tz, "torch": torch, "build": build}
    exec(resume, names)
    assert names["meta"]["step"] == 1000
    names["sched"] = torch.optim.lr_scheduler.ConstantLR(names["opt"])
    exec(rollback, names)
    assert names["meta"]["step"] == 1000
    assert all(torch.equal(value.clone(), values[name]) for name, value in names["model"].state_dict().items())
    tz.close(names["model"])


def test_the_portable_checkpoints_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved, loaded under another placement, and read by plain PyTorch as the page says."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    import tierzero as tz

    monkeypatch.chdir(tmp_path)
    save, load, plainly = code_blocks(ROOT / "docs" / "checkpoint.md")[3:6]
    names: dict[str, Any] = {"tz": tz, "dcp": dcp}
    names |= {name: getattr(state_dict, name) for name in dir(state_dict) if name.endswith("_state_dict")}
    values = {}
    for source, tiers in ((save, tz.Tiers(nvme=tmp_path / "store", host="1GiB")), (load, tz.Tiers(host="1GiB"))):
        model = tz.offload(build(), tiers)
        opt = tz.AdamW(model.parameters(), lr=2e-5)
        if source is save:
            F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
            opt.step()
        names |= {"model": model, "opt": opt, "sched": torch.optim.lr_scheduler.ConstantLR(opt)}
        exec(source, names)
        values[source] = {name: value.clone() for name, value in model.state_dict().items()}
        tz.close(model)
    assert names["meta"] == {"step": 1000}
    plain = build()
    exec(plainly, {**names, "plain": plain, "optimizer": torch.optim.AdamW(plain.parameters())})
    for found in (values[load], plain.state_dict()):
        assert all(torch.equal(value, values[save][name]) for name, value in found.items())


def test_the_weights_of_the_checkpoint_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, initialised, exported and read again as the page says."""
    import json

    from safetensors.torch import load_file

    import tierzero as tz

    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    blocks = [
        block.replace("/mnt/nvme0/tz", str(tmp_path / "store"))
        for block in code_blocks(ROOT / "docs" / "checkpoint.md")
    ]
    load, initialise, export, plainly = blocks[-4:]
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=1, tie_word_embeddings=True)
    names: dict[str, Any] = {"tz": tz, "torch": torch, "config": config, "json": json, "load_file": load_file}
    names |= {name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "LlamaForCausalLM")}
    plain = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    plain.save_pretrained("weights")
    exec(load, names)
    exec(export.replace("5GB", "300"), names)
    fresh = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    exec(plainly, {**names, "plain": fresh})
    for model in (fresh, names["again"]):
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    tz.close(names["model"])
    names["tiers"] = tz.Tiers(nvme=tmp_path / "other", host="64MiB")
    exec(initialise, names)
    torch.manual_seed(0)
    built = transformers.LlamaForCausalLM(config)
    pairs = zip(names["model"].parameters(), built.parameters(), strict=True)
    assert all(torch.equal(a.clone(), b) for a, b in pairs)
    tz.close(names["model"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_watching_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    import tierzero as tz

    monkeypatch.chdir(tmp_path)
    model = tz.offload(build(), tz.Tiers(nvme=tmp_path / "store", host="64MiB"))
    opt = tz.AdamW(model.parameters())

    def train_step() -> None:
        F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
        opt.step()
        opt.zero_grad()

    for block in code_blocks(ROOT / "docs" / "observe.md"):
        exec(block.replace("9400", "0"), {"tz": tz, "model": model, "train_step": train_step})
    tz.close(model)
    assert (tmp_path / "trace.json").stat().st_size > 1000


def test_the_optimizers_page(tmp_path: Path) -> None:
    import tierzero as tz

    two, split, scaled = code_blocks(ROOT / "docs" / "optimizers.md")
    model = tz.offload(build(), tz.Tiers(nvme=tmp_path, host="64MiB"))
    names: dict[str, Any] = {"tz": tz, "torch": torch, "model": model, "inputs": batches()[0][0]}
    for line in (*two.splitlines(), split):
        exec(line, names)
        F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
        for optimizer in names.get("optimizers", [names["opt"]]):
            optimizer.step()
        model.zero_grad()
    names["opt"] = names["optimizers"][0]
    exec(scaled, names)
    tz.close(model)


def test_the_trainers_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    from trainers import Tokens
    from trainers import build as llama
    from transformers import LlamaForCausalLM, TrainingArguments

    import tierzero as tz

    monkeypatch.chdir(tmp_path)
    trainer, lightning = (
        block.replace("/mnt/nvme0/tz", str(tmp_path / f"store{index}")).replace("max_steps=20", "max_steps=2")
        for index, block in enumerate(code_blocks(ROOT / "docs" / "integrations.md"))
    )
    names: dict[str, Any] = {"tz": tz, "TrainingArguments": TrainingArguments, "model": llama(), "dataset": Tokens()}
    exec(trainer, names)
    assert LlamaForCausalLM.from_pretrained("runs/mine/model")
    loader = torch.utils.data.DataLoader([(x, y) for x, y in zip(*batches()[0], strict=True)], batch_size=2)
    exec(lightning, {"tz": tz, "F": F, "net": build(), "loader": loader})
    assert (tmp_path / "runs" / "mine" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "mine.ckpt" / "tierzero").is_dir()


def test_the_planning_page() -> None:
    import tierzero as tz

    (source,) = code_blocks(ROOT / "docs" / "plan.md")
    names: dict[str, Any] = {"tierzero": tz, "model": build(), "tiers": tz.Tiers(host="64MiB", compute="cpu")}
    exec(source, names)
    assert names["plan"].fits
    assert names["plan"].forecast.seconds > 0
