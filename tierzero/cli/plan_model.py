"""What `tierzero plan` plans: a model on the meta device and how it is trained, from a configuration, a Hugging Face
config, or three numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierzero.autograd.microbatch import check_count
from tierzero.cli.config import Config, load
from tierzero.cli.decoder import BlankWeights, DecoderConfig, build_decoder
from tierzero.cli.hf import import_transformers, recompute_activations
from tierzero.cli.task import DTYPES, activation_bytes
from tierzero.errors import ConfigError

VOCAB = 32_000  # of a model given by its parameters, unless told


@dataclass
class Subject:
    """hidden, layers, ffn, vocab: of its shape, for activations. tokens: of a micro-batch. states: options of the
    optimizer, as `plan` takes them. config: what it is from, if that was a file for `tierzero train`.
    """

    what: str
    model: nn.Module
    dtype: str
    tokens: int
    hidden: int
    layers: int
    ffn: int
    vocab: int
    piece: int = 0  # tokens of the largest piece in which layers run it; 0: all of them
    micro_batches: int = 1
    accumulate: int = 1
    recompute: bool = True
    clip: bool = True
    overlap: str = "auto"
    states: dict[str, Any] = field(default_factory=dict)
    config: Config | None = None

    @property
    def activations(self) -> int:
        """Bytes on the compute device, estimated as `tierzero train` does."""
        width = DTYPES[self.dtype].itemsize
        shape = (self.layers, self.hidden, self.ffn, self.vocab)
        return activation_bytes(self.tokens, width, self.recompute, *shape, piece=self.piece or self.tokens)

    def cut(self, pieces: int, batch: int | None = None) -> None:
        """Have layers run their batch in so many pieces. batch: its samples, which pieces do not cut."""
        check_count(pieces)
        whole = batch or self.tokens
        self.micro_batches, self.piece = pieces, -(-whole // pieces) * self.tokens // whole


def from_toml(path: Path, settings: list[str], dtype: str | None, tokens: int | None) -> Subject:
    """What `tierzero train` would train with this file."""
    from tierzero.cli.trainer import state_options  # what else training needs takes its time to load

    config = load(path, settings)
    train = config.train
    chosen = dtype or train.dtype
    count = tokens or config.data.batch * config.data.sequence
    if config.model.path is not None:
        subject = from_hugging_face(config.model.path, chosen, count, train.recompute)
    else:
        shape = DecoderConfig(**config.shape, vocab=config.model.vocab or 256)
        subject = _decoder(shape, chosen, count, train.recompute)
    subject.accumulate, subject.clip, subject.overlap = train.accumulate, train.clip > 0, train.overlap
    subject.cut(train.micro_batches, config.data.batch if tokens is None else None)
    subject.states = state_options(config)
    subject.config = config
    return subject


def from_hugging_face(path: Path, dtype: str, tokens: int, recompute: bool = True) -> Subject:
    """The model of a config.json, or of a directory that holds one; weights and tokenizer need not be there."""
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise ConfigError(f"{path} does not exist: name a Hugging Face directory, a config.json or a CONFIG.toml")
    if path.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"there is no {path if path.suffix == '.json' else path / 'config.json'}: name a config.json")
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"), BlankWeights():
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    except Exception as error:  # transformers raises many kinds; their first line says what is missing
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"the model of {path} cannot be built: {reason}") from error
    if recompute and getattr(model, "supports_gradient_checkpointing", False):
        recompute_activations(model)
    text = config.get_text_config()
    hidden = int(getattr(text, "hidden_size", 0))
    kind = ", ".join(config.architectures or [config.model_type])
    return Subject(
        f"{path} ({kind})",
        model,
        dtype,
        tokens,
        hidden,
        int(getattr(text, "num_hidden_layers", 1)),
        int(getattr(text, "intermediate_size", None) or 4 * hidden),
        int(text.vocab_size),
        recompute=recompute,
    )


def from_numbers(params: float, layers: int, hidden: int, vocab: int, dtype: str, tokens: int) -> Subject:
    """A decoder of about `params` parameters: its feed-forward blocks have what the rest leaves. ConfigError if that is
    nothing.
    """
    if min(params, layers, hidden, vocab) < 1 or hidden % 2:
        raise ConfigError(
            f"--params {params:g} --layers {layers} --hidden {hidden} --vocab {vocab}: give numbers above zero, and an "
            "even hidden size"
        )
    inner = (params - (2 * vocab + 1) * hidden) / layers - 4 * hidden**2 - 2 * hidden
    ffn = round(inner / (3 * hidden))
    if ffn < 1:
        least = (2 * vocab + 1) * hidden + layers * (4 * hidden**2 + 5 * hidden)
        raise ConfigError(
            f"--params {params:g} is too few for {layers} layers of {hidden} features and a vocabulary of {vocab}, "
            f"which have {least:.3g} at least: give fewer layers, a smaller --hidden or a smaller --vocab"
        )
    heads = next(heads for heads in range(max(1, hidden // 128), 0, -1) if hidden % (2 * heads) == 0)
    shape = DecoderConfig(hidden=hidden, layers=layers, heads=heads, vocab=vocab, ffn=ffn)
    return _decoder(shape, dtype, tokens, True)


def _decoder(shape: DecoderConfig, dtype: str, tokens: int, recompute: bool) -> Subject:
    return Subject(
        f"a decoder of {shape.layers} layers, hidden {shape.hidden}",
        build_decoder(shape, "meta", DTYPES[dtype], recompute),
        dtype,
        tokens,
        shape.hidden,
        shape.layers,
        shape.ffn_size,
        shape.vocab,
        recompute=recompute,
    )
