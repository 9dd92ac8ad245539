"""What all tests share: the engine's tests run on one thread and must leave no thread and no open file behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tierzero.native import NATIVE

collect_ignore_glob = [] if NATIVE is not None else ["test_native_*.py", "test_io_*.py"]


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


def pytest_configure() -> None:
    """Tests that interrupt themselves hear of it also where all of them run in the background."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that at the end no process waits for one that has just begun it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: object) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="module")
def small_heap() -> None:
    """What is loaded already is left out of collections, which every test makes."""
    import torch._dynamo  # noqa: F401 - the first optimizer loads it

    gc.collect()
    gc.freeze()


def _still_open(before: set[int]) -> list[object]:
    """Engines made since; the caller keeps none of them while it waits for them to go."""
    import tierzero.engine

    return [engine for engine in tierzero.engine.ENGINES if id(engine) not in before and not engine.closed]


def _open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest, small_heap: None) -> Iterator[None]:
    """Fail if the test leaves an engine, a thread or an open file behind."""
    import torch

    import tierzero.engine

    torch.set_num_threads(2)
    torch.randn(1 << 17).add_(1.0)  # torch's own threads stay once they are there
    torch.set_num_threads(1)
    torch.zeros(2, requires_grad=True).sum().backward()  # autograd makes its threads once
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    engines = set(map(id, tierzero.engine.ENGINES))
    yield
    for _ in range(500):  # what the loop's thread has still to do keeps an engine for a moment
        gc.collect()
        gc.collect()  # what finalizers of the first pass let go of
        if not _still_open(engines):
            break
        time.sleep(0.01)
    left = _still_open(engines)
    for engine in left:
        engine.close()
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps everything alive
    assert not left, "the test did not close its engines"

    def settled(directory: str, most: int) -> bool:
        """Whether it has at most so many entries within ten seconds: the kernel lists a joined thread, and what one
        that has just ended was closing, for a moment more.
        """
        until = time.monotonic() + 10
        while len(os.listdir(directory)) > most:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    names = [thread.name for thread in threading.enumerate()]
    assert settled("/proc/self/task", threads), f"threads are left: {names}"
    assert settled("/proc/self/fd", files), f"open files are left, among {_open_files()}"


@pytest.fixture
def small_activations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move activations however small they are, and let few of them wait."""
    monkeypatch.setattr("tierzero.activations.activations.LEAST", 1)
    monkeypatch.setattr("tierzero.activations.activations.IN_FLIGHT", 4096)


# where the modules keep their reference to the extension
_HOMES = (
    *(
        "checkpoint.saving",
        "storage.checksum",
        "engine",
        "planning.planner",
        "units.records",
        "units.refit",
        "tiers.host",
        "tiers.nvme",
    ),
    *("optim.adamw", "optim.norms"),
)


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as it is without its extension."""
    import importlib

    for name in _HOMES:
        monkeypatch.setattr(importlib.import_module(f"tierzero.{name}"), "NATIVE", None)
