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
def no_leaks(tmp_path: object) -> Iterator[None]:
    """Fail if the test leaves an engine, a thread or an open file behind."""
    import torch

    import tierzero.engine

    torch.zeros(2, requires_grad=True).sum().backward()  # autograd makes its threads once
    open_before, threads_before = set(os.listdir("/proc/self/fd")), set(os.listdir("/proc/self/task"))
    engines = set(tierzero.engine._ENGINES)
    yield
    left = [engine for engine in tierzero.engine._ENGINES if engine not in engines]
    for engine in left:
        engine.close()
    assert not left, "the test did not close its engines"
    gc.collect()
    named = [thread.name for thread in threading.enumerate()]
    assert len(os.listdir("/proc/self/task")) <= len(threads_before), f"threads are left: {named}"
    assert len(os.listdir("/proc/self/fd")) <= len(open_before), "open files are left"
