"""A model larger than the memory it may use: built without values, loaded, trained, saved, resumed, exported.

    python tests/larger_than_memory.py FOLDER LIMIT [--share 4.0] [--group DIRECTORY | --rlimit]

FOLDER has a checkpoint in base/ (`write_base`). The process puts itself into the control group, or limits its own data
segment, before it loads torch. Prints one JSON object with what it used.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

WIDTH = 1024
RANK = 4
STEPS = 3
HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.05}


def layers_for(limit: int, share: float) -> int:
    """How many layers it takes for parameters of `share` times `limit` bytes."""
    return int(share * limit / (2 * (8 * WIDTH * WIDTH))) + 1


def build(layers: int) -> nn.Module:
    """Residual MLP blocks in bfloat16, frozen, each with a trained low-rank adapter."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
            self.a = nn.Linear(WIDTH, RANK, bias=False)
            self.b = nn.Linear(RANK, WIDTH, bias=False)
            self.up.requires_grad_(False)
            self.down.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x))) + self.b(self.a(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block() for _ in range(layers)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    return Model().to(torch.bfloat16)


def write_base(folder: Path, layers: int) -> None:
    """The checkpoint: a shard a layer, with an index."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    base = {
        "up.weight": torch.randn(4 * WIDTH, WIDTH, generator=generator, dtype=torch.bfloat16) * 0.01,
        "down.weight": torch.randn(WIDTH, 4 * WIDTH, generator=generator, dtype=torch.bfloat16) * 0.001,
    }
    placed = {}
    for index in range(layers):
        small = {
            "a.weight": torch.randn(RANK, WIDTH, generator=generator, dtype=torch.bfloat16) * 0.02,
            "b.weight": torch.randn(WIDTH, RANK, generator=generator, dtype=torch.bfloat16) * 0.02,
        }
        named = {f"layers.{index}.{name}": value.roll(index, 0) for name, value in (base | small).items()}
        save_file(named, folder / f"layer-{index}.safetensors")
        placed |= dict.fromkeys(named, f"layer-{index}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def inputs(step: int) -> Any:
    """bfloat16[2, WIDTH]."""
    import torch

    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)


def loss_of(model: nn.Module, step: int) -> Any:
    """The loss of one step."""
    return model(inputs(step)).float().pow(2).mean()


def use(folder: Path, layers: int, *, in_place: bool) -> dict[str, Any]:
    """All of it, and what it took."""
    import torch

    import tierzero as tz
    from tierzero.cli.memory import resident_peak

    torch.set_num_threads(1)

    def offloaded(store: str) -> nn.Module:
        with tz.parameters_on_meta():
            model = build(layers)
        tiers = tz.Tiers(nvme=folder / store, host="40MiB", device="40MiB", compute="cpu")
        return tz.offload(model, tiers)

    model = offloaded("store")
    tz.load(model, folder / "base", in_place=in_place)
    opt = tz.AdamW([p for p in model.parameters() if p.requires_grad], **HYPER)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    tz.save(model, folder / "saved", opt, meta={"step": STEPS}, wait=True)
    stats = tz.stats(model)
    tz.close(model)
    del model, opt
    model = offloaded("again")
    opt = tz.AdamW([p for p in model.parameters() if p.requires_grad], **HYPER)
    step = tz.load(model, folder / "saved", opt, verify=False)["step"]
    loss = loss_of(model, step)
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(float(loss.detach()))
    tz.export(model, folder / "out", max_shard="256MB")
    bytes_of = sum(param.numel() * param.element_size() for param in model.parameters())
    tz.close(model)
    return {
        "losses": losses,
        "parameter_bytes": bytes_of,
        "nvme_written": stats["nvme_written"],
        "resident_peak": resident_peak(),
    }


def main() -> None:
    """Limit this process first, then do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("limit", type=int, help="bytes")
    parser.add_argument("--share", type=float, default=4.0, help="parameter bytes per byte of the limit")
    parser.add_argument("--in-place", action="store_true", help="leave frozen parameters in their files")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--group", type=Path, help="a control group with that limit")
    how.add_argument("--rlimit", action="store_true", help="limit the data segment instead")
    args = parser.parse_args()
    if args.group is not None:
        (args.group / "cgroup.procs").write_text(str(os.getpid()))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (args.limit, args.limit))
    json.dump(use(args.folder, layers_for(args.limit, args.share), in_place=args.in_place), sys.stdout)


if __name__ == "__main__":
    main()
