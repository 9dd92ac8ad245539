"""Checkpoints of a run: what goes into the store's snapshot beside the tensors, and a note on disk for people.

The tensors are in the store; its manifest alone decides what can be resumed. The notes in `<out>/checkpoints` tell
which snapshot is there, and nothing reads them back.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from tierzero.cli.config import Config
from tierzero.cli.files import write_json
from tierzero.errors import ConfigError


def snapshot_name(step: int) -> str:
    return f"step-{step:08d}"


def random_state() -> dict[str, Any]:
    """The state of every random generator of the process, as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [kind, base64.b64encode(np.asarray(keys).tobytes()).decode(), position, has_gauss, cached],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [_encode(one) for one in torch.cuda.get_rng_state_all()]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(_decode(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([_decode(one) for one in state["cuda"]])


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def model_identity(config: Config) -> dict[str, Any]:
    """The settings that decide which tensors there are; they cannot change between a run and its continuation."""
    if config.model.path is not None:
        return {"model.path": str(config.model.path.resolve()), "train.dtype": config.train.dtype}
    shape = {f"model.{key}": value for key, value in config.shape.items()}
    return shape | {"model.vocab": config.model.vocab or 256, "train.dtype": config.train.dtype}


def loop_settings(config: Config) -> dict[str, Any]:
    """The settings that decide the losses of a given model; changing them is allowed, and said."""
    return {
        "data.path": str(config.data.path.resolve()) if config.data.path else None,
        "data.sequence": config.data.sequence,
        "data.batch": config.data.batch,
        "train.steps": config.train.steps,
        "train.lr": config.lr,
        "train.warmup": config.warmup,
        "train.weight_decay": config.train.weight_decay,
        "train.clip": config.train.clip,
        "train.accumulate": config.train.accumulate,
        "train.micro_batches": config.train.micro_batches,
        "train.seed": config.train.seed,
    }


def check_same_model(saved: dict[str, Any], config: Config) -> None:
    """ConfigError naming every setting under which the checkpoint would not fit the model."""
    now = model_identity(config)
    wrong = [
        f"{key} is {now.get(key)} and was {saved.get(key)}"
        for key in dict.fromkeys([*saved, *now])
        if saved.get(key) != now.get(key)
    ]
    if wrong:
        raise ConfigError(
            f"the checkpoint in {config.train.out} is of another model: {'; '.join(wrong)}. "
            "Set it back to go on, or start another run with another train.out"
        )


def changes(saved: dict[str, Any], config: Config) -> list[str]:
    """What is set otherwise than at the checkpoint: `train.steps 60 -> 90`."""
    now = loop_settings(config)
    return [f"{key} {saved.get(key)} -> {value}" for key, value in now.items() if saved.get(key) != value]


def write_note(config: Config, step: int, loss: float | None) -> None:
    """`checkpoints/step-NNNNNNNN.json` for the snapshot just committed; notes of earlier ones are removed."""
    folder = config.train.out / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / f"{snapshot_name(step)}.json"
    write_json(
        note,
        {
            "snapshot": snapshot_name(step),
            "store": str(config.store.resolve()),
            "step": step,
            "loss": loss,
            "model": model_identity(config),
            "settings": loop_settings(config),
            "resume": "tierzero train --resume with the same configuration",
        },
    )
    for old in folder.glob("step-*.json"):
        if old != note:
            old.unlink()
