"""The engine's asyncio loop on a thread of its own, and how other threads reach it.

Note [signals]
A signal handler written in Python (Ctrl-C, an alarm) may raise out of the main thread between any two of its bytecodes,
but out of no other thread. Masking signals does not help: whichever thread takes one, its handler runs in the main
thread. So three rules hold in the engine:
- What takes more than one operation to change is changed on the loop thread. The main thread asks and waits; whether an
  exception ends the wait or not, the change is made whole or not at all.
- What the main thread changes itself takes one operation that cannot be torn (a dict's item, a slot) and is done in the
  safe order: bytes are there before anybody can reach them, and stay until nobody can. What an exception leaves is
  tidied up by `reset` or the next forward, which may be interrupted too.
- Each wait has a lock of its own, which is left behind when an exception ends the wait. (A Condition, and with it a
  concurrent Future, can be left locked for ever.) What was waited for goes on, and the same thread's next request is
  served after it, so nothing starts on half-finished work.

Note [cores]
The training thread must not lose its core to a loop that it wakes. asyncio's own `call_soon_threadsafe` writes to a
socket, at which Linux takes it that the writer is about to sleep, and wakes the loop on the same core even while
another one idles: so calls are queued here, and an eventfd wakes it. Where there is no other core, or the cores are a
virtual machine's, which look taken when they idle, neither the loop nor the threads that help it push the training
thread aside: their slices are longer than an ordinary thread's, and shorter than those of the threads that compute
updates, whose core they take. And the training thread keeps the interpreter's lock as it rings: let go of, the loop
would have it at once, and the training thread not before the loop is through.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from tierzero.errors import TierzeroError
from tierzero.native import NATIVE

SLICE = 0.01  # seconds; see Note [cores]
T = TypeVar("T")


class Answer(Generic[T]):
    """What one thread waits for and the loop gives it, once."""

    __slots__ = ("_error", "_gate", "_value", "given")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.given = False
        self._value: Any = None
        self._error: BaseException | None = None

    def give(self, value: Any = None, error: BaseException | None = None) -> None:
        """Let the waiting thread go on, with a result or an exception."""
        self._value, self._error, self.given = value, error, True
        self._gate.release()

    def wait(self) -> None:
        """Return when it was given; a signal handler's exception comes through."""
        self._gate.acquire()

    def result(self) -> T:
        """What was given, once; raises it if it is an exception."""
        if self._error is None:
            value: T = self._value
            return value
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # it refers to this frame


