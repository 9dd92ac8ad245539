"""The host arena: never above its budget, never two blocks over the same bytes, pinned in pieces."""

from __future__ import annotations

import threading
from itertools import pairwise

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierzero.errors import BudgetError
from tierzero.storage.extents import FreeList
from tierzero.tiers import host
from tierzero.tiers.host import Block, HostArena

PAGE = 4096


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 9 * PAGE), st.tuples(st.integers(0, 20))), max_size=40))
def test_blocks_never_overlap_and_the_budget_is_never_exceeded(actions: list[int | tuple[int]]) -> None:
    arena = HostArena(24 * PAGE, pin=False)
    blocks: list[Block] = []
    peak = 0
    for number, action in enumerate(actions):
        if isinstance(action, tuple):
            if blocks:
                blocks.pop(action[0] % len(blocks)).free()
        else:
            if arena._free.largest < action:
                with pytest.raises(BudgetError, match=f"budget of {arena.budget} .* for block {number}:"):
                    arena.allocate(action, f"block {number}")
                continue
            block = arena.allocate(action, f"block {number}")
            assert block.tensor.numel() == action
            assert action == 0 or block.tensor.data_ptr() % PAGE == 0
            block.tensor.fill_(number % 256)
            block.number = number  # type: ignore[attr-defined]
            blocks.append(block)
        used = sum(-(-block.nbytes // PAGE) * PAGE for block in blocks)
        peak = max(peak, used)
        assert arena.used == used <= arena.budget
    assert arena.peak == peak
    for block in blocks:
        assert (block.tensor == block.number % 256).all()  # type: ignore[attr-defined]
        block.free()
        block.free()
    assert arena.used == 0
    assert arena.allocate(arena.budget, "everything").tensor.numel() == arena.budget


def test_the_error_names_the_largest_run_when_the_space_is_in_pieces() -> None:
    arena = HostArena(4 * PAGE, pin=False)
    blocks = [arena.allocate(PAGE, "a") for _ in range(4)]
    blocks[0].free()
    blocks[2].free()
    with pytest.raises(BudgetError, match=f"largest run of them {PAGE}"):
        arena.allocate(2 * PAGE, "b")


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        HostArena(-1)
    with pytest.raises(ValueError, match="-5"):
        HostArena(PAGE, pin=False).allocate(-5, "x")
    assert HostArena(0).allocate(0, "nothing").tensor.numel() == 0


def test_threads_share_an_arena() -> None:
    arena = HostArena(64 * PAGE, pin=False)
    failures: list[int] = []

    def work(value: int) -> None:
        for _ in range(200):
            block = arena.allocate(3 * PAGE + value, "thread")
            block.tensor.fill_(value)
            if not (block.tensor == value).all():
                failures.append(value)
            block.free()

    threads = [threading.Thread(target=work, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert arena.used == 0


class Registrar:
    """Stands for the CUDA runtime; the `fail`-th registration is refused."""

    def __init__(self, fail: int = -1) -> None:
        self.fail = fail
        self.calls = 0
        self.live: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.fail:
            return 2
        self.live[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.live[address]
        return 0


def test_pinning_goes_in_pieces_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = Registrar()
    monkeypatch.setattr(host, "PIECE", 4 * PAGE)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registrar)
    arena = HostArena(10 * PAGE, pin=True)
    assert arena.pinned
    assert sorted(registrar.live.values()) == [2 * PAGE, 4 * PAGE, 4 * PAGE]
    arena.close()
    arena.close()
    assert not registrar.live
    assert not arena.pinned


def test_pinning_that_fails_is_a_warning_and_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = Registrar(fail=2)
    monkeypatch.setattr(host, "PIECE", 4 * PAGE)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registrar)
    with pytest.warns(RuntimeWarning, match="CUDA error 2"):
        arena = HostArena(10 * PAGE, pin=True)
    assert not arena.pinned
    assert not registrar.live
    arena.allocate(PAGE, "still works").tensor.fill_(1)


def test_untouched_memory_costs_nothing() -> None:
    before = psutil.Process().memory_info().rss
    arena = HostArena(2 << 30, pin=False)
    arena.allocate(1 << 30, "half").tensor[:PAGE].fill_(1)
    assert psutil.Process().memory_info().rss - before < 64 << 20


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(0, 30)), max_size=60), st.booleans())
def test_free_list_against_a_bitmap(actions: list[tuple[bool, int, int]], first: bool) -> None:
    space = FreeList(32 * PAGE)
    taken: dict[int, int] = {}
    for give, pages, where in actions:
        if give and taken:
            offset = sorted(taken)[where % len(taken)]
            space.give(offset, taken.pop(offset))
        elif where % 3 == 0:
            free = all(o + n <= where * PAGE or o >= (where + pages) * PAGE for o, n in taken.items())
            inside = (where + pages) * PAGE <= space.size
            assert space.take_at(where * PAGE, pages * PAGE) == (pages == 0 or (free and inside))
            if pages and free and inside:
                taken[where * PAGE] = pages * PAGE
        else:
            offset_or_none = space.take(pages * PAGE, first=first)
            if offset_or_none is not None and pages:
                assert all(o + n <= offset_or_none or o >= offset_or_none + pages * PAGE for o, n in taken.items())
                taken[offset_or_none] = pages * PAGE
        runs = space.runs()
        assert all(a + n < b for (a, n), (b, _) in pairwise(runs))  # apart, so coalesced
        assert sum(n for _, n in runs) == space.free_bytes == space.size - sum(taken.values())
        assert space.largest == max((n for _, n in runs), default=0)
    for offset, nbytes in taken.items():
        space.give(offset, nbytes)
        with pytest.raises(ValueError, match="freed twice"):
            space.give(offset, nbytes)
    assert space.runs() == [(0, space.size)]
    space.grow(40 * PAGE)
    assert space.tail == 40 * PAGE
    assert space.shrink() == 0
