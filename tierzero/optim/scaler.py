"""GradScaler: torch's own, and `unscale_` for 16-bit parameters too."""

from __future__ import annotations

from typing import Any

import torch

from tierzero.optim.base import TieredOptimizer, unscale
from tierzero.optim.norms import is_finite, unit_norms, without_grad


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, which also works with optimizers of offloaded models as it is, but whose `unscale_` refuses
    float16 gradients. This one takes them: the inverse scale is applied in float32 as the parameter is stepped, and
    clip_grad_norm_ knows of it. `.grad` of a 16-bit parameter stays scaled until somebody looks at it.

    Arguments are torch's; 16-bit parameters need a scale that is a power of two. Other optimizers are handled as by
    torch's.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, TieredOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if _unscale(optimizer, float(inv_scale)):
            found_inf.fill_(1.0)
        return {found_inf.device: found_inf}


@without_grad
def _unscale(optimizer: TieredOptimizer, inverse: float) -> bool:
    """Whether something is not finite; else everything is unscaled."""
    with optimizer.counted("unscale"):
        work: dict[Any, dict[int, int]] = optimizer.work()
        for unit, indices in work.items():
            norms = unit_norms(unit)
            if any(not norms[index] < float("inf") and not is_finite(unit, index) for index in indices):
                return True
        unscale(work, 1 / inverse, inverse)
        return False
