"""The built-in decoder as a plain torch module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tierzero.cli.config import load
from tierzero.cli.decoder import Decoder, DecoderConfig, build_decoder, init_decoder
from tierzero.cli.task import DecoderTask

SMALL = DecoderConfig(hidden=32, layers=3, heads=4, vocab=61)


def small(dtype: torch.dtype = torch.float32, recompute: bool = False) -> Decoder:
    torch.manual_seed(5)
    model = build_decoder(SMALL, "cpu", dtype, recompute)
    init_decoder(model)
    return model


def tokens(batch: int = 2, time: int = 12) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab, (batch, time), generator=torch.Generator().manual_seed(1))


def test_the_default_has_at_least_100_million_parameters() -> None:
    config = load(None)
    model = DecoderTask(config).build()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) >= 100_000_000
    assert not list(model.buffers())  # nothing whose value the meta device would lose


def test_every_module_with_parameters_can_initialise_them() -> None:
    for module in build_decoder(SMALL).modules():
        if list(module.parameters(recurse=False)):
            assert callable(module.reset_parameters)


def test_initial_values_follow_the_seed_and_module_order() -> None:
    one, two = small(), small()
    for (name, first), second in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(first, second), name
    torch.manual_seed(5)
    assert torch.equal(one.model.embed_tokens.weight, torch.empty(61, 32).normal_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputing_activations_changes_no_bit(dtype: torch.dtype) -> None:
    plain, recomputed = small(dtype), small(dtype, recompute=True)
    batch = tokens()
    losses = [model(batch[:, :-1], batch[:, 1:]) for model in (plain, recomputed)]
    assert losses[0].dtype == torch.float32
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for first, second in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)  # type: ignore[arg-type]


def test_forward_is_deterministic_and_causal() -> None:
    model, batch = small(), tokens()
    with torch.no_grad():
        logits = model(batch)
        assert logits.shape == (2, 12, SMALL.vocab)
        assert torch.equal(logits, model(batch))
        changed = batch.clone()
        changed[:, 7:] = 0
        torch.testing.assert_close(model(changed)[:, :7], logits[:, :7])
        assert not torch.equal(model(changed)[:, 7:], logits[:, 7:])


def test_rotary_tables_are_fp32_and_grow() -> None:
    model = small(torch.bfloat16)
    short = model.model.rope(5, torch.device("cpu"))[0]
    long = model.model.rope(9, torch.device("cpu"))[0]
    assert short.dtype == torch.float32
    assert torch.equal(short, long[:5])
    assert not any("rope" in name or "table" in name for name in model.state_dict())


def test_shapes() -> None:
    assert DecoderConfig(hidden=512).ffn_size == 1408
    assert DecoderConfig(hidden=512, ffn=77).ffn_size == 77
    model = build_decoder(DecoderConfig(hidden=512, layers=2, heads=8))
    per_layer = 4 * 512**2 + 3 * 512 * 1408 + 2 * 512
    assert sum(p.numel() for p in model.parameters()) == 2 * per_layer + 2 * 256 * 512 + 512


def test_it_learns() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = tokens()
    losses = []
    for _ in range(15):
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_the_config_of_an_export_describes_it(tmp_path: Path) -> None:
    task = DecoderTask(load(None, ["model.preset=tiny", "data.sequence=48"]))
    task.export_files(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["hidden_size"] == 64
    assert written["max_position_embeddings"] == 48
    assert DecoderConfig(**written["tierzero"]) == task.shape


def test_the_export_loads_as_llama(tmp_path: Path) -> None:
    """Names and arithmetic are those of transformers' Llama, where that is installed."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SMALL.llama_config(32, torch.float32))
    model = small()
    llama = transformers.LlamaForCausalLM(config)
    llama.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(llama(tokens()).logits, model(tokens()), rtol=1e-4, atol=1e-5)
