"""What goes wrong: a sentence, nothing lost, and the next steps equal those of a plain loop that saw the same."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models import DIM, VOCAB, Block, Net
from oracle import Plain, Tiered, assert_same, batches, loss_of, make, same, tiered, tiers_for, train_both
from test_engine_optim import backward_both, pair
from torch import nn

import tierzero as tz

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")


class Trap(nn.Module):
    """Raises `error` when its countdown reaches zero, in forward or (through a hook) in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_in, self.backward_in = -1, -1
        self.error: type[BaseException] = ValueError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_in -= 1
        if self.forward_in == 0:
            raise self.error("trap in forward")
        if x.requires_grad:
            x.register_hook(self.backwards)
        return x

    def backwards(self, grad: torch.Tensor) -> None:
        self.backward_in -= 1
        if self.backward_in == 0:
            raise self.error("trap in backward")


class TrappedBlock(Block):
    """Has the trap in its middle."""

    trap: Trap

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + self.down(self.trap(F.gelu(self.up(self.trap(self.norm(x))))))


class Trapped(Net):
    """Can fail between and inside of blocks; `layers` under checkpointing if `checkpointed`."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__(block=TrappedBlock)
        self.trap = Trap()
        self.checkpointed = checkpointed
        for layer in self.layers:
            layer.trap = self.trap

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False) if self.checkpointed else layer(h)
            h = self.trap(h)
        return h


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_exceptions_at_every_position(
    checkpointed: bool, where: str, error: type[BaseException], tmp_path: Path
) -> None:
    """An exception anywhere in forward or backward; the gradients so far, and everything after, are the plain loop's
    (N5).
    """
    positions = 9 if not checkpointed else 18
    with pair(tmp_path, lambda: Trapped(checkpointed), "nvme") as (plain, run):
        for position in range(1, positions + 1):
            raised = []
            for each in (plain, run):
                trap: Any = each.model.trap
                trap.error = error
                setattr(trap, f"{where}_in", position)
                try:
                    loss_of(each.model, next(batches(1, seed=position))).backward()
                    raised.append(False)
                except error:
                    raised.append(True)
                trap.forward_in = trap.backward_in = -1
            assert raised[0] == raised[1]
            assert raised[0] or position > 9
            if position % 2:
                tz.reset(run.model)
            elif error is KeyboardInterrupt:  # what it left behind is in other models' way until the next forward
                with torch.no_grad():
                    loss_of(run.model, next(batches(1)))
            if where == "backward":
                assert_same(run, plain, f"position {position}", grads=True)  # what had arrived stays
            if position % 3 == 0:
                plain.zero_grad()
                run.model.zero_grad()
            if position % 4 == 0:
                with torch.no_grad():
                    assert same(loss_of(run.model, next(batches(1))), loss_of(plain.model, next(batches(1))))
            train_both([(f"after position {position}", run)], plain, 1, seed=100 + position)
        run.check_pools()


def test_the_next_forward_repairs_what_an_interrupt_left(tmp_path: Path) -> None:
    """After Ctrl-C no call to reset is needed: the next forward finds stale frames, and saved-tensor hooks do not pile
    up.
    """
    with pair(tmp_path, Trapped) as (plain, run):
        for position in (1, 4, 7):
            run.model.trap.error, run.model.trap.forward_in = KeyboardInterrupt, position
            with pytest.raises(KeyboardInterrupt):
                loss_of(run.model, next(batches(1)))
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        tz.reset(run.model)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        run.model.trap.forward_in = 5
        with pytest.raises(KeyboardInterrupt):
            loss_of(run.model, next(batches(1)))
        train_both([("", run)], plain, 2)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_parameters_are_at_rest_after_an_exception(tmp_path: Path) -> None:
    """After a failed forward or backward the model holds its rest parameters again: zero_grad, state_dict and clipping
    see them.
    """
    with pair(tmp_path, Trapped) as (plain, run):
        at_rest = [id(param) for param in run.model.parameters()]
        for where in ("forward", "backward"):
            setattr(run.model.trap, f"{where}_in", 4)
            run.model.trap.error = ValueError
            with pytest.raises(ValueError, match="trap"):
                loss_of(run.model, next(batches(1))).backward()
            assert [id(param) for param in run.model.parameters()] == at_rest
        run.model.zero_grad()
        assert all(param.grad is None for param in run.model.parameters())
        train_both([("", run)], plain, 1)


def test_a_failed_step_in_a_scheduler_or_closure(tmp_path: Path) -> None:
    """A closure that raises leaves the optimizer as it was."""
    with pair(tmp_path) as (plain, run):

        def closure() -> float:
            loss_of(run.model, next(batches(1))).backward()
            raise ValueError("in the closure")

        with pytest.raises(ValueError, match="in the closure"):
            run.optimizer.step(closure)
        run.zero_grad()
        train_both([("", run)], plain, 2)


# -- paged-out parameters ----------------------------------------------------------------------------------------------

USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda w: w + 1,
    "add reflected": lambda w: 1 + w,
    "mul in place": lambda w: w.detach().mul_(2.0),
    "matmul": lambda w: torch.ones(3, w.shape[0]) @ w,
    "where": lambda w: torch.where(torch.ones(w.shape, dtype=torch.bool), w, torch.zeros(w.shape)),
    "linear": lambda w: F.linear(torch.ones(2, w.shape[1]), w),
    "embedding": lambda w: F.embedding(torch.tensor([0, 1]), w),
    "index": lambda w: w[0],
    "set item": lambda w: w.__setitem__(0, 0.0),
    "iterate": lambda w: list(w),
    "sum": lambda w: w.sum(),
    "norm": lambda w: w.norm(),
    "transpose": lambda w: w.t(),
    "view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(-1)[0],
    "stack": lambda w: torch.stack([w, w]),
    "cat": lambda w: torch.cat([w, w]),
    "equal": lambda w: torch.equal(w, w),
    "compare": lambda w: w == 0,
    "bool": lambda w: bool((w > 0).all()),
    "init": lambda w: nn.init.normal_(w),
    "zero": lambda w: w.data.zero_(),
    "to vector": lambda w: nn.utils.parameters_to_vector([w]),
    "einsum": lambda w: torch.einsum("ij,kj->ik", torch.ones(2, w.shape[1]), w),
    "foreach": lambda w: torch._foreach_add([w], 1.0),
    "detached": lambda w: w.detach() * 2,
    "into": lambda w: torch.add(torch.ones(w.shape), 1, out=w.detach()),
    "torch adamw": lambda w: _torch_step(w),
}


def _torch_step(weight: torch.Tensor) -> None:
    other = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(weight.shape)
    try:
        other.step()
    finally:
        weight.grad = None


@pytest.mark.parametrize("use", USES)
def test_using_a_paged_out_parameter(use: str, tmp_path: Path) -> None:
    """Any use of a parameter outside its unit raises, naming it and the way out; never a broadcast stand-in (M1)."""
    with pair(tmp_path) as (plain, run):
        weight = run.model.layers[1].up.weight
        assert tuple(weight.shape) == (2 * DIM, DIM)
        assert weight.numel() == 2 * DIM * DIM
        assert weight.dtype == torch.float32
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(tz.TierzeroError) as caught:
                USES[use](weight)
            assert type(caught.value).__name__ == "PagedOutError"
            assert "layers.1.up.weight" in str(caught.value)
            assert "unsharded" in str(caught.value)
        train_both([("", run)], plain, 1)


LEAKY: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda w: w.detach().numpy(),
    "tolist": lambda w: w.tolist(),
    "item": lambda w: w.item(),
    "storage": lambda w: bytes(w.untyped_storage()),
    "dlpack": lambda w: torch.from_dlpack(w.detach()),
    "array": lambda w: __import__("numpy").asarray(w.detach()),
    "as_strided": lambda w: w.as_strided((2,), (1,)).sum(),
    "set_": lambda w: torch.empty(0).set_(w),
    "float": lambda w: float(w),
    "rows": lambda w: list(w),
}


@pytest.mark.parametrize("use", LEAKY)
def test_no_use_crashes(use: str, tmp_path: Path) -> None:
    """Ways around torch's dispatcher raise something; they do not read memory that is not there."""
    with pair(tmp_path) as (_, run):
        with pytest.raises((tz.TierzeroError, RuntimeError, TypeError, ValueError, NotImplementedError, BufferError)):
            LEAKY[use](run.model.head.weight)