class LoopThread:
    """Runs one asyncio event loop in a daemon thread. `run` and `do` wait, `call` does not. See Note [signals]."""

    def __init__(self, name: str = "tierzero") -> None:
        self._latest: dict[int, asyncio.Task[None]] = {}  # thread -> its request that is not finished
        self._asking: dict[int, Answer[Any]] = {}  # thread -> the answer it has asked for and not yet got
        self._calls: deque[Callable[[], object]] = deque()
        self._bell = -1  # an eventfd, see Note [cores]
        try:
            self.loop = asyncio.new_event_loop()
            self._bell = os.eventfd(0)
            self.loop.add_reader(self._bell, self._answer_bell)
            helpers = ThreadPoolExecutor(thread_name_prefix=name, initializer=_long_slices)
            self.loop.set_default_executor(helpers)
            self._thread = threading.Thread(target=self._main, name=name, daemon=True)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            self._give_back()
            raise TierzeroError(
                f"the engine's thread cannot be started: {error}. Close what is not needed, or allow more open files "
                "(ulimit -n) and threads (ulimit -u)"
            ) from error
        self._pid = os.getpid()
        self._open = True  # Thread.is_alive() would do, but cut short it takes the thread for dead

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        _long_slices()
        self.loop.run_forever()
        self._give_back()
        for answer in list(self._asking.values()):
            if not answer.given:
                answer.give(error=self._gone())

    def _give_back(self) -> None:
        bell, self._bell = self._bell, -1  # a thread that comes late rings nothing else that gets the number
        if hasattr(self, "loop"):
            self.loop.close()
        if bell >= 0:
            os.close(bell)

    def _queue(self, function: Callable[[], object]) -> None:
        self._calls.append(function)
        if NATIVE is not None:
            NATIVE.ring(self._bell)  # no other thread comes between the look at the number and its use
        else:
            os.eventfd_write(self._bell, 1)

    def _answer_bell(self) -> None:
        os.eventfd_read(self._bell)
        for _ in range(len(self._calls)):
            function = self._calls.popleft()
            try:
                function()
            except BaseException as error:  # as asyncio does: the loop goes on
                self.loop.call_exception_handler({"message": "a call on tierzero's loop failed", "exception": error})

    @property
    def inside(self) -> bool:
        """Whether the caller is the loop thread itself."""
        return threading.current_thread() is self._thread

    @property
    def _is_here(self) -> bool:
        """Whether there is a loop to ask: not after close(), not in a forked child."""
        return self._open and os.getpid() == self._pid

    @property
    def unfinished(self) -> bool:
        """Whether a request of this thread may go on that an exception kept it from waiting for."""
        return threading.get_ident() in self._asking

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and return its result. Never from the loop thread itself. TierzeroError in a
        forked child, which has no loop thread, and when the loop is closed before the coroutine is through.
        """
        if self.inside:
            coroutine.close()
            raise RuntimeError("the loop thread cannot wait for itself; await the coroutine instead")
        answer: Answer[T] = Answer()
        thread = threading.get_ident()
        if not self._is_here:
            coroutine.close()
        self._ask(thread, lambda: self._start(thread, coroutine, answer), answer)
        return answer.result()

    def do(self, function: Callable[[], T]) -> T:
        """Call `function` on the loop and return its result."""
        answer: Answer[T] = Answer()
        thread = threading.get_ident()

        def serve() -> None:
            if thread in self._latest:
                self._start(thread, _calling(function), answer)
                return
            try:
                value = function()
            except BaseException as error:
                answer.give(error=error)
            else:
                answer.give(value)

        self._ask(thread, serve, answer)
        return answer.result()

    def _ask(self, thread: int, serve: Callable[[], None], answer: Answer[Any]) -> None:
        self._asking[thread] = answer
        self.call(serve)
        answer.wait()
        self._asking.pop(thread, None)

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop call `function` soon. TierzeroError in a forked child and after close()."""
        if not self._is_here:
            raise self._gone()
        try:
            self._queue(function)
        except (OSError, ValueError):  # another thread has closed it since
            raise self._gone() from None

    def _gone(self) -> TierzeroError:
        return TierzeroError(
            "an offloaded model cannot be used in a forked child: its engine runs in the parent. Read what the "
            "child needs before forking, or start the child with the spawn method"
            if os.getpid() != self._pid
            else "the engine of this model was closed"
        )

    def _start(self, thread: int, coroutine: Coroutine[Any, Any, T], answer: Answer[T]) -> None:
        before = self._latest.get(thread)
        self._latest[thread] = self.loop.create_task(self._serve(thread, before, coroutine, answer))

    async def _serve(
        self, thread: int, before: asyncio.Task[None] | None, coroutine: Coroutine[Any, Any, T], answer: Answer[T]
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        value, failure = None, None
        try:
            value = await coroutine
        except BaseException as error:
            failure = error
        if answer.given:  # the loop was closed, and this is what is left being thrown away
            return
        if self._latest.get(thread) is asyncio.current_task():
            del self._latest[thread]
        answer.give(value, failure)
        del failure  # it refers to this frame

    def close(self) -> None:
        """Stop the loop after what is already due, and join the thread; the loop's own thread stops and goes on."""
        if not self._is_here:
            return
        self._open = False
        if self.inside:  # the last reference to a model was the loop's
            self.loop.stop()
            return
        self._queue(self.loop.stop)
        self._thread.join()


def _long_slices() -> None:
    if NATIVE is not None:
        NATIVE.set_slice(SLICE)


async def _calling(function: Callable[[], T]) -> T:
    return function()
