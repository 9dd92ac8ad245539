"""Hugging Face and PEFT: weights in and out by their own ways and by ours, the same bits."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import HYPER, Plain, Tiered, assert_same, same, tiered, tiers_for, train_both
from torch import nn

import tierzero as tz
from tierzero.checkpoint.weights import load_weights
from tierzero.units.paged import Paged

transformers = pytest.importorskip("transformers")

VOCAB = 24
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "use_cache": False,
}


def llama_config(tied: bool = False) -> Any:
    return transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied)


def gpt2_config() -> Any:
    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2Config(**sizes, use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)


CONFIGS = {"llama": llama_config, "tied": lambda: llama_config(True), "gpt2": gpt2_config}
KINDS = {"llama": "LlamaForCausalLM", "tied": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}


def build(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return getattr(transformers, KINDS[kind])(CONFIGS[kind]()).train()


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


@pytest.fixture(params=list(CONFIGS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_from_pretrained_then_offload(kind: str, tmp_path: Path) -> None:
    """With real from_pretrained; and the same weights streamed into a model without values."""
    build(kind).to(torch.bfloat16).save_pretrained(tmp_path / "saved", max_shard_size="4KB")
    load = getattr(transformers, KINDS[kind]).from_pretrained
    plain = Plain(load(tmp_path / "saved", dtype=torch.bfloat16).train())
    model = load(tmp_path / "saved", dtype=torch.bfloat16).train()
    with tz.parameters_on_meta():
        blank = getattr(transformers, KINDS[kind])._from_config(CONFIGS[kind](), dtype=torch.bfloat16).train()
    with (
        tiered(model, tiers_for(model, "nvme", tmp_path / "one")) as one,
        tiered(blank, tiers_for(blank, "nvme", tmp_path / "two")) as two,
    ):
        load_weights(blank, tmp_path / "saved")
        train_both([("from_pretrained", one), ("load", two)], plain, 2, loss=loss)
        assert_same(one, plain)
        assert_same(two, plain)


def test_out_by_every_way(kind: str, tmp_path: Path) -> None:
    """state_dict, torch.save and save_pretrained give real tensors; export loads through from_pretrained with nothing
    missing or left over, and has the trained model's loss to the bit (S7).
    """
    plain = Plain(build(kind).to(torch.bfloat16))
    model = build(kind).to(torch.bfloat16)
    ids = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(2))
    cls = getattr(transformers, KINDS[kind])
    with tiered(model, tiers_for(model, "nvme", tmp_path / "store")) as run:
        train_both([("", run)], plain, 2, loss=loss)
        expected = loss(plain.model, ids)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        model.save_pretrained(tmp_path / "saved", max_shard_size="4KB")
        tz.export(model, tmp_path / "out", max_shard="4KB")
        model.config.save_pretrained(tmp_path / "out")
        fresh = cls(CONFIGS[kind]()).to(torch.bfloat16).train()
        for state in (torch.load(buffer), copy.deepcopy(model.state_dict())):
            assert not any(isinstance(value, Paged) for value in state.values())
            fresh.load_state_dict(state, strict=True)
            assert same(loss(fresh, ids), expected)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    for folder in ("saved", "out"):
        back, said = cls.from_pretrained(tmp_path / folder, dtype=torch.bfloat16, output_loading_info=True)
        assert not any(said.values()), said
        assert same(loss(back.train(), ids), expected)
        assert all(same(a, b) for a, b in zip(back.parameters(), plain.model.parameters(), strict=True))


def test_base_models_and_heads(tmp_path: Path) -> None:
    """A model with a head takes the weights of one without, and the other way round, as from_pretrained does."""
    whole = build("llama")
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "base")
    with tz.parameters_on_meta():
        headless, headed = transformers.LlamaModel(llama_config()), transformers.LlamaForCausalLM(llama_config())
    with tiered(headless, tiers_for(headless, "nvme", tmp_path / "one")):
        assert load_weights(headless, tmp_path / "whole", strict=False).missing == []
        assert all(same(a.read(), b) for a, b in zip(headless.parameters(), whole.model.parameters(), strict=True))
    with tiered(headed, tiers_for(headed, "nvme", tmp_path / "two")):
        with pytest.raises(tz.TierzeroError, match=r"missing lm_head\.weight"):
            load_weights(headed, tmp_path / "base")
        assert load_weights(headed, tmp_path / "base", strict=False).missing == ["lm_head.weight"]


@pytest.mark.parametrize("in_place", [False, True])
def test_peft(in_place: bool, tmp_path: Path) -> None:
    """Adapters over a frozen base that was read from its checkpoint: nothing of the base is written (M15, P12)."""
    peft = pytest.importorskip("peft")
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)

    def wrap(base: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(base, config).train()

    cls = transformers.LlamaForCausalLM
    plain = Plain(wrap(cls.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)))
    loaded = wrap(cls.from_pretrained(tmp_path / "base", dtype=torch.bfloat16))
    with tz.parameters_on_meta():
        blank = cls._from_config(llama_config(), dtype=torch.bfloat16)
    blank = wrap(blank)
    adapters = {name: value for name, value in plain.model.state_dict().items() if "lora_" in name}
    model = tz.offload(blank, tiers_for(blank, "nvme", tmp_path / "two"))
    try:
        result = load_weights(model, tmp_path / "base", strict=False, in_place=in_place)
        assert all("lora_" in name for name in result.missing)
        assert result.unexpected == []
        model.load_state_dict(adapters, strict=False)
        before = tz.stats(model)["nvme_written_expected"]
        with tiered(loaded, tiers_for(loaded, "nvme", tmp_path / "one")) as one:
            optimizer = tz.AdamW([p for p in model.parameters() if p.requires_grad], **HYPER)
            two = Tiered.__new__(Tiered)
            two.model, two.optimizer = model, optimizer
            train_both([("from_pretrained", one), ("load", two)], plain, 2, loss=loss)
            assert_same(one, plain)
            assert_same(two, plain)
        if in_place:
            trained = sum(p.numel() for p in plain.model.parameters() if p.requires_grad)
            assert before < 64 << 10
            assert tz.stats(model)["nvme_written_expected"] - before < 100 * (trained + 4096 * 14)
            tz.snapshot(model, optimizer, "a")
    finally:
        tz.close(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Those of `plain.apply(plain._init_weights)` under one seed; buffers are the plain model's own (C23)."""
    cls = getattr(transformers, KINDS[kind])
    plain = cls._from_config(CONFIGS[kind](), dtype=dtype).train()
    torch.manual_seed(4)
    plain.apply(plain._init_weights)
    with tz.parameters_on_meta():
        model = cls._from_config(CONFIGS[kind](), dtype=dtype).train()
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        torch.manual_seed(4)
        tz.initialize(model, model._init_weights)
        assert all(same(a.read(), b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        buffers = dict(plain.named_buffers())
        assert all(same(value, buffers[name]) for name, value in model.named_buffers())
        ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
        assert same(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferred_values(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Those of the plain model, built under the same seed; the generator goes on in the same place."""
    cls = getattr(transformers, KINDS[kind])
    torch.manual_seed(4)
    plain = cls._from_config(CONFIGS[kind](), dtype=dtype).train()
    after = torch.get_rng_state()
    torch.manual_seed(4)
    with tz.deferred_init():
        model = cls._from_config(CONFIGS[kind](), dtype=dtype).train()
    assert torch.equal(after, torch.get_rng_state())
    assert all(param.is_meta for param in model.parameters())
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        tz.initialize(model)
        assert all(same(a.read(), b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        buffers = dict(plain.named_buffers())
        assert all(same(value, buffers[name]) for name, value in model.named_buffers())
