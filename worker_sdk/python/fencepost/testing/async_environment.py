"""What an async test has: a server, a client of it, workers for it, and its time."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar, overload

from fencepost.async_client import AsyncClient
from fencepost.policies import Seconds
from fencepost.steps import Step
from fencepost.testing.clients import BridgedClient
from fencepost.testing.kit import AnyRun, Kit, id_of
from fencepost.testing.workers import Patience, make_worker
from fencepost.worker import Worker

T = TypeVar("T")


class AsyncEnvironment:
    """A server of the test's own. Made by `TestServer.start` and by the fixture `fencepost_env`.

    ``client`` works in any loop; it needs no closing. All time-outs here are in seconds of the test's time, not of the
    server's.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self.client: AsyncClient = BridgedClient(kit)

    @property
    def address(self) -> str:
        """host:port of the server's gRPC, for a program that connects by itself."""
        return self._kit.address

    @property
    def dsn(self) -> str:
        """The connection string of the server's database, to look into it. It goes with the environment."""
        return self._kit.dsn

    @contextlib.asynccontextmanager
    async def worker(
        self, steps: Sequence[Step[..., Any]] = (), *, workflows: Sequence[Any] = (), **options: Any
    ) -> AsyncIterator[Worker]:
        """A worker within the block, connected when it begins; async steps run in the test's loop.

        ``options`` are those of `Worker`. With ``always_replay=True`` it forgets each run after every turn, so that
        all of it is replayed at the next event. At the block's end steps may finish for two seconds
        (``drain_timeout``); if the block raises, they are cut off. Raises what `Worker.run_async` raises.
        """
        worker = make_worker(self.address, steps, workflows, options)
        running = asyncio.create_task(worker.run_async(), name="fencepost-test-worker")
        cut_off = True
        try:
            patience = Patience()
            while not worker.wait_connected(0) and not running.done():
                await asyncio.wait({running}, timeout=patience.pause())
            if not running.done():
                yield worker
            cut_off = False
        finally:
            worker.stop(now=cut_off)
            await running

    async def run(
        self, workflow: Any, input: object = None, *, type: Any = Any, timeout: float | None = 60.0, **options: Any
    ) -> Any:
        """Start a run and return its `result`. ``workflow`` is an id or a function with `@workflow`; ``options`` are
        those of `AsyncClient.start_run`.
        """
        handle = await self.client.start_run(workflow, input, **options)
        return await self.result(handle, type=type, timeout=timeout)

    @overload
    async def result(self, run: AnyRun, *, timeout: float | None = 60.0) -> Any: ...
    @overload
    async def result(self, run: AnyRun, *, type: type[T], timeout: float | None = 60.0) -> T: ...
    async def result(self, run: AnyRun, *, type: Any = Any, timeout: float | None = 60.0) -> Any:
        """Wait for a run's output, and let time skip to what comes next whenever nothing is to be done.

        Raises RunFailed, RunCancelled, RunTerminated; Stalled, which says what the run waits for, when it has not ended
        within ``timeout`` seconds, or when for some seconds there was nothing to do and nothing to skip to.
        """
        await self._kit.await_(self._kit.finish(id_of(run), timeout))
        return await self.client.handle(id_of(run)).result(type=type)

    async def skip(self, by: Seconds, *, timeout: float = 60.0) -> dt.datetime:
        """Let that much time pass, seconds or a timedelta, and return the time then.

        It waits until nothing is to be done, goes to the first due time, waits until all that follows has been done,
        and so on. Raises Stalled if that takes more than ``timeout`` seconds, as when a step does not return.
        """
        return await self._kit.await_(self._kit.skip(by, timeout))

    async def settle(self, *, timeout: float = 60.0) -> None:
        """Wait until nothing is to be done now: every run waits for time, a signal, or a worker that is not there.

        Raises Stalled.
        """
        await self._kit.await_(self._kit.settle(timeout))

    async def now(self) -> dt.datetime:
        """The server's time, in UTC."""
        return (await self._kit.await_(self._kit.now())).astimezone(dt.UTC)
