"""Hugging Face model directories: built without values, with the model's own tokenizer. No network."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from tierzero.cli.config import Config
from tierzero.cli.data import TokenCorpus, standard_library, text_files
from tierzero.cli.files import write_atomically
from tierzero.cli.task import DTYPES, activation_estimate
from tierzero.errors import ConfigError

_PIECE = 1 << 20  # characters tokenised at a time


class HuggingFaceTask:
    """A causal language model from `folder`, on the text files of data.path."""

    def __init__(self, config: Config, folder: Path) -> None:
        check_folder(folder)
        self.transformers = import_transformers()
        self.config = config
        self.folder = folder
        self.hf_config = self._load(self.transformers.AutoConfig, "config.json")
        self.tokenizer = self._load(self.transformers.AutoTokenizer, "the tokenizer")
        text = self.hf_config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None)
        if longest is not None and config.data.sequence > longest:
            raise ConfigError(
                f"data.sequence is {config.data.sequence}, more than the {longest} positions of the model in {folder}"
            )
        hidden = int(getattr(text, "hidden_size", 0))
        self.activation_bytes = activation_estimate(
            config,
            int(getattr(text, "num_hidden_layers", 1)),
            hidden,
            int(getattr(text, "intermediate_size", None) or 4 * hidden),
            int(text.vocab_size),
        )
        self._corpus: TokenCorpus | None = None

    @property
    def corpus(self) -> TokenCorpus:
        """Tokenised at the first use, which writes the cache in train.out."""
        if self._corpus is None:
            path = self.config.data.path
            files = standard_library() if path is None else text_files(path)
            self._corpus = tokenise(self.tokenizer, files, self.config.train.out, str(path or "the standard library"))
        return self._corpus

    def describe(self) -> str:
        return f"{self.folder} ({', '.join(self.hf_config.architectures or [self.hf_config.model_type])})"

    def build(self) -> nn.Module:
        dtype = DTYPES[self.config.train.dtype]
        import tierzero as tz

        with tz.parameters_on_meta():
            model: nn.Module = self.transformers.AutoModelForCausalLM.from_config(self.hf_config, dtype=dtype)
        model.config.use_cache = False  # type: ignore[union-attr]
        if self.config.checkpoints_layers and getattr(model, "supports_gradient_checkpointing", False):
            recompute_activations(model)
        return model.train()

    def fill(self, model: nn.Module) -> None:
        import tierzero as tz

        tz.load(model, self.folder)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        out: Tensor = model(input_ids=tokens, labels=tokens).loss
        return out

    def next_logits(self, model: nn.Module, tokens: Tensor, last: int) -> Tensor:
        out: Tensor = model(input_ids=tokens).logits[0, last]
        return out

    def prompt(self) -> list[int]:
        return [int(token) for token in self.corpus.window(0, min(16, len(self.corpus)))]

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def export_files(self, folder: Path) -> None:
        """config.json, tokenizer and the like, as they are in the model's directory; no weights."""
        for path in sorted(self.folder.iterdir()):
            weights = path.suffix in {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}
            if path.is_file() and not weights and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)

    def _load(self, kind: Any, what: str) -> Any:
        try:
            return kind.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # transformers raises many kinds; their first line says what is missing
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(f"{what} of the model in {self.folder} cannot be loaded: {reason}") from error


def check_folder(folder: Path) -> None:
    """ConfigError naming what a model directory lacks."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: name the directory of a Hugging Face model")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{folder} has no *.safetensors files; weights in other formats are not read: "
            "save the model with save_pretrained(..., safe_serialization=True)"
        )


def recompute_activations(model: Any) -> None:
    """Turn the model's own activation checkpointing on, by the name that its version of transformers has for it."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def import_transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on disk: no request leaves the machine
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"model.path needs transformers ({error}): pip install 'tierzero[hf]'") from None


def tokenise(tokenizer: Any, files: list[Path], out: Path, name: str) -> TokenCorpus:
    """The tokens of `files`, from a memory-mapped cache `out`/tokens-*.u32 that is made when it is not there."""
    cache = out / f"tokens-{_key(tokenizer, files)}.u32"
    if not cache.exists():
        out.mkdir(parents=True, exist_ok=True)
        fresh = cache.with_suffix(".new")
        with fresh.open("wb") as file:
            for path in files:
                for tokens in _encode(tokenizer, path):
                    file.write(np.asarray(tokens, dtype=np.uint32).tobytes())
        os.replace(fresh, cache)
        write_atomically(cache.with_suffix(".txt"), "".join(f"{path}\n" for path in files))
    if cache.stat().st_size == 0:
        raise ConfigError(f"there is no text in {name}: give data.path a text file or a directory of text files")
    return TokenCorpus(np.memmap(cache, dtype=np.uint32, mode="r"), name, len(tokenizer))


def _encode(tokenizer: Any, path: Path) -> Iterator[list[int]]:
    """Tokens of a file in pieces of whole lines, an end-of-text token last."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        while lines := file.readlines(_PIECE):
            yield tokenizer("".join(lines), add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        yield [tokenizer.eos_token_id]


def _key(tokenizer: Any, files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{type(tokenizer).__name__} {len(tokenizer)} {tokenizer.eos_token_id}\n".encode())
    probe = "def f(x):\n    return 'naïve 数' + str(x)  # 12.5%\n"
    digest.update(str(tokenizer(probe, add_special_tokens=False)["input_ids"]).encode())
    for path in files:
        stat = path.stat()
        digest.update(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
