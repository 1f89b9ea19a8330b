"""The clients that tests have: those of production, but that whoever waits in vain is told how time passes in a test.

An async one's connections belong to the kit's thread. So it works in whichever loop a test has, also in several one
after the other, and can be closed when that loop is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fencepost.async_client import AsyncClient
from fencepost.calls import Requests
from fencepost.client import Client
from fencepost.events import Event
from fencepost.models import Run
from fencepost.plans import Call, Plan
from fencepost.testing.kit import Kit

_HINT = (
    "this wait lets no time skip: use result(run) of the test's environment, which skips until the run has ended, "
    "or its skip(...) before"
)
_NAMESPACE, _PATIENCE = "default", 30.0


class KitRequests(Requests):
    """Plans of what a test's client asks."""

    def wait_run(self, run_id: str, timeout: float | None) -> Plan[Run]:
        """Wait until a run has ended. Raises TimeoutError, which says what to use instead."""
        try:
            return (yield from super().wait_run(run_id, timeout))
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {_HINT}") from None


class BlockingClient(Client):
    """The client of an environment whose calls block."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._requests = KitRequests(_NAMESPACE, _PATIENCE)


class BridgedClient(AsyncClient):
    """Plans are followed in the caller's loop; calls are made in the kit's."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit.address)
        self._requests = KitRequests(_NAMESPACE, _PATIENCE)
        self._kit = kit

    async def close(self) -> None:
        """Does nothing: its connections are the kit's."""

    async def watch_run(self, run_id: str, after_seq: int = 0) -> AsyncIterator[Event]:
        """Follow a run's events, as `AsyncClient.watch_run`."""
        events = self._kit.client.watch_run(run_id, after_seq)
        try:
            while True:
                event = await self._kit.await_(_next(events))
                if event is None:
                    return
                yield event
        finally:
            await self._kit.await_(_close(events))

    async def _call(self, call: Call) -> Any:
        return await self._kit.await_(self._kit.client._call(call))


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _close(events: Any) -> None:
    await events.aclose()
