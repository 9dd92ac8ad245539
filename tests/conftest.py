"""What all tests share: the engine's tests run on one thread and must leave no thread and no open file behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(one_thread: None) -> None:
    """Let torch compute on two threads, which exist already."""
    import torch

    torch.set_num_threads(2)
    torch.randn(1 << 17).add_(1.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: object) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


FAILED = pytest.StashKey[bool]()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if the test leaves an engine, a thread or an open file behind."""
    import torch

    import tierzero.engine

    torch.set_num_threads(2)
    torch.randn(1 << 17).add_(1.0)  # torch's own threads stay once they are there
    torch.set_num_threads(1)
    torch.zeros(2, requires_grad=True).sum().backward()  # autograd makes its threads once
    open_before, threads_before = set(os.listdir("/proc/self/fd")), set(os.listdir("/proc/self/task"))
    engines = set(map(id, tierzero.engine.ENGINES))
    yield
    gc.collect()
    left = [engine for engine in tierzero.engine.ENGINES if id(engine) not in engines and not engine.closed]
    for engine in left:
        engine.close()
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps everything alive
    assert not left, "the test did not close its engines"
    gc.collect()  # what the engines closed here held
    named = [thread.name for thread in threading.enumerate()]
    assert len(os.listdir("/proc/self/task")) <= len(threads_before), f"threads are left: {named}"
    assert len(os.listdir("/proc/self/fd")) <= len(open_before), "open files are left"
