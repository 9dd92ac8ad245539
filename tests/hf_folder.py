"""A small Hugging Face model with a tokenizer in a directory, as transformers saves them: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = "the quick brown fox jumps over the lazy dog. " * 60


def save_folder(path: Path) -> None:
    """A bfloat16 Llama with tied embeddings, its tokenizer, and text.txt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
