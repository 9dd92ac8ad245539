"""Lightning on an offloaded module: pl.Trainer(strategy=TierzeroStrategy(tierzero.Tiers(...)))."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tierzero as tz
from tierzero.checkpoint.randomness import random_state, set_random_state
from tierzero.errors import ConfigError
from tierzero.optim.base import TieredOptimizer
from tierzero.optim.clip import place_of

try:
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError("TierzeroStrategy needs Lightning: pip install 'tierzero[lightning]'") from error

_STATE, _REST = "tierzero", "lightning.ckpt"  # what a checkpoint's directory holds
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")  # they run instead of the module's forward


class _Clips:
    """Clips by the norm of the float32 gradients, exactly."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        tz.clip_grad_norm_(self.main_params(optimizer), clip_val)  # type: ignore[attr-defined]


class _Full(_Clips, Precision):
    pass


class _Half(_Clips, HalfPrecision):
    pass


class _Mixed(_Clips, MixedPrecision):
    clip_gradients = (
        Precision.clip_gradients
    )  # Lightning's refuses optimizers that could unscale; bfloat16 has no scale


class TierzeroStrategy(SingleDeviceStrategy):
    """One device, with the LightningModule's parameters in `tiers`.

    `configure_optimizers` returns tierzero.AdamW (or what tierzero.wrap_optimizer made); everything else stays as it
    is, and so do losses and weights, bit for bit. Precision: "32-true", "bf16-true" (on float32 masters) and
    "bf16-mixed". A checkpoint is a directory: what tierzero.save writes, random generators included, and Lightning's
    own file. After training the module is still offloaded: export it, then close it with tierzero.close(module).

    Raises ConfigError for an optimizer or a precision that cannot work on an offloaded model.
    """

    strategy_name = "tierzero"
    restore_checkpoint_after_setup = True  # into the tiers

    def __init__(self, tiers: tz.Tiers, *, micro_batches: int = 1, **kwargs: Any) -> None:
        super().__init__(device=tiers.compute_device(), **kwargs)
        self.tiers, self.micro_batches = tiers, micro_batches
        self.stepping = False  # inside optimizer_step, whose backward is the last one of the step
        self.loading: Path | None = None
        self.random: Any = None

    @property
    def precision_plugin(self) -> Any:
        """Lightning's own, with tierzero's clipping."""
        return self._precision_plugin or _Full()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        kinds = {"32-true": _Full, "bf16-true": lambda: _Half("bf16-true")}
        kinds |= {"bf16-mixed": lambda: _Mixed("bf16-mixed", plugin.device)}
        if plugin is not None and plugin.precision not in kinds:
            raise ConfigError(f'precision="{plugin.precision}" does not work in tiers: use one of {", ".join(kinds)}')
        self._precision_plugin = None if plugin is None else kinds[plugin.precision]()

    def setup(self, trainer: Any) -> None:
        """As Lightning's, but nothing is moved: parameters come to the device as they are used."""
        self.accelerator.setup(trainer)
        if not any(place_of(param) is not None for param in self.model.parameters()):
            tz.offload(self.precision_plugin.convert_module(self.model), self.tiers, micro_batches=self.micro_batches)
        for name in _STEPS:
            if name not in vars(self.model):
                tz.register_forward_method(self.model, name)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        for one in self.optimizers:
            if not isinstance(one, TieredOptimizer):
                kind = f"{type(one).__name__} of configure_optimizers"
                raise ConfigError(
                    f"{kind} cannot step an offloaded model: use tierzero.AdamW or tierzero.wrap_optimizer"
                )
        self.setup_precision_plugin()

    def on_train_start(self) -> None:
        """Random generators as they were saved: making the loaders' iterators anew has used them."""
        if self.random is not None:
            set_random_state(self.random)
        self.random = None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; the backward inside is the step's last."""
        self.stepping = True
        try:
            return super().optimizer_step(*args, **kwargs)
        finally:
            self.stepping = False

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; while gradients accumulate, nothing of the step begins."""
        more = self.lightning_module.automatic_optimization and not self.stepping
        with tz.no_sync(self.lightning_module) if more else nullcontext():
            return super().backward(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: it is in the checkpoint's other part."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: it is in the checkpoint's other part."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Into the directory `filepath`, which is whole once it contains `tierzero`."""
        super().save_checkpoint(checkpoint, Path(filepath, _REST), storage_options)
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        meta = {"step": checkpoint["global_step"]}
        tz.save(self.lightning_module, Path(filepath, _STATE), optimizers, meta=meta, overwrite=True, wait=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """A directory of `save_checkpoint`, or a file that Lightning wrote without this strategy."""
        self.loading = Path(checkpoint_path) if Path(checkpoint_path).is_dir() else None
        found: dict[str, Any] = super().load_checkpoint(
            Path(checkpoint_path, _REST) if self.loading else checkpoint_path, weights_only
        )
        return found

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Weights and, when training goes on, optimizer states and random generators."""
        if self.loading is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            tz.load(self.lightning_module, self.loading / _STATE, self.optimizers or None)
            self.random = random_state() if self.optimizers else None

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """States go into the tiers, not to the device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if self.loading is None:
                optimizer.load_state_dict(state)

    def remove_checkpoint(self, filepath: Any) -> None:
        """A directory that `save_checkpoint` wrote, or a file."""
        if Path(filepath, _STATE).is_dir():
            shutil.rmtree(filepath)
        else:
            super().remove_checkpoint(filepath)

    def teardown(self) -> None:
        """The module stays in its tiers."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
