"""An executor under test, and handlers for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from fencepost import Step, Value, step
from fencepost.executor import Executor, Result
from fencepost.lease import Lease
from tests.fixtures.waiting import eventually
from tests.unit.sdk.building import lease_of


class Harness:
    """An executor whose session is the test's loop and whose users' loop runs in a thread, as in a worker."""

    def __init__(self, threads: int) -> None:
        self.users_loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve)
        self.results: list[Result] = []
        self.deliveries = 0
        self.executor = Executor(self.users_loop, asyncio.get_running_loop(), threads, self._deliver)
        self.thread.start()

    def _serve(self) -> None:
        self.users_loop.run_forever()
        self.users_loop.close()

    def _deliver(self) -> None:
        self.deliveries += 1
        self.results += self.executor.take_results()

    async def outcomes(self, *leases: Lease) -> list[Any]:
        """What became of leases, in their order."""
        await eventually(lambda: len(self.results) >= len(leases))
        by_lease = dict(self.results)
        return [by_lease[lease] for lease in leases]

    async def run(self, *handlers: Step[..., Any], input: Value | None = None) -> list[Any]:
        leases = [
            lease_of(handler, run=number, input=input or Value(), max_payload_bytes=1 << 20)
            for number, handler in enumerate(handlers)
        ]
        self.executor.submit(leases)
        return await self.outcomes(*leases)

    def close(self) -> None:
        self.executor.close()
        self.users_loop.call_soon_threadsafe(self.users_loop.stop)
        self.thread.join(30)
        assert not self.thread.is_alive()


def both(function: Callable[[], Any]) -> list[Step[..., Any]]:
    """The same body as a sync and as an async handler."""

    async def run() -> Any:
        return function()

    return [step("sync")(function), step("async")(run)]


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
