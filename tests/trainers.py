"""A small language model, its data, and an optimizer with float32 masters, for the tests of training frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import tierzero as tz

VOCAB = 96


def build(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A Llama of three thin layers with dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
            "attention_dropout": 0.1,
            "use_cache": False,
            **options,
        }
    )
    return LlamaForCausalLM(config).to(dtype)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random rows that are the same in every process."""

    def __init__(self, rows: int = 96) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def tiers(directory: Path, host: str = "48MiB") -> tz.Tiers:
    """Parameters pass through little more than a layer's bytes of device budget; states are on the drive."""
    return tz.Tiers(nvme=directory, host=host, device="256KiB", compute="cpu")


class MasterAdamW(torch.optim.Optimizer):
    """torch's fused AdamW on float32 masters, with clipping of their gradients, as a plain framework can be given it.

    `clipped`: the parameters in the order of their norms.
    """

    def __init__(self, groups: Any, max_norm: float, clipped: list[torch.Tensor], **hyper: Any) -> None:
        super().__init__(groups, dict(hyper))
        self.max_norm = max_norm
        params = [param for group in self.param_groups for param in group["params"]]
        masters = {param: param.detach().float().clone().requires_grad_() for param in params}
        self.masters = {param: masters[param] for param in clipped if param in masters}
        own = [{**group, "params": [masters[param] for param in group["params"]]} for group in self.param_groups]
        self.inner = torch.optim.AdamW(own, fused=True, **hyper)

    def step(self, closure: Any = None) -> Any:
        """Closure, clip, step, copy back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for own, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            own["lr"] = group["lr"]
        for param, master in self.masters.items():
            master.grad = None if param.grad is None else param.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters.values(), self.max_norm)
        self.inner.step()
        with torch.no_grad():
            for param, master in self.masters.items():
                param.copy_(master)
        return loss


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict's values in memory."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_weights(one: Any, other: Any) -> None:
    """Bit for bit, names included."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
