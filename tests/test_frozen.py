"""A moment of training, read while training goes on: its bytes are those of the moment, and training never notices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed
from frozen import Contents, Reader, assert_let_go, contents_of, differing
from models import SHAPES, Net
from oracle import Tiered, batches, loss_of, make, same, tiered
from other_optimizers import Lion, TieredOther, fitted
from test_overlap import tiers_of
from test_state_formats import FORMATS
from test_state_formats import tiers as format_tiers
from torch import optim

import tierzero as tz
from tierzero.checkpoint.frozen import freeze
from tierzero.native import NATIVE

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
native = pytest.mark.skipif(NATIVE is None, reason="needs the native extension")
MOMENTS = ("after step", "mid-accumulation", "before step")
Losses = list[torch.Tensor]


def train(run: Any, at: Callable[[int, str], None], steps: int = 4, accumulate: int = 2, clip: bool = True) -> Losses:
    """The losses of a loop that tells each moment; the gradients of every other step are clipped."""
    losses: Losses = []
    data = batches(steps * accumulate)
    for step in range(steps):
        for micro in range(accumulate):
            loss = loss_of(run.model, next(data))
            (loss / accumulate).backward()
            losses.append(loss.detach())
            at(step, "mid-accumulation" if micro + 1 < accumulate else "before step")
        run.step(0.1 if clip and step % 2 else None)
        run.zero_grad()
        at(step, "after step")
    return losses


def check(make_run: Callable[[str], Any], moment: str, *, late: bool, when: int = 1, clip: bool = True) -> Reader:
    """Freeze one of two equal runs; the other one says what the moment was, and how training goes on."""
    twin, run = make_run("twin"), make_run("frozen")
    expected: Contents = {}
    readers: list[Reader] = []

    def note(step: int, now: str) -> None:
        if (step, now) == (when, moment):
            expected.update(contents_of(twin))

    def begin(step: int, now: str) -> None:
        if (step, now) == (when, moment):
            readers.append(Reader(run.engine, freeze(run.engine), late=late))

    assert all(map(same, train(run, begin, clip=clip), train(twin, note, clip=clip)))
    tz.synchronize(run.model)
    found = readers[0].finish()
    assert differing(found, expected) == []
    assert differing(contents_of(run), contents_of(twin)) == []
    assert_let_go(run.engine)
    return readers[0]


@native
@pytest.mark.parametrize(
    ("placement", "moment", "overlap"),
    crossed(["nvme", "cached", "mixed", "host"], MOMENTS, two=("eager", "deferred")),
)
def test_the_bytes_of_the_moment(overlap: str, placement: str, moment: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if overlap == "eager" or placement == "mixed" else torch.float32
    for late in (True, False) if placement == "mixed" else (True,):
        with ExitStack() as stack:

            def make_run(name: str, late: bool = late, stack: ExitStack = stack) -> Tiered:
                model = make(SHAPES["tied"], dtype)
                tiers = tiers_of(model, placement, tmp_path / f"{late} {name}")
                return stack.enter_context(tiered(model, tiers, overlap=overlap))

            reader = check(make_run, moment, late=late, clip=overlap == "deferred")
            if late and placement == "host":
                assert reader.waited
            if late and placement == "nvme" and moment == "after step":
                assert reader.waited == []  # the store keeps the moment, and nobody waits


@native
@pytest.mark.parametrize("placement", ["nvme", "cached", "host"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_state_format(name: str, placement: str, tmp_path: Path) -> None:
    with ExitStack() as stack:

        def make_run(where: str) -> Tiered:
            model = make(Net, torch.bfloat16)
            return stack.enter_context(
                tiered(model, format_tiers(model, placement, tmp_path / where, name), **FORMATS[name])
            )

        check(make_run, "after step", late=True)


OTHERS: dict[str, Any] = {"SGD": optim.SGD, "Adam": optim.Adam, "Lion": Lion}


@pytest.mark.parametrize(("name", "moment", "placement"), crossed(OTHERS, MOMENTS, two=("nvme", "host")))
def test_wrapped_optimizers(name: str, moment: str, placement: str, tmp_path: Path) -> None:
    cls = OTHERS[name]
    hyper = {"lr": 0.05, "momentum": 0.9} if cls is optim.SGD else {"lr": 1e-2}
    runs: list[TieredOther] = []

    def make_run(name: str) -> TieredOther:
        runs.append(fitted(lambda: make(Net, torch.bfloat16), placement, tmp_path / name, cls, **hyper))
        return runs[-1]

    try:
        check(make_run, moment, late=True, when=0 if cls is Lion else 1)  # the first step makes the states
        for run in runs:
            run.check_pools()
    finally:
        for run in runs:
            run.engine.close()
