"""Tiny Hugging Face models built from their configurations, and batches for them: nothing is downloaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import nn

Batch = dict[str, Any]
VOCAB = 48
ROWS, LENGTH = 2, 8
WIDTH = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**WIDTH, "num_key_value_heads": 1, "use_cache": False}
IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 3}
VISION = {key: value for key, value in WIDTH.items() if key.startswith(("hidden", "inter", "num"))} | IMAGE


@dataclass
class Case:
    """A model, and what it is called with: `batch(generator)` gives its arguments, floats in float32."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any], torch.Tensor] = lambda out: out.loss


def seed(value: int) -> None:
    """Seed every generator that models draw from: layer drop and masking use Python's and numpy's."""
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """The model `name` in training mode, with reproducible values: its biases and norms are not zero and one."""
    seed(0)
    model = CASES[name].build(**options)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim < 2:
                param.add_(torch.randn_like(param) * 0.02)
    return model.to(dtype).train()


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point tensors in `dtype`."""
    return {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }


def tokens(generator: torch.Generator, length: int = LENGTH, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(3, VOCAB - 1, (rows, length), generator=generator)


def padded(generator: torch.Generator) -> Batch:
    """Token ids, the last row shorter."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[-1, -2:] = 0
    return {"input_ids": tokens(generator), "attention_mask": mask}


def language(generator: torch.Generator) -> Batch:
    batch = padded(generator)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def translated(generator: torch.Generator) -> Batch:
    return {**padded(generator), "labels": tokens(generator, 5)}


def pictures(generator: torch.Generator, size: int = 8) -> torch.Tensor:
    return torch.randn(ROWS, 3, size, size, generator=generator)


def classified(generator: torch.Generator) -> Batch:
    return {"pixel_values": pictures(generator), "labels": torch.randint(0, 2, (ROWS,), generator=generator)}


def captioned(generator: torch.Generator) -> Batch:
    return {"pixel_values": pictures(generator), "labels": tokens(generator, 5)}


def paired(generator: torch.Generator) -> Batch:
    batch = padded(generator)
    batch["input_ids"][:, -1] = VOCAB - 1
    return {**batch, "pixel_values": pictures(generator), "return_loss": True}


def spoken(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(ROWS, 8, 16, generator=generator), "labels": tokens(generator, 5)}


def sounded(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(ROWS, 160, generator=generator), "labels": tokens(generator, 3)}


def looked_at(generator: torch.Generator) -> Batch:
    """A picture of 4 patches in front of the text."""
    batch = language(generator)
    batch["input_ids"][:, :4] = VOCAB - 1
    return {**batch, "pixel_values": pictures(generator)}


def detected(generator: torch.Generator) -> Batch:
    labels = [
        {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4, generator=generator) / 2 + 0.2}
        for _ in range(ROWS)
    ]
    return {"pixel_values": pictures(generator, 32), "labels": labels}


def llama(tied: bool = False, **more: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=tied, attention_dropout=0.1, **more))


def gpt2(**more: Any) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    return hf.GPT2LMHeadModel(config)


def mixtral(**more: Any) -> nn.Module:
    config = hf.MixtralConfig(**DECODER, num_local_experts=4, output_router_logits=True, attention_dropout=0.1, **more)
    return hf.MixtralForCausalLM(config)


def deepseek(**more: Any) -> nn.Module:
    config = hf.DeepseekV3Config(
        **{**DECODER, "num_key_value_heads": 2, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2},
        topk_group=1,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        **more,
    )
    return hf.DeepseekV3ForCausalLM(config)


def bert(**more: Any) -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**WIDTH, **more))


def albert(**more: Any) -> nn.Module:
    config = {**WIDTH, "num_hidden_layers": 12, "embedding_size": 8, "hidden_dropout_prob": 0.1}
    return hf.AlbertForMaskedLM(hf.AlbertConfig(**config, **more))


def t5(**more: Any) -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
        tie_word_embeddings=True,
        **more,
    )
    return hf.T5ForConditionalGeneration(config)


