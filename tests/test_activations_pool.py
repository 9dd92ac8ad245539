"""The pool of activations by itself: in whatever order they are saved, dropped and wanted, bytes and budgets hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from activations import PAGE
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import same

from tierzero.activations.activation_pool import ActivationPool
from tierzero.activations.activations import Activations, Moved
from tierzero.autograd.saved import Kept
from tierzero.monitoring.metrics import Metrics
from tierzero.paging.loop import LoopThread
from tierzero.paging.transfer import make_transfer
from tierzero.storage.spill import SpillFile
from tierzero.storage.store import Store
from tierzero.tiers.host import HostArena

pytestmark = pytest.mark.usefixtures("one_thread", "no_leaks")
CPU = torch.device("cpu")


@contextmanager
def a_pool(directory: Path | None, pages: int) -> Iterator[tuple[Activations, Metrics]]:
    """Activations with a pool of `pages`, over a drive or not; all of them may move."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierzero.activations.activations.LEAST", 1)
        patch.setattr("tierzero.activations.activations.IN_FLIGHT", 2 * PAGE)
        loop, metrics = LoopThread(), Metrics()
        arena = HostArena(pages * PAGE)
        store = None if directory is None else Store(directory / f"pool of {pages}")
        transfer = make_transfer(CPU, metrics, [])
        spill = None if store is None else SpillFile(store, None)
        pool = ActivationPool(arena.allocate(pages * PAGE, "activations"), spill, transfer, metrics)
        activations = Activations(pool, loop, transfer, metrics)
        try:
            yield activations, metrics
            assert activations.usage()["activations_host_peak"] <= pages * PAGE
        finally:
            activations.close()
            if store is not None:
                store.close()
            loop.close()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "view", "again", "drop", "unpack", "unpack", "spoil"]), st.integers(0, 99)
    ),
    max_size=40,
)


def act(activations: Activations, operations: list[tuple[str, int]]) -> None:
    """Do the operations, each on what its number chooses; what is unpacked must be what was saved."""
    kept: list[tuple[Kept, torch.Tensor]] = []  # and a copy
    live: list[torch.Tensor] = []
    spoilt: list[Kept] = []
    for what, number in operations:
        if what == "save":
            live.append(torch.rand(1 + number * 40))  # up to four pages
            kept.append((activations.keep(live[-1]), live[-1].clone()))
            if number % 3:
                del live[-1]
        elif what == "view" and live:
            view = live[number % len(live)][: 1 + number].view(-1, 1)
            kept.append((activations.keep(view), view.clone()))
        elif what == "again" and live:
            tensor = live[number % len(live)]
            kept.append((activations.keep(tensor), tensor.clone()))
            del live[number % len(live)]
        elif what == "spoil":
            tensor = torch.rand(1 + number * 40)
            spoilt.append(activations.keep(tensor))
            tensor.add_(1.0)
            del tensor
        elif what == "drop" and kept:
            del kept[number % len(kept)]
        elif what == "unpack" and kept:
            packed, expected = kept[number % len(kept)]
            assert same(packed.unpack(), expected)
            assert packed.unpack().stride() == expected.stride()
        used = activations.usage()
        assert used["activations_host"] <= activations.pool.capacity
    for packed in spoilt:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            packed.unpack()
    for packed, expected in reversed(kept):
        assert same(packed.unpack(), expected)


@pytest.mark.parametrize("drive", [True, False])
@pytest.mark.parametrize("pages", [1, 3, 9])
def test_any_order(pages: int, drive: bool, tmp_path: Path) -> None:
    """Pools of all sizes are empty after anything, and give back what was saved."""
    with a_pool(tmp_path if drive else None, pages) as (activations, _):

        @settings(max_examples=100, deadline=None, database=None)
        @given(OPERATIONS)
        def check(operations: list[tuple[str, int]]) -> None:
            act(activations, operations)
            activations._loop.run(activations.pool.drained())
            used = activations.usage()
            assert used["activations_host"] == used["activations_nvme"] == used["activations_waiting"] == 0

        check()


def test_backward_reads_ahead(tmp_path: Path) -> None:
    """What was written is read once, and before it is wanted, when it is wanted in the order that backward has."""
    with a_pool(tmp_path, 8) as (activations, metrics):
        tensors = [torch.full((1000,), float(index)) for index in range(24)]
        kept = [activations.keep(tensor) for tensor in tensors]
        assert all(type(one) is Moved for one in kept)
        tensors.clear()
        activations._loop.run(activations.pool.drained())
        while kept:
            packed = kept.pop()
            assert packed.unpack()[0] == len(kept)
            del packed
            activations._loop.run(activations.pool.drained())
        assert metrics.activations_offloaded == metrics.activations_restored == 24 * 4000
        assert metrics.activations_written == metrics.activations_read
        assert 16 * PAGE <= metrics.activations_written <= 17 * PAGE
        assert (metrics.activation_hits, metrics.activation_misses) == (24, 0)
