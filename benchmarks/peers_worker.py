"""One trainer of peers.py in a process of its own: a GPT in bf16 under AdamW, as `kind` does it.

A question is {"steps": n}: one step that is not timed and n that are, as in the midst of training. The answer has the
seconds of each, optimizer seconds, the losses of all, bytes to and from drives and peak resident memory since
initialisation. Runs in Pythons without tierzero too: what it needs of it is loaded from
the files in `sources`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from nvme_worker import answers, serve

LR = 1e-4
BATCH = (2, 128)  # sequences, tokens
SHAPE = {"hidden": 768, "layers": 12, "heads": 12, "vocab": 16384}  # 110 M parameters
SMALL = {"hidden": 256, "layers": 4, "heads": 4, "vocab": 1024}  # 4 M
SPARE = {768: 96 << 20, 256: 8 << 20}  # bytes of host memory for everything but parameters and gradients


def load(sources: str, name: str) -> Any:
    """The module in the file `name`.py, without the package around it."""
    spec = importlib.util.spec_from_file_location(name, Path(sources) / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def built(decoder: Any, dtype: Any) -> Any:
    """The same model, with the same values, for everybody."""
    import torch

    torch.manual_seed(0)
    model = decoder.build_decoder(decoder.DecoderConfig(**SHAPE), "cpu", torch.bfloat16)
    decoder.init_decoder(model)
    return model.to(dtype)


class Trainer:
    """`backward(tokens)` gives the loss after a backward; `update()` is the optimizer's step."""

    def backward(self, tokens: Any) -> Any:
        raise NotImplementedError

    def update(self) -> None:
        raise NotImplementedError

    def waited(self) -> float:
        """Seconds so far that forwards and backwards waited for updates."""
        return 0.0

    def moved(self) -> tuple[int, int] | None:
        """Bytes to and from the drive as its own counters have them."""
        return None

    def finish(self) -> None:
        """Nothing goes on by itself."""

    def close(self) -> None:
        """Nothing to close."""


class Tierzero(Trainer):
    """States on the drive, parameters and gradients in host memory, a third of the parameters on the device."""

    def __init__(self, decoder: Any, directory: str) -> None:
        import torch

        import tierzero as tz

        self.tz = tz
        model = built(decoder, torch.bfloat16)
        params = sum(param.nbytes for param in model.parameters())
        tiers = tz.Tiers(nvme=directory, host=2 * params + SPARE[SHAPE["hidden"]], device=params // 3, compute="cpu")
        self.model = tz.offload(model, tiers)
        self.optimizer = tz.AdamW(self.model.parameters(), lr=LR)

    def backward(self, tokens: Any) -> Any:
        loss = self.model(tokens, tokens)
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moved(self) -> tuple[int, int]:
        stats = self.tz.stats(self.model)
        return stats["nvme_read"], stats["nvme_written"]

    def waited(self) -> float:
        return float(self.tz.stats(self.model)["stall_update_s"])

    def finish(self) -> None:
        self.tz.synchronize(self.model)

    def close(self) -> None:
        self.tz.close(self.model)


class Torch(Trainer):
    """All in memory: bf16 parameters, float32 masters, torch's fused AdamW."""

    def __init__(self, decoder: Any, directory: str) -> None:
        import torch

        self.torch = torch
        self.model = built(decoder, torch.bfloat16)
        self.masters = [param.detach().float().requires_grad_() for param in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=True)

    def backward(self, tokens: Any) -> Any:
        loss = self.model(tokens, tokens)
        loss.backward()
        return loss

    def update(self) -> None:
        for param, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        with self.torch.no_grad():
            for param, master in zip(self.model.parameters(), self.masters, strict=True):
                param.copy_(master)


class Fsdp2(Trainer):
    """fully_shard with CPU offload and bf16 mixed precision over float32 parameters."""

    def __init__(self, decoder: Any, directory: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        self.model = built(decoder, torch.float32)
        how = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        for block in self.model.model.layers:
            fully_shard(block, **how)
        fully_shard(self.model, **how)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def backward(self, tokens: Any) -> Any:
        loss = self.model(tokens, tokens)
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeed(Trainer):
    """ZeRO-3 in bf16 with the optimizer on NVMe, everything else at its defaults."""

    def __init__(self, decoder: Any, directory: str) -> None:
        import deepspeed
        import torch

        config = {
            "train_micro_batch_size_per_gpu": BATCH[0],
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 1e-2}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": directory, "pin_memory": False},
            },
        }
        deepspeed.init_distributed(dist_backend="gloo")
        model = built(decoder, torch.bfloat16)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def backward(self, tokens: Any) -> Any:
        loss = self.engine(tokens, tokens)
        self.engine.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.engine.step()


KINDS = {"tierzero": Tierzero, "torch": Torch, "fsdp2": Fsdp2, "deepspeed": DeepSpeed}


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("directory")
    parser.add_argument("sources")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    SHAPE.update(SMALL if args.small else {})
    out = answers()
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(key, value)
    import torch

    memory, decoder = load(args.sources, "memory"), load(args.sources, "decoder")
    trainer = KINDS[args.kind](decoder, args.directory)
    params = sum(param.numel() for param in built(decoder, torch.bfloat16).parameters())
    memory.return_free_memory()
    memory.reset_peak()
    done = 0

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal done
        seconds, optimizer, losses = [], [], []
        disk, own, waited = memory.disk_bytes(), trainer.moved(), trainer.waited()
        for index in range(1 + question["steps"]):
            tokens = torch.randint(0, SHAPE["vocab"], BATCH, generator=torch.Generator().manual_seed(done))
            start = time.perf_counter()
            loss = trainer.backward(tokens)
            middle = time.perf_counter()
            trainer.update()
            end = time.perf_counter()
            if index:
                seconds.append(end - start)
                optimizer.append(end - middle)
            losses.append(loss.item())
            done += 1
        waited = trainer.waited() - waited
        trainer.finish()
        now, own_now = memory.disk_bytes(), trainer.moved()
        per = (1 + question["steps"]) * params
        return {
            "seconds": seconds,
            "optimizer": statistics.mean(optimizer) + waited / (1 + len(optimizer)),
            "losses": losses,
            "disk": None if disk is None or now is None else [(b - a) / per for a, b in zip(disk, now, strict=True)],
            "counted": None
            if own is None or own_now is None
            else [(b - a) / per for a, b in zip(own, own_now, strict=True)],
            "peak": memory.resident_peak(),
            "params": params,
        }

    serve(answer, out)
    trainer.close()


if __name__ == "__main__":
    main()
