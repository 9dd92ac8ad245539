"""A notebook as a script: run it whole with `python notebook.py`, or cell by cell in an editor that knows `# %%`.

No launcher, no environment variables, no configuration files: tierzero is a library in your own process.
"""

# %% What is used
import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import tierzero as tz

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nvme", type=Path, default=Path("runs/notebook"), help="a directory on the drive")
nvme = parser.parse_known_args()[0].nvme  # a notebook's kernel has arguments of its own

# %% A model, and something to learn: the sum of its inputs, modulo ten
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)]
model = nn.Sequential(nn.Flatten(), nn.Linear(40, 256), *blocks, nn.Linear(256, 10))


def batch(rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    digits = torch.randint(10, (rows, 4))
    return F.one_hot(digits, 10).float(), digits[:, 0]


# %% Where will what live? Nothing is allocated for the answer
tiers = tz.Tiers(nvme=nvme, host="17MiB", device="1MiB")
plan = tz.plan(model, tiers)
print(f"{plan.params:,} parameters need {plan.device_needed:,} bytes on the device and {plan.host_needed:,} in memory")

# %% Offload it, in place. From here on each layer is in memory only while it runs
tz.offload(model, tiers)
opt = tz.AdamW(model.parameters(), lr=1e-3)

# %% Train: the loop is the usual one. Run this cell as often as you like
for step in range(20):
    inputs, targets = batch()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    tz.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    if step % 5 == 4:
        print(f"step {step + 1}, loss {loss.item():.3f}")

# %% Look at it: predictions, one layer's weights, what moved
with torch.no_grad():
    inputs, targets = batch(1000)
    print(f"right: {(model(inputs).argmax(1) == targets).float().mean():.0%}")
with tz.unsharded(model[1]):
    print(f"norm of the first layer's weights: {model[1].weight.norm():.3f}")
stats = tz.stats(model)
print(f"{stats['steps']} steps, {stats['nvme_read']:,} bytes read from the drive, {stats['nvme_written']:,} written")

# %% Keep the weights, free everything
tz.export(model, nvme / "model.safetensors")
tz.close(model)
