"""Random inputs for any Hugging Face model, from the names of its forward's parameters: several to try in turn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from hf_models import Batch
from torch import nn
from transformers import PreTrainedConfig

ROWS, LENGTH = 2, 8
_LANGUAGE = ("CausalLM", "LMHead", "MaskedLM", "PreTraining", "ConditionalGeneration", "Seq2SeqLM", "DoubleHeads")
_ONE_LABEL = ("SequenceClassification", "ImageClassification", "AudioClassification", "VideoClassification", "XVector")
Make = Callable[[torch.Generator], Batch]


def find(config: PreTrainedConfig, *names: str, deep: bool = True) -> Any:
    """The first of `names` that the configuration, or one inside it, has a value for; else None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for inner in vars(config).values() if deep else ():
        if isinstance(inner, PreTrainedConfig):
            value = find(inner, *names)
            if value is not None:
                return value
    return None


def candidates(model: nn.Module) -> Iterator[tuple[str, Make]]:
    """Names and makers of batches that may suit the model, the fullest first."""
    config: PreTrainedConfig = model.config
    params = inspect.signature(model.forward).parameters
    kind = type(model).__name__
    main = getattr(model, "main_input_name", "input_ids")
    bases: list[tuple[str, Make]] = []
    if "image_grid_thw" in params and "input_ids" in params:
        bases.append(("text and patches", partial(_text_and_patches, config)))
    if "grid_thw" in params:
        bases.append(("patches", partial(_patches, config, next(iter(params)), "grid_thw")))
    if "input_ids" in params and "input_features" in params and main == "input_ids":
        shapes = audio_shapes(config, "input_features")
        bases += [(f"text and sound {shape}", partial(_text_and_sound, config, params, shape)) for shape in shapes]
    if "input_ids" in params and "pixel_values" in params:
        counts = image_tokens(model)
        bases += [(f"text and picture ({count} tokens)", partial(_both, model, count)) for count in counts]
    for name in ("pixel_values", "pixel_values_videos", "input_features", "input_values", "audio_values", "waveform"):
        if name in params and ("input_ids" not in params or main == name):
            shapes = pixel_shapes(config) if name.startswith("pixel") else audio_shapes(config, name)
            bases += [(f"{name} {shape}", partial(_floats, name, shape)) for shape in shapes]
    if "input_ids" in params:
        bases.append(("text", lambda g: _text(config, params, g)))
        bases.append(("text of 64", lambda g: _text(config, params, g, 64)))
    for name in ("query_embeds", "inputs_embeds", "hidden_states"):
        if name in params and "input_ids" not in params:
            shape = (ROWS, LENGTH, int(find(config, "hidden_size", "d_model", "embed_dim", "hidden_dim") or 32))
            bases.append((f"{name} {shape}", partial(_floats, name, shape)))
    if "past_values" in params:
        bases.append(("series", lambda g: _series(config, params, g)))
    for name, base in bases:
        for what, more in labels(kind, config, params):
            yield f"{name}{what}", partial(_with, base, more, params)


def labels(kind: str, config: PreTrainedConfig, params: Any) -> Iterator[tuple[str, Any]]:
    """Names and makers of what goes with a batch: targets first, at last only what a forward cannot do without."""
    classes = int(getattr(config, "num_labels", 2) or 2)
    vocabulary = int(find(config, "vocab_size") or 2)
    decodes = "decoder_input_ids" in params and getattr(config, "is_encoder_decoder", True)
    decoder = {"decoder_input_ids": lambda b, g: torch.randint(3, min(vocabulary, 100), (ROWS, 5), generator=g)}
    if "labels" in params:
        if any(part in kind for part in _ONE_LABEL) or kind.endswith("NextSentencePrediction"):
            yield ", classes", {"labels": lambda b, g: torch.randint(0, classes, (ROWS,), generator=g)}
        if kind.endswith("MultipleChoice"):
            yield ", choices", {"labels": lambda b, g: torch.randint(0, 2, (ROWS,), generator=g), "choices": 2}
        if kind.endswith("TokenClassification"):
            yield ", classes", {"labels": lambda b, g: torch.randint(0, classes, b["input_ids"].shape, generator=g)}
        if decodes or kind.endswith(("CTC", "SpeechSeq2Seq", "RNNT", "EncoderDecoderModel")):
            yield ", labels", {"labels": lambda b, g: torch.randint(3, min(vocabulary, 30), (ROWS, 3), generator=g)}
        if any(part in kind for part in _LANGUAGE) and "input_ids" in params:
            yield ", labels", {"labels": lambda b, g: b["input_ids"].clone()}
        if kind.endswith("SemanticSegmentation"):
            yield ", maps", {"labels": lambda b, g: torch.randint(0, classes, _plane(b), generator=g)}
        if kind.endswith("ObjectDetection"):
            yield ", boxes", {"labels": _boxes}
    if "start_positions" in params and "end_positions" in params:
        place: Any = lambda b, g: torch.randint(0, 4, (ROWS,), generator=g)
        yield ", spans", {"start_positions": place, "end_positions": place}
    if "return_loss" in params:
        yield ", contrastive", {"return_loss": lambda b, g: True}
    if decodes:
        yield ", decoder", decoder
    yield "", {}


