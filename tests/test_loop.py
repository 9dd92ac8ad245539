"""The loop thread: answers, exceptions, waits that a signal ends, and what comes after them."""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tierzero.errors import TierzeroError
from tierzero.native import NATIVE
from tierzero.paging.loop import LoopThread


class Alarm(Exception):
    pass


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture
def alarm() -> Iterator[None]:
    def handler(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


async def value(result: int) -> int:
    await asyncio.sleep(0)
    return result


async def failure(error: BaseException) -> None:
    raise error


def interrupt(work: Callable[[], object]) -> None:
    """Run `work`, which takes for ever, until the alarm."""
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    work()


def test_results_and_exceptions(thread: LoopThread) -> None:
    assert thread.run(value(3)) == 3
    assert thread.do(lambda: threading.current_thread() is not threading.main_thread())
    for error in (ValueError("no"), asyncio.CancelledError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            thread.run(failure(error))
        assert not thread.unfinished
    with pytest.raises(ZeroDivisionError):
        thread.do(lambda: 1 // 0)
    assert not thread.unfinished


def test_the_loop_cannot_wait_for_itself(thread: LoopThread) -> None:
    async def inside() -> None:
        thread.run(value(1))

    with pytest.raises(RuntimeError, match="cannot wait for itself"):
        thread.run(inside())


def test_after_close() -> None:
    thread = LoopThread()
    thread.close()
    thread.close()
    with pytest.raises(TierzeroError, match="closed"):
        thread.run(value(1))
    with pytest.raises(TierzeroError, match="closed"):
        thread.do(lambda: 1)


def test_calls_come_in_order_from_every_thread(thread: LoopThread) -> None:
    seen: list[tuple[int, int]] = []

    def call(caller: int) -> None:
        for number in range(500):
            thread.call(functools.partial(seen.append, (caller, number)))

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    thread.do(lambda: None)
    for caller in range(4):
        assert [number for who, number in seen if who == caller] == list(range(500))


@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()])
def test_a_call_that_fails_stops_no_other(thread: LoopThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    told: list[BaseException] = []
    thread.do(lambda: thread.loop.set_exception_handler(lambda _, context: told.append(context["exception"])))
    seen: list[int] = []

    def several() -> None:  # all are due at once
        for work in (fail, lambda: seen.append(1), fail, lambda: seen.append(2)):
            thread.call(work)

    thread.do(several)
    assert thread.run(value(3)) == 3
    assert seen == [1, 2]
    assert told == [error, error]


def test_a_call_wakes_a_loop_that_sleeps(thread: LoopThread) -> None:
    for _ in range(50):
        done = threading.Event()
        time.sleep(0.001)
        thread.call(done.set)
        assert done.wait(10)


def test_slices_and_bells() -> None:
    if NATIVE is None:
        pytest.skip("the native extension is not there")
    for wrong in (0.0, -1.0, 0.2, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"0\.0001 to 0\.1"):
            NATIVE.set_slice(wrong)
    with pytest.raises(OSError, match="Bad file descriptor"):
        NATIVE.ring(-1)
    bell = os.eventfd(0)
    NATIVE.ring(bell)
    NATIVE.ring(bell)
    assert os.eventfd_read(bell) == 2
    os.close(bell)


def test_a_wait_that_a_signal_ends(thread: LoopThread, alarm: None) -> None:
    """What was waited for goes on, and the same thread's next requests come after it; other threads' do not wait."""
    order: list[str] = []
    gate = thread.do(asyncio.Event)

    async def slow() -> None:
        await gate.wait()
        order.append("slow")

    for _ in range(3):
        with pytest.raises(Alarm):
            interrupt(lambda: thread.run(slow()))
        assert thread.unfinished
    with pytest.raises(Alarm):
        interrupt(lambda: thread.do(lambda: order.append("after")))
    other = threading.Thread(target=lambda: thread.do(lambda: order.append("other")))
    other.start()
    other.join()
    assert order == ["other"]
    thread.call(gate.set)
    assert thread.run(value(4)) == 4
    assert order == ["other", "slow", "slow", "slow", "after"]
    assert not thread.unfinished


class Late(collections.deque[Any]):
    """A thread's calls that are queued only when told, after the thread has seen the loop open."""

    def __init__(self) -> None:
        super().__init__()
        self.came, self.go = threading.Event(), threading.Event()

    def append(self, item: Any) -> None:
        if threading.current_thread().name == "late":
            self.came.set()
            assert self.go.wait(30)
        super().append(item)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("ask", [lambda loop: loop.do(lambda: 1), lambda loop: loop.call(lambda: 1)])
def test_a_call_that_comes_after_close_writes_nowhere(
    ask: Callable[[LoopThread], Any], native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even into a file that has got the number of the loop's bell."""
    if not native:
        monkeypatch.setattr("tierzero.paging.loop.NATIVE", None)
    loop = LoopThread("test-loop")
    loop._calls = late = Late()
    bell = loop._bell
    errors: list[BaseException] = []
    asking = threading.Thread(target=lambda: errors.append(raised_by(lambda: ask(loop))), name="late")
    asking.start()
    assert late.came.wait(30)
    loop.close()
    with (tmp_path / "file").open("wb") as file:
        if file.fileno() != bell:
            os.dup2(file.fileno(), bell)
        late.go.set()
        asking.join(30)
        if file.fileno() != bell:
            os.close(bell)
    assert [type(error) for error in errors] == [TierzeroError]
    assert "closed" in str(errors[0])
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_who_waits_when_it_is_closed_is_told() -> None:
    loop = LoopThread("test-loop")
    started = threading.Event()
    errors: list[BaseException] = []

    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    asking = threading.Thread(target=lambda: errors.append(raised_by(lambda: loop.run(endless()))), daemon=True)
    asking.start()
    assert started.wait(30)
    loop.close()
    asking.join(30)
    assert [type(error) for error in errors] == [TierzeroError]
    assert "closed" in str(errors[0])


def test_closed_by_its_own_thread() -> None:
    """As when the loop held the last reference to a model: thread and files are given back."""
    before = set(os.listdir("/proc/self/fd"))
    loop = LoopThread("test-loop")
    loop.call(loop.close)
    loop._thread.join(30)
    assert not loop._thread.is_alive()
    assert loop.loop.is_closed()
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(TierzeroError, match="closed"):
        loop.do(lambda: 1)


@pytest.mark.parametrize("what", ["asyncio.new_event_loop", "os.eventfd", "threading.Thread.start"])
def test_one_that_cannot_start_leaves_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread") if "Thread" in what else OSError(24, "Too many open files")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(what, fail)
    with pytest.raises(TierzeroError, match="allow more open files"):
        LoopThread("test-loop")
    assert set(os.listdir("/proc/self/fd")) == before


def raised_by(work: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as raised:
        work()
    return raised.value
