"""Checkpoints of a run: what goes into the store's snapshot beside the tensors, and a note on disk for people.

The tensors are in the store; its manifest alone decides what can be resumed. The notes in `<out>/checkpoints` tell
which snapshot is there, and nothing reads them back.
"""

from __future__ import annotations

from typing import Any

from tierzero.cli.config import Config
from tierzero.cli.files import write_json
from tierzero.errors import ConfigError


def snapshot_name(step: int) -> str:
    return f"step-{step:08d}"


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
