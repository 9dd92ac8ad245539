"""Lightning on an offloaded module, against the same Lightning in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pieces import in_slices
from trainers import MasterAdamW, Tokens, assert_same_weights, build, tiers

import tierzero as tz
from tierzero.errors import ConfigError

pytest.importorskip("lightning")
pytest.importorskip("transformers")
import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tierzero.integrations.lightning import TierzeroStrategy

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's about workers and loggers
]
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


class Module(pl.LightningModule):
    """A language model as a user of Lightning writes it; `optimizer` makes one of its parameters."""

    def __init__(self, optimizer: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = build(dtype)
        self.optimizer = optimizer
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.losses.append(self.model(**batch).loss.item())

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), "interval": "step"}
        ]


def torch_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **HYPER)


def our_adamw(params: Any) -> torch.optim.Optimizer:
    return tz.AdamW(params, **HYPER)


def master_adamw(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return MasterAdamW(params, 1.0, params, **HYPER)


def fit(module: Module, out: Path, steps: int = 6, resume: Any = None, rows: int = 96, **options: Any) -> pl.Trainer:
    """`rows` of them, two a micro-batch, are an epoch."""
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": steps,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 1.0,
            "val_check_interval": 6,
            "limit_val_batches": 2,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": out,
            **options,
        }
    )
    trainer.fit(module, DataLoader(Tokens(rows), batch_size=2), DataLoader(Tokens(6), batch_size=2), ckpt_path=resume)
    return trainer


def test_losses_and_weights_are_those_of_lightning(tmp_path: Path) -> None:
    """With dropout, clipping, accumulation, a schedule, and validation on the way."""
    plain, ours = Module(torch_adamw), Module(our_adamw)
    fit(plain, tmp_path)
    fit(ours, tmp_path, strategy=TierzeroStrategy(tiers(tmp_path / "store")))
    assert ours.losses == plain.losses
    assert_same_weights(ours, plain)
    assert tz.stats(ours)["steps"] == 6
    tz.close(ours)


def test_micro_batches(tmp_path: Path) -> None:
    """Every layer runs its two rows one by one: as Lightning with a module whose layers run over slices."""
    plain, ours = Module(torch_adamw), Module(our_adamw)
    in_slices(plain, plain.model.model.layers, 2)
    fit(plain, tmp_path)
    fit(ours, tmp_path, strategy=TierzeroStrategy(tiers(tmp_path / "store"), micro_batches=2))
    assert ours.losses == plain.losses
    assert_same_weights(ours, plain)
    tz.close(ours)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_16_bits(tmp_path: Path, precision: Any) -> None:
    """On float32 masters, or float32 parameters under autocast."""
    plain, ours = Module(master_adamw), Module(our_adamw)
    fit(plain, tmp_path, precision=precision, gradient_clip_val=None)
    fit(ours, tmp_path, precision=precision, strategy=TierzeroStrategy(tiers(tmp_path / "store")))
    assert ours.losses == plain.losses
    assert_same_weights(ours, plain)
    tz.close(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_and_ten_steps_are_twenty(tmp_path: Path, dtype: torch.dtype) -> None:
    """Saved by one trainer, gone on with by another under other budgets: all as in one go."""
    whole, first, second = (Module(our_adamw, dtype) for _ in range(3))
    keep = pl.callbacks.ModelCheckpoint(tmp_path / "kept", every_n_epochs=1, save_top_k=1, monitor=None)
    options: dict[str, Any] = {"rows": 40, "val_check_interval": None, "enable_checkpointing": True}
    fit(whole, tmp_path, 20, strategy=TierzeroStrategy(tiers(tmp_path / "one")), callbacks=[keep], **options)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["epoch=1-step=20.ckpt"]  # the first is gone
    trainer = fit(first, tmp_path, 10, strategy=TierzeroStrategy(tiers(tmp_path / "two")), **options)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    tz.close(first)
    other = tz.Tiers(host="256MiB", device="16MiB", compute="cpu")
    fit(second, tmp_path, 20, tmp_path / "saved.ckpt", strategy=TierzeroStrategy(other), **options)
    assert first.losses + second.losses == whole.losses
    assert_same_weights(second, whole)
    tz.close(second)
    tz.close(whole)


def test_what_cannot_work(tmp_path: Path) -> None:
    module = Module(torch_adamw)
    with pytest.raises(ConfigError, match="AdamW of configure_optimizers cannot step an offloaded model"):
        fit(module, tmp_path, strategy=TierzeroStrategy(tiers(tmp_path / "store")))
    module.optimizer = our_adamw
    fit(module, tmp_path, 1, strategy=TierzeroStrategy(tiers(tmp_path / "store")))  # it is offloaded already
    assert tz.stats(module)["steps"] == 1
    tz.close(module)
    with pytest.raises(ConfigError, match='precision="64-true"'):
        fit(Module(our_adamw), tmp_path, precision="64-true", strategy=TierzeroStrategy(tiers(tmp_path / "other")))


def test_16_mixed(tmp_path: Path) -> None:
    """On the CPU Lightning says that it becomes bf16-mixed, with this strategy as without; a plugin that insists on
    float16, as Lightning makes it on a GPU, is refused.
    """
    from lightning.pytorch.plugins.precision import MixedPrecision

    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        trainer = pl.Trainer(precision="16-mixed", strategy=TierzeroStrategy(tiers(tmp_path / "store")), **options)
    assert trainer.precision == "bf16-mixed"
    strategy = TierzeroStrategy(tiers(tmp_path / "store"))
    with pytest.raises(ConfigError, match='precision="16-mixed" does not work in tiers'):
        pl.Trainer(plugins=[MixedPrecision("16-mixed", "cpu")], strategy=strategy, **options)
