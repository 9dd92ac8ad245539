"""Checkpoints of a run: what goes into snapshots and portable checkpoints beside the tensors, and a note on disk.

What can be resumed is decided by the store's manifest and the checkpoints themselves. The note in `<out>/checkpoints`
tells people, and `tierzero ckpt`, where they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierzero.cli.config import Config
from tierzero.cli.files import write_json
from tierzero.errors import ConfigError


def name_of(step: int) -> str:
    """Of the snapshot, or the portable checkpoint, after that many steps."""
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


def check_same_model(saved: dict[str, Any], config: Config, where: Path, *, moved: bool = False) -> None:
    """ConfigError naming every setting under which the checkpoint in `where` would not fit the model. `moved`: the
    model's directory may be another one; whether it holds the same model is seen as the tensors are compared.
    """
    now = model_identity(config)
    wrong = [
        f"{key} is {now.get(key)} and was {saved.get(key)}"
        for key in dict.fromkeys([*saved, *now])
        if saved.get(key) != now.get(key) and not (moved and key == "model.path" and key in saved and key in now)
    ]
    if wrong:
        raise ConfigError(
            f"the checkpoint in {where} is of another model: {'; '.join(wrong)}. "
            "Set it back to go on, or start another run with another train.out"
        )


def changes(saved: dict[str, Any], config: Config) -> list[str]:
    """What is set otherwise than at the checkpoint: `train.steps 60 -> 90`."""
    now = loop_settings(config)
    return [f"{key} {saved.get(key)} -> {value}" for key, value in now.items() if saved.get(key) != value]


def write_note(config: Config, run: str, step: int, loss: float | None) -> None:
    """`checkpoints/step-NNNNNNNN.json` for the snapshot just committed; notes of earlier ones are removed."""
    folder = config.train.out / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / f"{name_of(step)}.json"
    write_json(
        note,
        {
            "snapshot": name_of(step),
            "store": str(config.store.resolve()),
            "run": run,
            "checkpoints": str(config.checkpoint_folder.resolve()),
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
