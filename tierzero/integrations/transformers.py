"""transformers.Trainer on an offloaded model: TierzeroTrainer(model=model, args=args, tiers=tz.Tiers(...), ...)."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

import tierzero as tz
from tierzero.errors import ConfigError, TierzeroError
from tierzero.optim.base import TieredOptimizer
from tierzero.optim.clip import place_of

try:
    from transformers import Trainer
    from transformers.trainer_utils import sort_checkpoints
except ImportError as error:
    raise ImportError("TierzeroTrainer needs transformers and accelerate: pip install 'tierzero[trainer]'") from error

_STATE = "tierzero"  # the directory in a checkpoint that training goes on from
_REFUSED = {  # TrainingArguments that cannot work, and what to do instead
    "deepspeed": "it would keep the same parameters and states as tierzero: leave it out, or use Trainer",
    "fsdp": "it would keep the same parameters and states as tierzero: leave it out, or use Trainer",
    "parallelism_config": "tierzero trains on one device: leave it out",
    "fp16": 'load the model with dtype="bfloat16", its master weights stay float32',
    "fp16_full_eval": "an offloaded model keeps its dtype: load it in the one that you want",
    "bf16_full_eval": "an offloaded model keeps its dtype: load it in the one that you want",
    "torch_compile": "a compiled graph would see parameters that are paged out: compile the model's blocks instead",
}


class TierzeroTrainer(Trainer):
    """Trainer whose model lies in `tiers`. Everything else is as in Trainer, and so are losses and weights, bit for bit
    (a 16-bit model trains on float32 masters).

    The model is offloaded here and never moved; with `tiers` None it was offloaded before. The optimizer is
    tierzero.AdamW with Trainer's groups and hyper-parameters, or what `optimizers` or `optimizer_cls_and_kwargs` name:
    tierzero.AdamW with other options, or what tierzero.wrap_optimizer made. A checkpoint is Trainer's, with a directory
    `tierzero` (see tierzero.save) instead of optimizer.pt. Close the model with tierzero.close(trainer.model).

    Raises ConfigError for arguments that cannot work on an offloaded model.
    """

    model: Any

    def __init__(self, *args: Any, tiers: tz.Tiers | None = None, micro_batches: int = 1, **kwargs: Any) -> None:
        self.tiers = tiers
        self.saving: tz.Saving | None = None
        if tiers is not None and not isinstance(tiers, tz.Tiers):
            raise TypeError(f"tiers must be a tierzero.Tiers, got {type(tiers).__name__}")
        super().__init__(*args, **kwargs)
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            self.get_optimizer_cls_and_kwargs(self.args, self.model)  # what cannot work shows before anything is moved
        if tiers is not None:
            compute = str(self.args.device) if tiers.compute == "auto" else tiers.compute
            tz.offload(self.model, replace(tiers, compute=compute), micro_batches=micro_batches)

    def create_accelerator_and_postprocess(self) -> None:
        """The first thing that Trainer does: refuses what cannot work, and has Accelerate move nothing."""
        for name, instead in _REFUSED.items():
            if getattr(self.args, name, None):
                raise ConfigError(f"TrainingArguments({name}=...) does not work with TierzeroTrainer: {instead}")
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise ConfigError("TierzeroTrainer trains on one device: show it one GPU with CUDA_VISIBLE_DEVICES")
        if self.model is None:
            raise ConfigError("TierzeroTrainer takes model=, not model_init=, which would build models while it trains")
        if self.tiers is None and not any(place_of(param) is not None for param in self.model.parameters()):
            raise ConfigError("TierzeroTrainer needs tiers=tierzero.Tiers(...), or a model that is offloaded already")
        device = self.args.device if self.tiers is None or self.tiers.compute == "auto" else self.tiers.compute_device()
        if device.type != self.args.device.type:
            raise ConfigError(f"the tiers compute on {device} and the trainer on {self.args.device}: name one device")
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Nowhere: parameters come as they are used."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """tierzero.AdamW with the hyper-parameters of `args`; ConfigError for an `optim` that is not AdamW."""
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if kind is not torch.optim.AdamW:
            raise ConfigError(
                f'optim="{args.optim.value}" has no offloaded form: use "adamw_torch" or pass optimizers='
            )
        return tz.AdamW, options

    def create_optimizer(self, model: Any = None) -> Any:
        """As Trainer's; ConfigError for an optimizer that was not made for an offloaded model."""
        super().create_optimizer(model)
        self.tiered = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's wrapper, when trained again
        if not isinstance(self.tiered, TieredOptimizer):
            kind = type(self.tiered).__name__
            raise ConfigError(f"{kind} cannot step an offloaded model: use tierzero.AdamW or tierzero.wrap_optimizer")
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As Trainer's; before the last micro-batch of a step, nothing of the step begins."""
        with nullcontext() if self.accelerator.sync_gradients else tz.no_sync(self.model):
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            return loss

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return tz.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return tz.clip_grad_norm_(model.parameters(), float("inf")) if grad_norm is None else grad_norm

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; True resumes from the last checkpoint that is whole."""
        if resume_from_checkpoint is True:
            there = sort_checkpoints(str(self.args.output_dir))
            whole = [path for path in there if os.path.isdir(os.path.join(path, _STATE))]
            resume_from_checkpoint = whole[-1] if whole else True
        done = super().train(resume_from_checkpoint, *args, **kwargs)
        if self.saving is not None:
            self.saving.result()
        return done

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The directory that Trainer writes, one tensor in memory at a time; of a PEFT model the adapter."""
        where, adapter = output_dir or str(self.args.output_dir), hasattr(self.model, "peft_config")
        params = self.model.named_parameters(remove_duplicate=False) if adapter else ()
        super()._save(where, {name: param.detach().clone() for name, param in params if param.requires_grad})
        if not adapter:
            tz.export(self.model, where, overwrite=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        wait = self.args.save_total_limit is not None  # older checkpoints are removed next
        options: dict[str, Any] = {"states": {"scheduler": self.lr_scheduler}, "meta": {"step": self.state.global_step}}
        path = os.path.join(output_dir, _STATE)
        self.saving = tz.save(self.model, path, self.tiered, **options, random=False, overwrite=True, wait=wait)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not os.path.isdir(os.path.join(resume_from_checkpoint, _STATE)):  # Trainer's own
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        state = os.path.join(checkpoint or "", _STATE)
        if checkpoint is None or os.path.isfile(os.path.join(checkpoint, "optimizer.pt")):
            super()._load_optimizer_and_scheduler(checkpoint)
        elif os.path.isdir(state):
            tz.load(self.model, state, self.tiered, states={"scheduler": self.lr_scheduler}, random=False)
        else:
            raise TierzeroError(f"{checkpoint} was not saved whole: there is no {_STATE} in it. Use the one before it")
