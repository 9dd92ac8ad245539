"""The loop thread: answers, exceptions, waits that a signal ends, and what comes after them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from tierzero.errors import TierzeroError
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