def test_a_weight_of_another_module(tmp_path: Path) -> None:
    """A module that reads another's weight is told so, and works when both are one unit or under `unsharded` (M2)."""

    class Reader(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.linear(self.body(self.embed(ids)), self.embed.weight)

    model = make(Reader)
    with tiered(model, tiers_for(model, "nvme", tmp_path / "a")):
        with pytest.raises(tz.TierzeroError, match=r"embed\.weight.*unsharded"):
            loss_of(model, next(batches(1)))
        with pytest.raises(tz.TierzeroError, match=r"embed\.weight"):
            loss_of(model, next(batches(1)))
    plain = Plain(make(Reader))
    again = make(Reader)
    units = list(again.layers)
    with tiered(again, tiers_for(again, "nvme", tmp_path / "b", units), units=units) as run:
        train_both([("", run)], plain, 3)
        assert_same(run, plain)


def test_tracebacks_can_be_printed(tmp_path: Path) -> None:
    """A traceback's locals may hold live parameters long after their bytes went: printing them is safe."""
    kept: list[Any] = []

    class Keeps(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            kept.append(self.up.weight)
            return super().forward(x)

    model = make(lambda: Net(block=Keeps))
    with tiered(model, tiers_for(model, "nvme", tmp_path)):
        loss_of(model, next(batches(1))).backward()
    assert len(kept) == 3
    assert all("paged out" in repr(weight) and "(16, 8)" in repr(weight) for weight in kept)


# -- double backward ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["plain", "dicts", "checkpoint", "tied"])
def test_double_backward_is_refused(shape: str, tmp_path: Path) -> None:
    """create_graph=True is refused with a sentence, in backward and in autograd.grad, and training goes on."""
    with pair(tmp_path, models.SHAPES[shape]) as (plain, run):
        for attempt in (
            lambda loss, h: loss.backward(create_graph=True),
            lambda loss, h: torch.autograd.grad(loss, h, create_graph=True),
        ):
            h = (
                run.model.embed(next(batches(1))).detach().requires_grad_()
                if shape != "tied"
                else torch.randn(2, 5, DIM, requires_grad=True)
            )
            with pytest.raises(tz.TierzeroError, match="double backward"):
                attempt(run.model.body(h).pow(2).mean(), h)
        run.zero_grad()
        train_both([("", run)], plain, 2)


# -- budgets -----------------------------------------------------------------------------------------------------------


def smallest(message: str) -> int:
    """The number of bytes that an error message promises to work."""
    import re

    found = re.search(r"(?:works is |at least [^()]*\()(\d+) bytes", message)
    assert found is not None, message
    return int(found.group(1))


@pytest.mark.parametrize("shape", [*models.SHAPES])
@pytest.mark.parametrize("nvme", [False, True])
def test_budgets_that_are_too_small(nvme: bool, shape: str, tmp_path: Path) -> None:
    """The error names the smallest budget that works, one byte less does not, and that one trains (F5)."""
    factory = models.SHAPES[shape]
    where = tmp_path if nvme else None
    limits = {}
    for which in ("host", "device"):
        budgets = {"host": "1GiB", "device": "1GiB", which: 1}
        with pytest.raises(tz.BudgetError, match="smallest") as caught:
            tz.offload(make(factory), tz.Tiers(nvme=where, compute="cpu", **budgets))
        limits[which] = smallest(str(caught.value))
        with pytest.raises(tz.BudgetError) as again:
            tz.plan(make(factory), tz.Tiers(nvme=where, compute="cpu", **{**budgets, which: limits[which] - 1}))
        assert smallest(str(again.value)) == limits[which]
    model = make(factory)
    before = [id(param) for param in model.parameters()]
    with pytest.raises(tz.BudgetError):
        tz.offload(model, tz.Tiers(nvme=where, host=1, device="1GiB", compute="cpu"))
    assert [id(param) for param in model.parameters()] == before
    plain = Plain(make(factory))
    with tiered(model, tz.Tiers(nvme=where, compute="cpu", **limits)) as run:
        train_both([("", run)], plain, 2, accumulate=2)
        assert_same(run, plain)


def test_unsharding_more_than_fits(tmp_path: Path) -> None:
    """`unsharded` of the whole model names the budget that it would take."""
    with pair(tmp_path) as (plain, run):
        with pytest.raises(tz.BudgetError, match="works here") as caught, tz.unsharded(run.model):
            pass
        assert smallest(str(caught.value)) > run.engine.metrics.device_budget
        with tz.unsharded(run.model.layers[0]):
            pass
        train_both([("", run)], plain, 1)


# -- the wrong order ---------------------------------------------------------------------------------------------------


def test_wrong_order(tmp_path: Path) -> None:
    """Optimizer before offload, offload twice, frozen parameters trained later, casts afterwards: each says what to do
    (D6, F14).
    """
    model = make(Net)
    with pytest.raises(tz.TierzeroError, match="offload"):
        tz.AdamW(model.parameters())
    with pytest.raises(tz.TierzeroError, match="offload"):
        tz.stats(model)
    model.layers[0].requires_grad_(False)
    tiers = tiers_for(model, "nvme", tmp_path)
    with tiered(model, tiers):
        with pytest.raises(tz.TierzeroError, match="offloaded already"):
            tz.offload(model, tiers)
        model.layers[0].up.weight.requires_grad_(True)
        with pytest.raises(tz.TierzeroError, match=r"layers\.0\.up\.weight was frozen when offload.*before offload"):
            tz.AdamW(model.parameters())
        with pytest.raises(tz.TierzeroError, match=r"layers\.0\.up\.weight was frozen when offload"):
            loss_of(model, next(batches(1)))
        model.layers[0].requires_grad_(False)
        loss_of(model, next(batches(1))).backward()
        model.zero_grad()
    with pytest.raises(tz.TierzeroError, match=r"closed"):
        model.head.weight.read()
    with pytest.raises(tz.TierzeroError, match=r"closed"):
        loss_of(model, next(batches(1)))
    with pytest.raises(tz.TierzeroError, match=r"offloaded already"):
        tz.offload(model, tiers)
    tz.close(model)


@pytest.mark.parametrize("how", ["assign", "replace"])
def test_parameters_replaced_afterwards(how: str, tmp_path: Path) -> None:
    """Replacing parameters after offload is refused by the next forward, naming the parameter (D6, M4)."""
    model = make(Net)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with tiered(model, tiers_for(model, "host", tmp_path)):
        if how == "assign":
            model.load_state_dict(state, assign=True)
        else:
            model.layers[1].up.weight = nn.Parameter(torch.zeros(2 * DIM, DIM))
        name = "layers.1.up.weight" if how == "replace" else "embed.weight"
        with pytest.raises(tz.TierzeroError, match=rf"{name} was replaced after offload"):
            loss_of(model, next(batches(1)))


@pytest.mark.parametrize("cast", [lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.half()])
def test_casts_afterwards(cast: Any, tmp_path: Path) -> None:
    """Casting an offloaded model is refused at once, and nothing has changed (D6)."""
    with pair(tmp_path) as (plain, run):
        with pytest.raises(tz.TierzeroError, match=r"embed\.weight.*before offload"):
            cast(run.model)
        train_both([("", run)], plain, 2)


def test_assigning_data(tmp_path: Path) -> None:
    """`param.data = tensor` of the same kind writes the values."""
    with pair(tmp_path) as (plain, run):
        for model in (plain.model, run.model):
            for param in model.parameters():
                param.data = param.detach().clone() * 0.5
        for param, master in plain.masters.items():
            master.data.copy_(param)
        train_both([("", run)], plain, 2)


def test_calls_that_change_nothing_are_fine(tmp_path: Path) -> None:
    """`.to` the place where it is, `.train()`, `.float()` of float32, `.cpu()`."""
    with pair(tmp_path) as (plain, run):
        run.model.to("cpu").to(torch.device("cpu")).to(torch.float32).float().cpu().train().eval().train()
        train_both([("", run)], plain, 2)


def test_a_replaced_head(tmp_path: Path) -> None:
    """A layer rebuilt after offload is an ordinary module; the optimizer says that it is not one of ours (M4)."""
    model = make(Net)
    with tiered(model, tiers_for(model, "nvme", tmp_path)) as run:
        model.head = nn.Linear(DIM, VOCAB, bias=False)
        loss_of(model, next(batches(1))).backward()
        assert model.head.weight.grad is not None
        run.step(1.0)
        run.zero_grad()
        model.zero_grad()
        with pytest.raises(tz.TierzeroError, match="not one of an offloaded model"):
            tz.AdamW(model.parameters())


def test_optimizer_arguments(tmp_path: Path) -> None:
    """Values that make no sense are refused, and the groups stay as they were."""
    with pair(tmp_path) as (plain, run):
        for wrong in (
            {"lr": -1.0},
            {"eps": float("nan")},
            {"weight_decay": -0.1},
            {"betas": (1.0, 0.9)},
            {"betas": (0.9, -0.1)},
        ):
            with pytest.raises(ValueError):
                tz.AdamW(run.model.parameters(), **wrong)
        with pytest.raises(ValueError, match="empty"):
            tz.AdamW([])
        run.optimizer.param_groups[0]["lr"] = -1.0
        backward_both(plain, run, next(batches(1)))
        with pytest.raises(ValueError, match="lr must be zero or more"):
            run.optimizer.step()
        run.optimizer.param_groups[0]["lr"] = plain.optimizer.param_groups[0]["lr"]
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()


def test_stepping_inside_the_model(tmp_path: Path) -> None:
    """step() during a forward or inside `unsharded` is refused before anything changes."""

    class Steps(Net):
        optimizer: Any = None

        def body(self, h: torch.Tensor) -> torch.Tensor:
            if self.optimizer is not None:
                self.optimizer.step()
            return super().body(h)

    plain = Plain(make(Steps))
    model: Any = make(Steps)
    units = [model]
    with tiered(model, tiers_for(model, "nvme", tmp_path, units), units=units) as run:
        backward_both(plain, run, next(batches(1)))
        model.optimizer = run.optimizer
        with pytest.raises(tz.TierzeroError, match="running forward"):
            loss_of(model, next(batches(1)))
        model.optimizer = None
        with tz.unsharded(model), pytest.raises(tz.TierzeroError, match="unsharded"):
            run.optimizer.step()
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()
        train_both([("", run)], plain, 1)
        assert_same(run, plain)


def test_models_that_cannot_be_offloaded(tmp_path: Path) -> None:
    """Sparse gradients, dtypes that do not train, no parameters, lazy parameters."""
    tiers = tz.Tiers(host="64MiB", device="64MiB", compute="cpu")
    with pytest.raises(tz.TierzeroError, match="no parameters"):
        tz.offload(nn.ReLU(), tiers)
    with pytest.raises((tz.TierzeroError, ValueError), match="float64"):
        tz.offload(nn.Linear(2, 2).double(), tiers)
    with pytest.raises((tz.TierzeroError, ValueError), match=r"(?i)uninitialized"):
        tz.offload(nn.LazyLinear(3), tiers)
    with pytest.raises(TypeError, match=r"tierzero\.Tiers"):
        tz.offload(nn.Linear(2, 2), {"host": "1GiB"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="units="):
        tz.offload(nn.Linear(2, 2), tiers, units=nn.Conv1d)
    model = nn.Embedding(10, 3, sparse=True)
    tz.offload(model, tiers)
    try:
        with pytest.raises(tz.TierzeroError, match=r"weight got a sparse gradient.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
    finally:
        tz.close(model)


# -- non-finite gradients ----------------------------------------------------------------------------------------------


def snapshot_of(run: Tiered) -> dict[str, torch.Tensor]:
    """Every byte of parameters and states."""
    found = {name: param.read() for name, param in run.model.named_parameters()}
    for name, param in run.model.named_parameters():
        for part, value in run.optimizer.state[param].items():
            found[f"{name} {part}"] = value.read() if hasattr(value, "read") else value.clone()
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_non_finite_gradients(
    placement: str, dtype: torch.dtype, value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step with one bad element anywhere changes no byte, is counted, logged with the parameter's name, and training
    goes on (C16).
    """
    with pair(tmp_path, placement=placement, dtype=dtype) as (plain, run):
        train_both([("", run)], plain, 2)
        names = [name for name, _ in run.model.named_parameters()]
        for index in (0, len(names) // 2, len(names) - 1):
            before = snapshot_of(run)
            loss_of(run.model, next(batches(1))).backward()
            param = list(run.model.parameters())[index]
            param.grad.view(-1)[-1] = value
            tz.clip_grad_norm_(run.model.parameters(), 1.0)
            with caplog.at_level(logging.WARNING, "tierzero"):
                run.optimizer.step()
            assert f"the gradient of {names[index]} is not finite" in caplog.text
            run.zero_grad()
            after = snapshot_of(run)
            assert all(same(before[key], after[key]) for key in before)
        assert tz.stats(run.model)["skipped_steps"] == 3
        train_both([("", run)], plain, 2)


def test_an_error_after_too_many_skipped_steps(tmp_path: Path) -> None:
    """N in a row are an error that names the parameter; a good step in between starts the count again (C17)."""
    with pair(tmp_path) as (plain, run):
        run.optimizer.max_skipped_steps = 3

        def bad() -> None:
            loss_of(run.model, next(batches(1))).backward()
            run.model.head.weight.grad[0, 0] = float("nan")
            try:
                run.optimizer.step()
            finally:
                run.zero_grad()

        for _ in range(2):
            bad()
        train_both([("", run)], plain, 1)
        for _ in range(2):
            bad()
        with pytest.raises(tz.NonFiniteGradientError, match=r"3 steps in a row.*head\.weight"):
            bad()
        train_both([("", run)], plain, 1)


def test_large_but_finite_gradients_are_stepped(tmp_path: Path) -> None:
    """A norm that overflows float32 is no reason to skip when every element is finite."""
    with pair(tmp_path) as (plain, run):
        for each in (plain, run):
            for param in each.model.parameters():
                param.grad = torch.full(param.shape, 3e38)
        plain.step()
        run.step()
        plain.zero_grad()
        run.zero_grad()
        assert tz.stats(run.model)["skipped_steps"] == 0


def test_dropping_a_model_without_close(tmp_path: Path) -> None:
    """A model that is simply dropped takes its threads and files with it."""
    import weakref

    model = make(Net)
    tz.offload(model, tiers_for(model, "nvme", tmp_path))
    optimizer = tz.AdamW(model.parameters())
    loss_of(model, next(batches(1)))
    loss_of(model, next(batches(1))).backward()
    tz.synchronize(model)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
