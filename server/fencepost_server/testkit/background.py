"""The thread in which the kit's servers live, one for the process.

It has an event loop of its own, so that a test which blocks its thread or its loop stops no server, and so that tests
with and without a loop are served alike. It also starts PostgreSQL, which the kernel ends with the thread that started
it: so it lives as long as the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """A thread with a loop, until the end of the process."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="fencepost-testkit", daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Its loop."""
        assert self._loop is not None  # the constructor has waited for it
        return self._loop

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin ``work`` there, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Do ``work`` there and wait for it in this thread. Raises what it raises, TimeoutError."""
        future = self.submit(work)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    async def await_(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` there and wait for it in the running loop, whichever that is; a cancel reaches it."""
        return await asyncio.wrap_future(self.submit(work))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            self._loop = runner.get_loop()
            self._loop.call_soon(self._started.set)
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_forever()


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
