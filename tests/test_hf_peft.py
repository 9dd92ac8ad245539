"""Adapters over a frozen Hugging Face model: bit for bit as in plain PyTorch, and nothing is kept or moved for what is
frozen but its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Plain, assert_same, same, tiered, tiers_for
from torch import nn

import tierzero as tz

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from hf_models import CASES, bert, build, llama, lora_llama, seed, t5  # noqa: E402
from hf_training import generators_kept, train_equal  # noqa: E402
from safetensors.torch import load_file, save_file, save_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("loaded", "one_thread", "no_leaks")


@pytest.fixture(scope="module")
def loaded() -> Iterator[None]:
    """What the libraries start when a model class is first used stays."""
    with generators_kept():
        for name in ("llama", "lora llama", "bert", "t5"):
            build(name)
        yield


def prompted(kind: str) -> nn.Module:
    """Llama frozen under trained virtual tokens."""
    configs = {
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"),
        "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "ia3": peft.IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    }
    model = llama()
    model.config.use_cache = kind == "prefix"
    return peft.get_peft_model(model, configs[kind])  # type: ignore[no-any-return]


def adapted(model: nn.Module, targets: list[str], kind: str) -> nn.Module:
    """LoRA on another architecture."""
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type=kind))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rank-stabilised": (lambda: lora_llama(use_rslora=True), "llama"),
    "dora": (lambda: lora_llama(use_dora=True), "llama"),
    "modules to save": (lambda: lora_llama(modules_to_save=["lm_head", "norm"]), "llama"),
    "biases": (lambda: adapted(bert(), ["query", "value"], "FEATURE_EXTRACTION"), "bert"),
    "embeddings": (lambda: lora_llama(target_modules=["embed_tokens", "q_proj"]), "llama"),
    "all linear": (lambda: lora_llama(target_modules="all-linear"), "llama"),
    "t5": (lambda: adapted(t5(), ["q", "v", "wo"], "SEQ_2_SEQ_LM"), "t5"),
    "prompt": (lambda: prompted("prompt"), "llama"),
    "p-tuning": (lambda: prompted("p-tuning"), "llama"),
    "prefix": (lambda: prompted("prefix"), "llama"),
    "ia3": (lambda: prompted("ia3"), "llama"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_adapters(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every kind of adapter, on NVMe."""
    factory, like = MODELS[name]
    seed(0)
    model = factory().to(dtype).train()
    offloaded = copy.deepcopy(model)
    with tiered(offloaded, tiers_for(offloaded, "nvme", tmp_path)) as run:
        losses = train_equal([("nvme", run)], Plain(model), CASES[like], dtype, steps=3)
        assert len(set(map(float, losses))) > 1


def test_frozen_weights_cost_their_bytes_alone(tmp_path: Path) -> None:
    """No gradient, no state and no write for what is frozen; a step writes as much as the plan says (M15)."""
    model = build("lora llama", torch.bfloat16)
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    tiers = tiers_for(model, "nvme", tmp_path)
    plan = tz.plan(model, tiers)
    assert plan.trainable == trainable < plan.params // 4
    with tiered(model, tiers, overlap="deferred") as run:
        base = {name: param.read() for name, param in model.named_parameters() if not param.requires_grad}
        before = tz.stats(model)
        train_equal([("nvme", run)], Plain(build("lora llama", torch.bfloat16)), CASES["lora llama"], torch.bfloat16)
        after = tz.stats(model)
        assert after["d2h"] - before["d2h"] == 10 * 2 * trainable  # ten backwards, two bytes each
        assert after["nvme_written"] - before["nvme_written"] == 5 * plan.step_nvme_written
        assert set(run.optimizer.state) <= {param for param in model.parameters() if param.requires_grad}
        for name, param in model.named_parameters():
            if name in base:
                assert same(param.read(), base[name])  # type: ignore[operator]
                assert param.grad is None


def test_merged_and_taken_apart(tmp_path: Path) -> None:
    """`merge_adapter` inside `unsharded(write=True)` changes the base, `unmerge_adapter` changes it back as in plain
    PyTorch, and training goes on.
    """
    model = build("lora llama")
    offloaded = copy.deepcopy(model)
    case = CASES["lora llama"]
    with tiered(offloaded, tiers_for(offloaded, "nvme", tmp_path, spare=1 << 16)) as run:
        plain = Plain(model)
        train_equal([("nvme", run)], plain, case, torch.float32, steps=2)
        for change in ("merge_adapter", "unmerge_adapter"):
            getattr(model, change)()
            with tz.unsharded(offloaded, write=True):
                getattr(offloaded, change)()
            assert_same(run, plain, change)
            ids = torch.arange(3, 11)[None]
            with torch.no_grad():
                outs = [each.eval()(input_ids=ids).logits for each in (model, offloaded)]
            assert same(*outs)
            for each in (model, offloaded):
                each.train()
        train_equal([("nvme", run)], plain, case, torch.float32, steps=2, base=2)


def test_only_the_adapter_is_saved(tmp_path: Path) -> None:
    """`save_pretrained` writes the adapter's values as they are, and a fresh model loads them; safetensors writes
    `state_dict()`, again after a step, and refuses parameters with a sentence.
    """
    model = build("lora llama")
    offloaded = copy.deepcopy(model)
    with tiered(offloaded, tiers_for(offloaded, "nvme", tmp_path / "store")) as run:
        plain = Plain(model)
        state = offloaded.state_dict()
        for step in range(2):
            train_equal([("nvme", run)], plain, CASES["lora llama"], torch.float32, steps=1, base=step)
            offloaded.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
            save_file(state, tmp_path / "all.safetensors")
            save_model(offloaded, str(tmp_path / "model.safetensors"))
            for name in ("all", "model"):
                written = load_file(tmp_path / f"{name}.safetensors")
                assert written.keys() == state.keys()
                assert all(same(value, model.state_dict()[key]) for key, value in written.items())
        with pytest.raises(tz.TierzeroError, match=r"embed_tokens\.weight has no memory.*state_dict\(\).*export"):
            save_file(dict(offloaded.named_parameters()), tmp_path / "parameters.safetensors")
    seed(0)
    loaded: Any = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    found = {name: value for name, value in loaded.state_dict().items() if "lora_" in name}
    assert found
    assert all(same(value, model.state_dict()[name]) for name, value in found.items())
