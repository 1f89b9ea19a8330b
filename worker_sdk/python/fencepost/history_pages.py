"""Reads histories of code runs for the decider, page by page, over the channel of the session that holds the run.

Reading needs no lease and changes nothing, so it is repeated while it may help: a stream that breaks meanwhile is made
anew by its link, and the reading goes on over that one's channel. A few are read at a time: each page may have 2 MiB.

Used in the session's loop; the decider only sets `Reading.given_up`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import grpc

from fencepost.channel import Backoff
from fencepost.errors import FencepostError, Unavailable, Unreachable
from fencepost.status import error_of_call
from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import run_service_pb2_grpc as rpc

if TYPE_CHECKING:
    from fencepost.lease import Owner

PAGE_EVENTS = 1_000
AT_A_TIME = 4
_CALL_TIMEOUT = 10.0
_PATIENCE = 60.0


@dataclass(slots=True, eq=False)
class Reading:
    """The events of a run from ``after_seq`` + 1 to ``until_seq`` are wanted, by way of ``owner``'s channel.

    ``given_up`` tells that nobody wants them any more.
    """

    owner: Owner | None
    run_id: str
    after_seq: int
    until_seq: int
    given_up: bool = False


@dataclass(slots=True)
class Page:
    """Some of the events that a reading wanted, in order; the last ones if ``is_last``, or none, with ``error``."""

    reading: Reading
    events: list[run_pb2.Event]
    is_last: bool
    error: FencepostError | None = None


ChannelOf: TypeAlias = Callable[["Owner | None"], grpc.aio.Channel | None]


class HistoryPages:
    """The readings of one worker. ``channel_of`` finds the channel to use now, ``tell`` takes the pages."""

    def __init__(self, namespace: str, channel_of: ChannelOf, tell: Callable[[Page], object]) -> None:
        self._namespace = namespace
        self._channel_of = channel_of
        self._tell = tell
        self._turns = asyncio.Semaphore(AT_A_TIME)
        # The loop itself keeps only weak references to its tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, reading: Reading) -> None:
        """Begin a reading; its pages are told one by one."""
        task = asyncio.create_task(self._read(reading))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all readings; what they have not told nobody wants."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, reading: Reading) -> None:
        after = reading.after_seq
        while after < reading.until_seq and not reading.given_up:
            try:
                async with self._turns:
                    events = await self._page(reading, after)
            except FencepostError as error:
                self._tell(Page(reading, [], is_last=True, error=error))
                return
            if not events:
                return
            after = events[-1].seq
            self._tell(Page(reading, events, is_last=after >= reading.until_seq))

    async def _page(self, reading: Reading, after: int) -> list[run_pb2.Event]:
        """The next events, at least one unless the reading is given up. Raises FencepostError when it is hopeless."""
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        end = loop.time() + _PATIENCE
        while not reading.given_up:
            try:
                events = await self._ask(reading, after)
                if events:
                    return events
                error: FencepostError = Unavailable(f"the history of run {reading.run_id} ends with event {after}")
            except Unavailable as unavailable:
                error = unavailable
            if loop.time() >= end:
                raise error
            await asyncio.sleep(backoff.next(error.retry_after))
        return []

    async def _ask(self, reading: Reading, after: int) -> list[run_pb2.Event]:
        channel = self._channel_of(reading.owner)
        if channel is None:
            raise Unreachable("the worker is not connected")
        request = run_service_pb2.GetHistoryRequest(
            namespace=self._namespace, run_id=reading.run_id, page_size=PAGE_EVENTS, after_seq=after
        )
        try:
            response = await rpc.RunServiceStub(channel).GetHistory(request, timeout=_CALL_TIMEOUT)
        except grpc.RpcError as error:
            raise error_of_call(error) from error
        except grpc.aio.UsageError as error:
            raise Unreachable("the channel was closed") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The channel was closed under the call, which gRPC tells this way.
            raise Unreachable("the channel was closed") from None
        return [event for event in response.events if after < event.seq <= reading.until_seq]
