"""Peak memory of loading and exporting: python tests/weights_memory.py FOLDER. Prints one JSON object, bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import tierzero as tz
from tierzero.checkpoint.weights import load_weights
from tierzero.cli.memory import reset_peak, resident, resident_peak, return_free_memory

ROWS, WIDTH = 48_000, 1024  # one tensor of 94 MiB


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def peak(work: Any) -> int:
    """How far `work` raises resident memory above what was there."""
    return_free_memory()
    reset_peak()
    before = resident()
    work()
    return resident_peak() - before


def main(folder: Path) -> None:
    """Load one file, shards and halves of another dtype; export; export fifty times."""
    torch.manual_seed(0)
    with tz.parameters_on_meta():
        model = Model().to(torch.bfloat16)
    largest = ROWS * WIDTH * 2
    if not (folder / "a.safetensors").exists():
        values = {name: torch.randn(value.shape, dtype=torch.bfloat16) for name, value in model.state_dict().items()}
        save_file(values, folder / "a.safetensors")
        save_file({name: value.float() for name, value in values.items()}, folder / "b.safetensors")
        return
    tz.offload(model, tz.Tiers(nvme=folder / "store", host=largest + (48 << 20), device=2 * largest, compute="cpu"))
    found = {
        "load": peak(lambda: load_weights(model, folder / "a.safetensors")),
        "cast": peak(lambda: load_weights(model, folder / "b.safetensors")),
        "export": peak(lambda: tz.export(model, folder / "out")),
        "largest": largest,
    }
    tz.AdamW(model.parameters())
    found["masters"] = peak(lambda: load_weights(model, folder / "a.safetensors"))
    found["one_more"] = peak(lambda: tz.export(model, folder / "out"))
    small = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    tz.close(model)
    tz.offload(small, tz.Tiers(nvme=folder / "small", host="64MiB", device="16MiB", compute="cpu"))
    sizes = []
    for _ in range(50):
        tz.export(small, folder / "often")
        sizes.append(resident())
    found["slope"] = (sum(sizes[-10:]) - sum(sizes[10:20])) // 10
    tz.close(small)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
