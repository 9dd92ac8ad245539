"""The plain PyTorch loop that everything is held against, bit by bit, and the same loop on an offloaded model."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from crossed import ALL
from models import VOCAB
from torch import nn

import tierzero as tz
from tierzero.api import engine_of

HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.05}
PLACEMENTS = ("host", "nvme", "mixed")
Groups = Callable[[nn.Module], list[dict[str, Any]]]


def tiers_for(
    model: nn.Module, placement: str, directory: Path, units: Any = None, spare: int = 0, micro_batches: int = 1
) -> tz.Tiers:
    """The smallest budgets that work for `placement`; "mixed" has host memory for half the records. `spare`: extra
    device bytes.
    """
    nvme = None if placement == "host" else directory
    enough = tz.Tiers(nvme=nvme, host="1GiB", device="1GiB", compute="cpu")
    ample = tz.plan(model, enough, units=units, micro_batches=micro_batches)
    host = ample.host_min
    if placement == "mixed":
        host = ample.host_needed - (ample.param_host + ample.state_host) // 2
    return tz.Tiers(nvme=nvme, host=host, device=ample.device_needed + spare, compute="cpu")


class Plain:
    """float32 masters under torch's fused AdamW (Adam with `decoupled` False), for a model in any dtype."""

    def __init__(self, model: nn.Module, groups: Groups | None = None, **hyper: Any) -> None:
        self.model = model
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.masters = {param: param.detach().float().clone().requires_grad_() for param in self.params}
        chosen = [{"params": self.params}] if groups is None else groups(model)
        own = [{**group, "params": [self.masters[p] for p in group["params"] if p in self.masters]} for group in chosen]
        kind: Any = torch.optim.AdamW if hyper.pop("decoupled", True) else torch.optim.Adam
        self.optimizer = kind(own, fused=True, **{**HYPER, **hyper})

    def take_grads(self) -> None:
        """Give the masters the model's gradients, cast to float32."""
        for param, master in self.masters.items():
            master.grad = None if param.grad is None else param.grad.float().contiguous()

    def norm(self) -> float:
        """The total gradient norm."""
        self.take_grads()
        norms = [torch.linalg.vector_norm(m.grad) for m in self.masters.values() if m.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the masters' gradients."""
        return torch.nn.utils.clip_grad_norm_(list(self.masters.values()), max_norm)

    def update(self) -> None:
        """Step the masters as they are and give the model their values."""
        self.optimizer.step()
        with torch.no_grad():
            for param, master in self.masters.items():
                param.copy_(master)

    def step(self, max_norm: float | None = None) -> torch.Tensor | None:
        """One optimizer step from the model's gradients."""
        self.take_grads()
        total = None if max_norm is None else self.clip(max_norm)
        self.update()
        return total

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for param in self.params:
            param.grad = None


class Tiered:
    """The same on an offloaded model."""

    def __init__(
        self,
        model: nn.Module,
        tiers: tz.Tiers,
        groups: Groups | None = None,
        units: Any = None,
        micro_batches: int = 1,
        **hyper: Any,
    ) -> None:
        self.model = tz.offload(model, tiers, units=units, micro_batches=micro_batches)
        try:
            chosen = list(model.parameters()) if groups is None else groups(model)
            self.optimizer = tz.AdamW(chosen, **{**HYPER, **hyper})
            self.engine = engine_of(model)
        except BaseException:
            tz.close(model)
            raise

    def step(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Clip and step."""
        total = None if max_norm is None else tz.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        return total

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def check_pools(self) -> None:
        """Nothing is on the device but the bytes of resident units, nothing is in use, and the budget was kept."""
        from tierzero.paging.states import State

        engine = self.engine
        engine.run(_arrived(engine.units))
        held = sum(unit.layout.flat_bytes for unit in engine.units if unit.residency is not State.REST)
        assert engine.metrics.device_used == held
        assert engine.metrics.device_peak <= engine.metrics.device_budget
        assert [unit.name for unit in engine.units if unit.pins] == []
        assert [unit.name for unit in engine.units if unit.in_backward or unit.live_registered] == []
        for unit in engine.units:
            size = unit.flat.untyped_storage().nbytes()
            assert size == (0 if unit.residency is State.REST else unit.layout.flat_bytes), unit.name
        assert engine.arena.peak <= engine.metrics.host_budget
        assert not engine.hooks.frames
        assert not engine.hooks.backward.tasks
        assert not engine.hooks.roots
        if engine.activations is not None:
            if engine.activations.usage()["activations_host"]:
                gc.collect()  # an exception's frames may hold a graph
            engine.run(engine.activations.pool.drained())
            used = engine.activations.usage()
            assert used["activations_host"] == used["activations_nvme"] == used["activations_waiting"] == 0, used
            assert used["activations_host_peak"] <= engine.tiers.activation_bytes()


async def _arrived(units: Sequence[Any]) -> None:
    """Let what is due on the loop run, and all fetches arrive."""
    await asyncio.sleep(0)
    while arrivals := [unit.arrival for unit in units if unit.arrival is not None and not unit.arrival.done()]:
        await asyncio.wait(arrivals)
        await asyncio.sleep(0)


@contextmanager
def tiered(model: nn.Module, tiers: tz.Tiers, **options: Any) -> Iterator[Tiered]:
    """A Tiered that is closed at the end; checks that nothing is left in the pools."""
    run = Tiered(model, tiers, **options)
    done = False
    try:
        yield run
        run.check_pools()
        done = True
    finally:
        run.engine.close()
        if done:
            assert run.engine.metrics.device_used == 0


def batches(count: int, seed: int = 1, shape: tuple[int, int] = (2, 5)) -> Iterator[torch.Tensor]:
    """Random token batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(0, VOCAB, shape, generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the model's own input."""
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def make(factory: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A model with reproducible values."""
    torch.manual_seed(seed)
    return factory().to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits (and dtype and shape)."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


def differences(run: Tiered, plain: Plain, *, grads: bool = False) -> list[str]:
    """What differs between the two: names of parameters, masters, moments, steps (and gradients)."""
    found: list[str] = []
    mine, theirs = dict(run.model.named_parameters()), dict(plain.model.named_parameters())
    assert list(mine) == list(theirs)
    for name, param in theirs.items():
        rest = mine[name]
        if not same(rest.read(), param):  # type: ignore[operator]
            found.append(name)
        if grads and (rest.grad is None) != (param.grad is None):
            found.append(f"{name}.grad is {'missing' if rest.grad is None else 'there'}")
        elif grads and param.grad is not None and not same(rest.grad.plain, param.grad):  # type: ignore[union-attr]
            found.append(f"{name}.grad")
        master = plain.masters.get(param)
        state = {} if master is None else plain.optimizer.state.get(master, {})
        own = run.optimizer.state.get(rest, {})
        for part in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            if master is None:
                continue
            expected = state[part] if part in state else torch.zeros(param.shape)
            if not same(own[part].read() if part in own else torch.zeros(param.shape), expected):
                found.append(f"{name} {part}")
        if master is not None and "master" in own and not same(own["master"].read(), master):
            found.append(f"{name} master")
        step, expected_step = float(own.get("step", 0.0)), float(state.get("step", 0.0))
        if master is not None and step != expected_step:
            found.append(f"{name} step {step}, not {expected_step}")
    buffers = dict(run.model.named_buffers())
    found += [name for name, buffer in plain.model.named_buffers() if not same(buffers[name], buffer)]
    return found


def assert_same(run: Tiered, plain: Plain, where: str = "", *, grads: bool = False) -> None:
    """Fail with the names of what differs."""
    found = differences(run, plain, grads=grads)
    assert not found, f"{where}: {', '.join(found[:8])}{' and more' if len(found) > 8 else ''} differ"


Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def train_both(
    runs: Sequence[tuple[str, Tiered]],
    plain: Plain,
    steps: int,
    *,
    accumulate: int = 1,
    clip: Callable[[int, float], float | None] = lambda step, norm: None,
    loss: Body = loss_of,
    seed: int = 1,
    shape: tuple[int, int] = (2, 5),
    each_step: Callable[[int, Any], None] | None = None,
) -> None:
    """Train all in lockstep; losses and clip norms are compared at every step.

    `shape` is that of a batch. `clip` gives max_norm (or None) from the step and the total norm; `each_step(step, run)`
    runs after backward on every one of them.
    """
    data = batches(steps * accumulate, seed, shape)
    for step in range(steps):
        for micro in range(accumulate):
            ids = next(data)
            state = torch.get_rng_state()
            expected = loss(plain.model, ids)
            (expected / accumulate).backward()
            for name, run in runs:
                torch.set_rng_state(state)
                value = loss(run.model, ids)
                assert same(value, expected), (
                    f"{name}, step {step}, micro-batch {micro}: the loss is {value.item()!r}, not {expected.item()!r}"
                )
                (value / accumulate).backward()
        for run in (plain, *(run for _, run in runs)):
            if each_step is not None:
                each_step(step, run)
        max_norm = clip(step, plain.norm())
        total = plain.step(max_norm)
        plain.zero_grad()
        for name, run in runs:
            own = run.step(max_norm)
            run.zero_grad()
            if total is not None:
                assert own is not None
                assert same(own, total), f"{name}, step {step}: the clip norm is {own.item()!r}, not {total.item()!r}"


def check(
    factory: Callable[[], nn.Module],
    directory: Path,
    *,
    steps: int = 5,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    placements: Sequence[str] = PLACEMENTS,
    units: Callable[[nn.Module], Any] | None = None,
    groups: Groups | None = None,
    turn: int | None = None,
    **options: Any,
) -> None:
    """Train `factory`'s model plain and in every placement and dtype, and compare everything. With `turn`, every other
    combination of the two: those of an even number and those of an odd one are all. See crossed.ALL.
    """
    for row, dtype in enumerate(dtypes):
        for column, placement in enumerate(placements):
            if turn is not None and not ALL and (turn + row + column) % 2:
                continue
            model, fresh = make(factory, dtype), Plain(make(factory, dtype), groups)
            chosen = None if units is None else units(model)
            where = f"{str(dtype).removeprefix('torch.')}, {placement}"
            with tiered(
                model, tiers_for(model, placement, directory / where, chosen), units=chosen, groups=groups
            ) as run:
                train_both([(where, run)], fresh, steps, **options)
                assert_same(run, fresh, where)


def collected(*dead: weakref.ref[Any]) -> bool:
    """Whether all of `dead` go away, once the loop's thread has done what it has to do."""
    for _ in range(500):
        gc.collect()
        if all(ref() is None for ref in dead):
            return True
        time.sleep(0.01)
    return False