def image_tokens(model: nn.Module) -> list[int]:
    """How many tokens of its text a model may want for a picture; 0 for a model that keeps them apart."""
    config: PreTrainedConfig = model.config
    found: list[int] = []
    if find(config, "image_token_id", "image_token_index") is not None and hasattr(model, "get_image_features"):
        for shape in pixel_shapes(config)[:1]:
            try:
                with torch.no_grad():
                    out = model.get_image_features(pixel_values=torch.randn(*shape))
            except Exception:  # whatever it is, it takes no pictures of this kind
                continue
            out = getattr(out, "pooler_output", out)
            out = (
                torch.cat([each.reshape(-1, each.shape[-1]) for each in out]) if isinstance(out, list | tuple) else out
            )
            if isinstance(out, torch.Tensor):
                found.append(out.numel() // out.shape[-1] // ROWS)
    return [*found, 0]


def pixel_shapes(config: PreTrainedConfig) -> list[tuple[int, ...]]:
    """Shapes of pictures, then of videos."""
    size = find(config, "image_size", "img_size", "resolution", "crop_size", "input_size") or 64
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = find(config, "num_channels", "in_channels", "in_chans", "num_input_channels")
    channels = channels if isinstance(channels, int) else 3
    frames = find(config, "num_frames", "frames_per_clip") or 2
    picture = (channels, int(height), int(width))
    return [(ROWS, *picture), (ROWS, int(frames), *picture), (ROWS, 3, 64, 64), (ROWS, 3, 224, 224)]


def audio_shapes(config: PreTrainedConfig, name: str) -> list[tuple[int, ...]]:
    """Shapes of spectrograms, or of waves."""
    if name == "input_features":
        bins = find(
            config,
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "input_dim",
        )
        bins = int(bins or 80)
        length = find(config, "max_source_positions")
        frames = 2 * int(length) if length else 64
        return [(ROWS, bins, frames), (ROWS, 64, bins), (ROWS, bins, 3000), (ROWS, 1, 1024, bins)]
    bins, frames = find(config, "num_mel_bins"), find(config, "max_length")
    spectrum = [(ROWS, int(frames), int(bins))] if bins and frames else []
    return [*spectrum, (ROWS, 1600), (ROWS, 1, 1920), (ROWS, 16000), (ROWS, 64, int(bins or 80))]


def _with(base: Make, more: Any, params: Any, generator: torch.Generator) -> Batch:
    batch = {key: value for key, value in base(generator).items() if key in params}
    choices = more.get("choices")
    if choices:
        batch = {key: value[:, None].repeat(1, choices, *[1] * (value.ndim - 1)) for key, value in batch.items()}
    return {**batch, **{key: make(batch, generator) for key, make in more.items() if key != "choices"}}


def _randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _text(config: PreTrainedConfig, params: Any, generator: torch.Generator, length: int = LENGTH) -> Batch:
    top = min(int(find(config, "vocab_size") or 100), 100)
    batch: Batch = {"input_ids": torch.randint(min(3, top - 1), top, (ROWS, length), generator=generator)}
    if "attention_mask" in params:
        batch["attention_mask"] = torch.ones(ROWS, length, dtype=torch.long)
    if "bbox" in params:
        batch["bbox"] = torch.zeros(ROWS, length, 4, dtype=torch.long)
    return batch


def _floats(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Batch:
    return {name: _randn(generator, *shape)}


def _both(model: nn.Module, count: int, generator: torch.Generator) -> Batch:
    config: PreTrainedConfig = model.config
    params = inspect.signature(model.forward).parameters
    batch = _text(config, params, generator, LENGTH + count)
    if count:
        batch["input_ids"][:, 1 : 1 + count] = find(config, "image_token_id", "image_token_index")
        if "mm_token_type_ids" in params:
            batch["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
            batch["mm_token_type_ids"][:, 1 : 1 + count] = 1
        if "token_type_ids" in params:
            batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
            batch["token_type_ids"][:, 1 : 1 + count] = 1
    return {**batch, "pixel_values": _randn(generator, *pixel_shapes(config)[0])}


def _patches(config: PreTrainedConfig, name: str, grid: str, generator: torch.Generator) -> Batch:
    """Pictures of 4 x 4 patches, flattened, and how many there are in time, height and width."""
    patch, times = int(find(config, "patch_size") or 14), int(find(config, "temporal_patch_size") or 1)
    channels = int(find(config, "in_channels", "num_channels", "in_chans") or 3)
    values = _randn(generator, ROWS * 16, channels * times * patch * patch)
    return {name: values, grid: torch.tensor([[1, 4, 4]] * ROWS)}


def _text_and_patches(config: PreTrainedConfig, generator: torch.Generator) -> Batch:
    batch = _text(config, {"attention_mask": None}, generator, 24)
    count = 16 // int(find(config, "spatial_merge_size", "merge_size") or 1) ** 2
    token, start = find(config, "image_token_id", "image_token_index"), find(config, "vision_start_token_id")
    batch["input_ids"][:, 1] = batch["input_ids"][:, 1] if start is None else start
    batch["input_ids"][:, 2 : 2 + count] = token
    kinds = (batch["input_ids"] == token).long()
    return {**batch, "mm_token_type_ids": kinds, **_patches(config, "pixel_values", "image_grid_thw", generator)}


def _text_and_sound(config: PreTrainedConfig, params: Any, shape: tuple[int, ...], generator: torch.Generator) -> Batch:
    return {**_text(config, params, generator), "input_features": _randn(generator, *shape)}


def _series(config: PreTrainedConfig, params: Any, generator: torch.Generator) -> Batch:
    past = int(find(config, "context_length") or 32) + max(find(config, "lags_sequence") or [0])
    ahead = int(find(config, "prediction_length") or 8)
    inputs = int(find(config, "num_input_channels", "input_size") or 1)
    more = (inputs,) if "num_input_channels" in vars(config) or inputs > 1 else ()
    times = int(find(config, "num_time_features") or 0)
    batch: Batch = {"past_values": _randn(generator, ROWS, past, *more)}
    if "past_observed_mask" in params:
        batch["past_observed_mask"] = torch.ones(ROWS, past, *more)
    if "past_time_features" in params:
        batch["past_time_features"] = _randn(generator, ROWS, past, times)
        batch["future_time_features"] = _randn(generator, ROWS, ahead, times)
    if "future_values" in params:
        batch["future_values"] = _randn(generator, ROWS, ahead, *more)
    return batch


def _plane(batch: Batch) -> tuple[int, ...]:
    shape = batch["pixel_values"].shape
    return (shape[0], *shape[-2:])


def _boxes(batch: Batch, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    return [
        {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4, generator=generator) / 2 + 0.2}
        for _ in range(ROWS)
    ]


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, or else the mean square of everything it gives that has a gradient."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own if own.ndim == 0 else own.mean()
    total = torch.zeros(())
    for leaf in _leaves(output):
        if leaf.is_floating_point() and leaf.requires_grad and leaf.numel():
            total = total + leaf.float().square().mean()
    if not total.requires_grad:
        raise ValueError("nothing that the model gives has a gradient")
    return total


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
