"""Runs workers beside a test."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from fencepost import Worker
from tests.fixtures.waiting import eventually

STOP_TIMEOUT = 20.0


class Running:
    """A worker that runs in a thread; ``error`` is what `Worker.run` raised, once it has returned."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="test-worker")
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()

    async def connected(self) -> None:
        """Wait until a server has taken it, while the loop goes on: the server may be in it."""
        await eventually(lambda: self.ended or self.worker.wait_connected(0), 30)
        assert not self.ended, self.error

    async def end(self, timeout: float = STOP_TIMEOUT) -> None:
        """Wait for its end."""
        await asyncio.to_thread(self.thread.join, timeout)
        assert self.ended, "the worker does not end"

    async def stop(self, *, now: bool = False) -> None:
        """Stop it and wait for its end."""
        self.worker.stop(now=now)
        await self.end()


@contextlib.asynccontextmanager
async def running(*workers: Worker) -> AsyncIterator[list[Running]]:
    """Run workers, connected, until the block ends; they must not have raised anything."""
    started = [Running(worker) for worker in workers]
    try:
        for run in started:
            await run.connected()
        yield started
    finally:
        for run in started:
            await run.stop()
    for run in started:
        if run.error is not None:
            raise run.error
