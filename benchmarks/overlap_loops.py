"""What overlap.py trains: models whose compute waits or multiplies, and the plain and the offloaded loop over them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tierzero as tz
from tierzero.api import engine_of
from tierzero.cli.decoder import DecoderConfig, build_decoder, init_decoder

LR = 1e-4
WIDTH = 1024  # of the waiting model


class Clock:
    """How long each unit of the waiting model waits in forward and in backward, seconds."""

    def __init__(self) -> None:
        self.forward = 0.0
        self.backward = 0.0


class _Pause(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        time.sleep(clock.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.clock.backward)
        return grad, None


class WaitingBlock(nn.Module):
    """Four square matrices, all of whose elements get a gradient that depends on all of them."""

    def __init__(self, clock: Clock, width: int = WIDTH) -> None:
        super().__init__()
        self.clock = clock
        self.width = width
        self.weights = nn.ParameterList(torch.randn(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Pause.apply(x, self.clock)
        mean = torch.full((1, self.width), 1 / self.width, dtype=x.dtype)
        for weight in self.weights:
            x = x + torch.tanh(x * (mean @ weight))
        return x


class Waiting(nn.Module):
    """Compute that leaves the CPU free, as a GPU's does."""

    def __init__(self, blocks: int, clock: Clock, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WaitingBlock(clock, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Task:
    """A model to train and its batches. `level` is what changes the amount of compute."""

    def __init__(self, make: Callable[[], nn.Module], loss: Callable[[nn.Module, int, Any], torch.Tensor]) -> None:
        self.make = make
        self.loss = loss


def waiting_task(blocks: int, clock: Clock, width: int = WIDTH) -> Task:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Waiting(blocks, clock, width).to(torch.bfloat16)

    def loss(model: nn.Module, step: int, level: Any) -> torch.Tensor:
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        out: torch.Tensor = model(x)
        return out

    return Task(make, loss)


def decoder_task(layers: int, hidden: int = 768) -> Task:
    """`level`: (sequences, tokens) of a batch."""
    config = DecoderConfig(hidden=hidden, layers=layers, heads=hidden // 64, vocab=4096)

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = build_decoder(config, "cpu", torch.bfloat16)
        init_decoder(model)
        return model

    def loss(model: nn.Module, step: int, level: Any) -> torch.Tensor:
        tokens = torch.randint(0, config.vocab, level, generator=torch.Generator().manual_seed(step))
        out: torch.Tensor = model(tokens, tokens)
        return out

    return Task(make, loss)


class Plain:
    """bf16 parameters in memory, float32 masters under torch's fused AdamW."""

    def __init__(self, task: Task, max_norm: float) -> None:
        self.task, self.max_norm = task, max_norm
        self.model = task.make()
        self.masters: list[torch.Tensor] = []
        self.optimizer: torch.optim.Optimizer | None = None

    def compute(self, step: int, level: Any) -> float:
        """Forward and backward alone."""
        self.model.zero_grad()
        loss = self.task.loss(self.model, step, level)
        loss.backward()
        return loss.item()

    def step(self, step: int, level: Any) -> float:
        if self.optimizer is None:
            self.masters = [param.detach().float().requires_grad_() for param in self.model.parameters()]
            self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=True)
        loss = self.compute(step, level)
        for param, master in zip(self.model.parameters(), self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, self.max_norm)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self.masters, strict=True):
                param.copy_(master)
        return loss


class Offloaded:
    """States on a drive, parameters and gradients in host memory, `device` of the parameters on the compute device.
    Every step clips. `log` holds the levels and losses of all steps.
    """

    def __init__(self, task: Task, max_norm: float, directory: str, device: float, overlap: Any = "auto") -> None:
        self.task, self.max_norm = task, max_norm
        self.model = task.make()
        params = sum(param.nbytes for param in self.model.parameters())
        ample = tz.plan(self.model, tz.Tiers(nvme=directory, host="64GiB", device="64GiB", compute="cpu"))
        budget = max(ample.device_needed, int(device * params) + ample.device_needed)
        host = ample.grad_bytes + ample.param_host + ample.buffer_bytes + (1 << 20)
        tz.offload(self.model, tz.Tiers(nvme=directory, host=host, device=budget, compute="cpu"))
        self.optimizer = tz.AdamW(self.model.parameters(), lr=LR, overlap=overlap)
        self.log: list[tuple[Any, float]] = []
        self.engine = engine_of(self.model)
        assert all(self.engine.placement.param_host), "the parameters are not in memory"
        own = sum(unit.layout.state_bytes for unit in self.engine.units if unit.state_host)
        assert own <= 1 << 20, "more than a norm's states are in memory"

    def begin(self, level: Any) -> torch.Tensor:
        """Forward, backward and the norm."""
        loss = self.task.loss(self.model, len(self.log), level)
        loss.backward()
        tz.clip_grad_norm_(self.model.parameters(), self.max_norm)
        return loss

    def end(self, level: Any, loss: torch.Tensor) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.log.append((level, loss.item()))

    def steps(self, count: int, level: Any) -> float:
        """Seconds a step of `count` steps in a row, after one that is not counted: as in the midst of training."""
        self.end(level, self.begin(level))
        start = time.perf_counter()
        for _ in range(count):
            self.end(level, self.begin(level))
        return (time.perf_counter() - start) / count

    def updates_alone(self, level: Any) -> float:
        """Seconds that the optimizer's step takes when nothing else goes on."""
        tz.synchronize(self.model)
        loss = self.begin(level)
        start = time.perf_counter()
        self.end(level, loss)
        tz.synchronize(self.model)
        return time.perf_counter() - start

    def check(self) -> None:
        """Every loss so far is that of the plain loop, bit by bit."""
        plain = Plain(self.task, self.max_norm)
        for step, (level, loss) in enumerate(self.log):
            expected = plain.step(step, level)
            assert loss == expected, f"step {step}: the loss is {loss!r}, the plain loop has {expected!r}"

    def close(self) -> None:
        tz.close(self.model)
