"""What is trained: a model and its text, behind one interface for the built-in decoder and Hugging Face models."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from tierzero.cli.config import Config
from tierzero.cli.data import Corpus, open_text, open_tokens
from tierzero.cli.decoder import DecoderConfig, build_decoder
from tierzero.cli.files import write_json

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Task(Protocol):
    """A model to train on a corpus."""

    activation_bytes: int

    @property
    def corpus(self) -> Corpus:
        """The text as tokens."""
        ...

    def describe(self) -> str:
        """One line for a person."""
        ...

    def build(self) -> nn.Module:
        """The model with its parameters on the meta device, in training mode."""
        ...

    def fill(self, model: nn.Module) -> None:
        """Give an offloaded model its first values, under the current torch seed."""
        ...

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Mean cross entropy (fp32 scalar) of predicting tokens [batch, sequence + 1] from those before."""
        ...

    def next_logits(self, model: nn.Module, tokens: Tensor, last: int) -> Tensor:
        """Logits [vocab] of the token after position `last` of tokens [1, time]; the ones behind it do not matter."""
        ...

    def prompt(self) -> list[int]:
        """Tokens with which the sample starts."""
        ...

    def text(self, tokens: list[int]) -> str:
        """Tokens as text."""
        ...

    def export_files(self, folder: Path) -> None:
        """What the exported weights need beside them: config.json, tokenizer."""
        ...


class DecoderTask:
    """The built-in decoder on bytes, or on the token ids of a .npy file."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.shape = DecoderConfig(**config.shape, vocab=config.model.vocab or 256)
        self.corpus: Corpus = (
            open_tokens(config.data.path, self.shape.vocab)
            if config.token_file and config.data.path
            else open_text(config.data.path)
        )
        self.activation_bytes = activation_estimate(
            config, self.shape.layers, self.shape.hidden, self.shape.ffn_size, self.shape.vocab
        )

    def describe(self) -> str:
        shape = self.shape
        return f"the built-in decoder: {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads"

    def build(self) -> nn.Module:
        train = self.config.train
        return build_decoder(self.shape, "meta", DTYPES[train.dtype], self.config.checkpoints_layers)

    def fill(self, model: nn.Module) -> None:
        import tierzero as tz

        tz.initialize(model)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        out: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        return out

    def next_logits(self, model: nn.Module, tokens: Tensor, last: int) -> Tensor:
        out: Tensor = model(tokens)[0, last]
        return out

    def prompt(self) -> list[int]:
        if self.config.data.path is None:
            return list(b"def ")
        return [int(token) for token in self.corpus.window(0, min(16, len(self.corpus)))]

    def text(self, tokens: list[int]) -> str:
        if self.config.token_file:
            return " ".join(map(str, tokens))
        return bytes(tokens).decode(errors="replace")

    def export_files(self, folder: Path) -> None:
        train = self.config.train
        write_json(folder / "config.json", self.shape.llama_config(self.config.data.sequence, DTYPES[train.dtype]))


def activation_estimate(config: Config, layers: int, hidden: int, ffn: int, vocab: int) -> int:
    """Bytes of activations of a batch of the configuration."""
    data, train = config.data, config.train
    piece = -(-data.batch // train.micro_batches) * data.sequence
    width = DTYPES[train.dtype].itemsize
    return activation_bytes(data.batch * data.sequence, width, train.recompute, layers, hidden, ffn, vocab, piece=piece)


def activation_bytes(
    tokens: int, width: int, recompute: bool, layers: int, hidden: int, ffn: int, vocab: int, *, piece: int
) -> int:
    """What layers keep, a piece of a layer's inside with its gradients, and the logits. `width`: bytes of an element.
    `piece`: tokens of the largest piece in which layers run their batch, all of them without micro-batches.
    """
    inside = tokens * width * (20 * hidden + 4 * ffn)
    kept = layers * (tokens * width * hidden if recompute else inside)
    return kept + 2 * inside * piece // tokens + 3 * 4 * tokens * vocab


def open_task(config: Config) -> Task:
    """The task that a configuration describes; reads headers and file lists, no weights."""
    if config.model.path is None:
        return DecoderTask(config)
    from tierzero.cli.hf import HuggingFaceTask

    return HuggingFaceTask(config, config.model.path)
