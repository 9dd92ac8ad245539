"""Micro-batches inside the blocks of Hugging Face models: bit by bit the plain loop whose blocks run over slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Plain, assert_same, make, same, tiered, tiers_for
from pieces import in_slices
from torch import nn

import tierzero as tz

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("loaded", "one_thread", "no_leaks")
SMALL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=48, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )


def mixtral(**more: Any) -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4, **more))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**SMALL, "num_key_value_heads": 2}))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "llama": (llama, lambda model: model.model.layers),
    "gpt2 with dropout": (gpt2, lambda model: model.transformer.h),
    "mixtral": (mixtral, lambda model: model.model.layers),
    "bert with dropout": (bert, lambda model: model.bert.encoder.layer),
}


@pytest.fixture(scope="module")
def loaded() -> None:
    """What the library starts when a model class is first used stays."""
    for factory, _ in MODELS.values():
        factory()


def loss_of(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    value: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With and without padding, clipped, in 4 pieces; all gradients and weights."""
    factory, blocks = MODELS[name]
    model, theirs = make(factory, dtype).train(), make(factory, dtype).train()
    model.config.use_cache = theirs.config.use_cache = False  # type: ignore[union-attr]
    fresh = Plain(in_slices(theirs, blocks(theirs), 4))
    generator = torch.Generator().manual_seed(1)
    with tiered(model, tiers_for(model, "nvme", tmp_path, micro_batches=4), micro_batches=4) as run:
        for step in range(3):
            ids = torch.randint(0, 48, (6, 9), generator=generator)
            mask = (torch.arange(9) < torch.tensor([9, 5, 7, 9, 2, 8])[:, None]).long() if step else None
            values = []
            for each in (fresh.model, run.model):
                torch.manual_seed(step)
                values.append(loss_of(each, ids, mask))
                values[-1].backward()
            assert same(*values), f"step {step}"
            assert_same(run, fresh, f"step {step}", grads=True)
            for each in (fresh, run):
                each.step(0.5)  # type: ignore[attr-defined]
                each.zero_grad()  # type: ignore[attr-defined]
        assert_same(run, fresh)


def test_refused(tmp_path: Path) -> None:
    """A key-value cache, and router logits that a hook collects, would get pieces: each has its sentence."""
    ids = torch.arange(24).view(4, 6)
    for factory, match in ((llama, "use_cache=False"), (lambda: mixtral(output_router_logits=True), "router_logits")):
        model = make(factory).train()
        model.config.use_cache = factory is llama  # type: ignore[union-attr]
        with tiered(model, tiers_for(model, "host", tmp_path, micro_batches=4), micro_batches=4) as run:
            with pytest.raises(tz.TierzeroError, match=match):
                loss_of(run.model, ids, None)
            with torch.no_grad():
                loss_of(run.model, ids, None)
