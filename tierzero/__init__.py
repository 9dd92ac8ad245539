"""tierzero: train PyTorch models larger than the GPU, bit-equal to the plain loop. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tierzero.api import close as close
    from tierzero.api import no_sync as no_sync
    from tierzero.api import offload as offload
    from tierzero.api import register_forward_method as register_forward_method
    from tierzero.api import reset as reset
    from tierzero.api import restore as restore
    from tierzero.api import rollback as rollback
    from tierzero.api import snapshot as snapshot
    from tierzero.api import stats as stats
    from tierzero.api import synchronize as synchronize
    from tierzero.api import unsharded as unsharded
    from tierzero.checkpoint.export import export as export
    from tierzero.checkpoint.load import load as load
    from tierzero.checkpoint.save import save as save
    from tierzero.checkpoint.saving import Saving as Saving
    from tierzero.model.deferred import deferred_init as deferred_init
    from tierzero.model.initialize import initialize as initialize
    from tierzero.model.meta import parameters_on_meta as parameters_on_meta
    from tierzero.monitoring.observe import serve_metrics as serve_metrics
    from tierzero.monitoring.observe import trace as trace
    from tierzero.optim.adamw import AdamW as AdamW
    from tierzero.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from tierzero.optim.generic import wrap_optimizer as wrap_optimizer
    from tierzero.optim.scaler import GradScaler as GradScaler
    from tierzero.planning.planner import plan as plan
    from tierzero.tiers.config import Tiers as Tiers

# loaded on first use: `tierzero --help` and `--version` need no torch
_HOMES = {
    "tierzero.api": "close no_sync offload register_forward_method reset restore rollback snapshot stats synchronize "
    "unsharded",
    "tierzero.checkpoint.export": "export",
    "tierzero.checkpoint.load": "load",
    "tierzero.checkpoint.save": "save",
    "tierzero.checkpoint.saving": "Saving",
    "tierzero.model.deferred": "deferred_init",
    "tierzero.model.initialize": "initialize",
    "tierzero.model.meta": "parameters_on_meta",
    "tierzero.optim.adamw": "AdamW",
    "tierzero.optim.clip": "clip_grad_norm_",
    "tierzero.optim.generic": "wrap_optimizer",
    "tierzero.optim.scaler": "GradScaler",
    "tierzero.monitoring.observe": "serve_metrics trace",
    "tierzero.planning.planner": "plan",
    "tierzero.tiers.config": "Tiers",
    "tierzero.errors": "BudgetError ConfigError NonFiniteGradientError PagedOutError StoreBusyError StoreCorruptError "
    "StoreError TierzeroError",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tierzero' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