def vit(**more: Any) -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**VISION, hidden_dropout_prob=0.1, **more))


def whisper(**more: Any) -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=8,
        max_target_positions=16,
        dropout=0.1,
        encoder_layerdrop=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **more,
    )
    return hf.WhisperForConditionalGeneration(config)


def lora_llama(**options: Any) -> nn.Module:
    """A frozen Llama with trained adapters; `options` go to LoraConfig."""
    import peft

    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1, **options}
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.05)  # at zero, its partner has no gradient
    return model  # type: ignore[no-any-return]


def clip(**more: Any) -> nn.Module:
    text = {**WIDTH, "eos_token_id": VOCAB - 1, "attention_dropout": 0.1}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8, **more))


def wav2vec2(**more: Any) -> nn.Module:
    config = hf.Wav2Vec2Config(
        **{key: value for key, value in WIDTH.items() if not key.startswith("max")},
        conv_dim=(8, 8),
        conv_kernel=(5, 3),
        conv_stride=(4, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.2,
        mask_time_length=2,
        mask_time_prob=0.3,
        mask_time_min_masks=1,
        feat_extract_norm="layer",
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        **more,
    )
    return hf.Wav2Vec2ForCTC(config)


def llava(**more: Any) -> nn.Module:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION),
        text_config=hf.LlamaConfig(**DECODER, attention_dropout=0.1),
        image_token_index=VOCAB - 1,
        **more,
    )
    return hf.LlavaForConditionalGeneration(config)


def blip(**more: Any) -> nn.Module:
    text = {**WIDTH, "encoder_hidden_size": 16, "projection_dim": 8, "sep_token_id": 3, "use_cache": False}
    return hf.BlipForConditionalGeneration(
        hf.BlipConfig(text_config=text, vision_config=VISION, projection_dim=8, image_text_hidden_size=8, **more)
    )


def captioner(**more: Any) -> nn.Module:
    """Two models in one, the decoder reading the encoder's states."""
    decoder = hf.BertConfig(**WIDTH, is_decoder=True, add_cross_attention=True, use_cache=False)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(**VISION), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return hf.VisionEncoderDecoderModel(config=config)


def mamba(**more: Any) -> nn.Module:
    config = {key: WIDTH[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    return hf.MambaForCausalLM(hf.MambaConfig(**config, state_size=4, time_step_rank=2, use_cache=False, **more))


def rwkv(**more: Any) -> nn.Module:
    config = {key: WIDTH[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
    return hf.RwkvForCausalLM(hf.RwkvConfig(**config, attention_hidden_size=16, use_cache=False, **more))


def detr(**more: Any) -> nn.Module:
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        num_queries=4,
        backbone_config=hf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"),
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        auxiliary_loss=True,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_labels=3,
        **more,
    )
    return hf.DetrForObjectDetection(config)


CASES: dict[str, Case] = {
    "llama": Case(llama, language),
    "llama tied": Case(lambda **more: llama(tied=True, **more), language),
    "gpt2": Case(gpt2, language),
    "mixtral": Case(mixtral, language),
    "deepseek": Case(deepseek, language),
    "bert": Case(bert, language),
    "albert": Case(albert, language),
    "t5": Case(t5, translated),
    "vit": Case(vit, classified),
    "whisper": Case(whisper, spoken),
    "lora llama": Case(lora_llama, language),
    "clip": Case(clip, paired),
    "wav2vec2": Case(wav2vec2, sounded),
    "llava": Case(llava, looked_at),
    "blip": Case(blip, lambda g: {**language(g), "pixel_values": pictures(g)}),
    "vision encoder-decoder": Case(captioner, captioned),
    "mamba": Case(mamba, lambda g: {"input_ids": (ids := tokens(g)), "labels": ids}),
    "rwkv": Case(rwkv, lambda g: {"input_ids": (ids := tokens(g)), "labels": ids}),
    "detr": Case(detr, detected),
}
