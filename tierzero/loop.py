"""The engine's asyncio loop on a thread of its own, and the two ways other threads reach it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tierzero.errors import TierzeroError

T = TypeVar("T")


class LoopThread:
    """Runs one asyncio event loop in a daemon thread; `run` waits for a coroutine, `submit` does not."""

    def __init__(self, name: str = "tierzero") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self._pid = os.getpid()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def inside(self) -> bool:
        """Whether the caller is the loop thread itself."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `coroutine` on the loop; its future. TierzeroError in a forked child, which has no loop thread."""
        if os.getpid() != self._pid:
            coroutine.close()
            raise TierzeroError(
                "an offloaded model cannot be used in a forked child: its engine runs in the parent. Read what the "
                "child needs before forking, or start the child with the spawn method"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and return its result. Never from the loop thread itself."""
        if self.inside:
            coroutine.close()
            raise RuntimeError("the loop thread cannot wait for itself; await the coroutine instead")
        return self.submit(coroutine).result()

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop call `function` soon."""
        self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Stop the loop after what is already due, and join the thread."""
        if os.getpid() != self._pid or not self._thread.is_alive() or self.inside:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
