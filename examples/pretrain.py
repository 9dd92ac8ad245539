"""Pretrain a decoder from scratch: built on the meta device, initialised in the tiers, resumed with the same losses.

python pretrain.py --layers 48 --width 4096 --nvme /mnt/nvme0/tz --host 64GiB --device 16GiB
python pretrain.py --resume  # with the same options
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import tierzero as tz


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(layers))  # each is a unit of the engine
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="6 of them and the default width: a million parameters")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--nvme", type=Path, default=Path("runs/pretrain"), help="a directory on the drive")
    parser.add_argument("--host", default="64MiB", help="host memory that the engine may use")
    parser.add_argument("--device", default="4MiB", help="device memory for parameters")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the directory")
    parser.add_argument("--overwrite", action="store_true", help="give up the checkpoint in the directory")
    args = parser.parse_args()
    with torch.device("meta"):  # shapes only
        model = Decoder(args.layers, args.width, context=64)
    tiers = tz.Tiers(nvme=args.nvme, host=args.host, device=args.device)
    tz.offload(model, tiers, resume=args.resume, overwrite=args.overwrite)
    opt = tz.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    text = torch.tensor(list(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()))
    torch.manual_seed(0)
    if not args.resume:
        tz.initialize(model)  # one unit at a time, the values of the plain model under the same seed
    first = tz.restore(model, opt)["step"] if args.resume else 0
    for step in range(first, first + args.steps):
        draw = torch.Generator().manual_seed(step)  # the place in the data is the step, in a resumed run too
        starts = torch.randint(len(text) - 64, (8,), generator=draw).tolist()
        loss = model(torch.stack([text[start : start + 64] for start in starts]))
        loss.backward()
        tz.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        print(f"step {step + 1}, loss {loss.item():.3f}")
    tz.snapshot(model, opt, f"step-{step + 1}", {"step": step + 1})  # pins what is on the drive, copies nothing
    tz.close(model)


if __name__ == "__main__":
    main()
