"""What the clients do with schedules, blocking and as coroutines; what is asked is in `schedule_calls`."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from fencepost.plans import PAGE_SIZE

if TYPE_CHECKING:
    from fencepost.async_client import AsyncClient
    from fencepost.client import Client
    from fencepost.handles import AsyncRunHandle, RunHandle
    from fencepost.schedule_calls import ScheduleRequests
    from fencepost.schedules import Schedule, ScheduleSpec


class Schedules:
    """The schedules of a client's namespace: `Client.schedules`.

    Calls raise ScheduleNotFound where there is no such schedule, NotEncodable for an input that has no JSON, ValueError
    for a time without a zone.
    """

    def __init__(self, client: Client, requests: ScheduleRequests) -> None:
        self._client = client
        self._requests = requests

    def create(self, schedule_id: str, spec: ScheduleSpec, *, paused: bool = False) -> Schedule:
        """Make a schedule. The same again changes nothing, and ``created`` is False; another is ScheduleExists."""
        return self._client._run(self._requests.create(schedule_id, spec, paused))

    def get(self, schedule_id: str) -> Schedule:
        """Read a schedule."""
        return self._client._run(self._requests.get(schedule_id))

    def list(self) -> Iterator[Schedule]:
        """List schedules by id; pages are read as they are needed."""
        return self._client._pages(lambda token: self._requests.list_page(PAGE_SIZE, token))

    def update(self, schedule_id: str, spec: ScheduleSpec, *, etag: str = "") -> Schedule:
        """Replace what a schedule does. With the ``etag`` as read: StaleEtag if it was changed since."""
        return self._client._run(self._requests.update(schedule_id, spec, etag))

    def delete(self, schedule_id: str) -> bool:
        """Delete a schedule, its runs go on; False if there was none."""
        return self._client._run(self._requests.delete(schedule_id))

    def pause(self, schedule_id: str, reason: str = "") -> Schedule:
        """Let it fire no more until it is resumed."""
        return self._client._run(self._requests.pause(schedule_id, reason))

    def resume(self, schedule_id: str) -> Schedule:
        """Let it fire again, from now on."""
        return self._client._run(self._requests.resume(schedule_id))

    def trigger(self, schedule_id: str, *, request_id: str = "") -> RunHandle:
        """Start a run of it now, whatever its overlap policy. The same ``request_id`` again returns the same run."""
        return self._client.handle(self._client._run(self._requests.trigger(schedule_id, request_id)))

    def backfill(self, schedule_id: str, from_time: dt.datetime, to_time: dt.datetime) -> Sequence[RunHandle]:
        """Start a run for each fire time from ``from_time`` on, before ``to_time``, that has none yet.

        Returns the runs of all of them, in order.
        """
        run_ids = self._client._run(self._requests.backfill(schedule_id, from_time, to_time))
        return [self._client.handle(run_id) for run_id in run_ids]

    def fire_times(
        self, schedule_id: str, from_time: dt.datetime | None = None, limit: int = 10
    ) -> Sequence[dt.datetime]:
        """When it will fire, from now or ``from_time`` on, without jitter."""
        return self._client._run(self._requests.fire_times(schedule_id, from_time, limit))


class AsyncSchedules:
    """The schedules of a client's namespace: `AsyncClient.schedules`.

    Calls raise ScheduleNotFound where there is no such schedule, NotEncodable for an input that has no JSON, ValueError
    for a time without a zone.
    """

    def __init__(self, client: AsyncClient, requests: ScheduleRequests) -> None:
        self._client = client
        self._requests = requests

    async def create(self, schedule_id: str, spec: ScheduleSpec, *, paused: bool = False) -> Schedule:
        """Make a schedule. The same again changes nothing, and ``created`` is False; another is ScheduleExists."""
        return await self._client._run(self._requests.create(schedule_id, spec, paused))

    async def get(self, schedule_id: str) -> Schedule:
        """Read a schedule."""
        return await self._client._run(self._requests.get(schedule_id))

    def list(self) -> AsyncIterator[Schedule]:
        """List schedules by id; pages are read as they are needed."""
        return self._client._pages(lambda token: self._requests.list_page(PAGE_SIZE, token))

    async def update(self, schedule_id: str, spec: ScheduleSpec, *, etag: str = "") -> Schedule:
        """Replace what a schedule does. With the ``etag`` as read: StaleEtag if it was changed since."""
        return await self._client._run(self._requests.update(schedule_id, spec, etag))

    async def delete(self, schedule_id: str) -> bool:
        """Delete a schedule, its runs go on; False if there was none."""
        return await self._client._run(self._requests.delete(schedule_id))

    async def pause(self, schedule_id: str, reason: str = "") -> Schedule:
        """Let it fire no more until it is resumed."""
        return await self._client._run(self._requests.pause(schedule_id, reason))

    async def resume(self, schedule_id: str) -> Schedule:
        """Let it fire again, from now on."""
        return await self._client._run(self._requests.resume(schedule_id))

    async def trigger(self, schedule_id: str, *, request_id: str = "") -> AsyncRunHandle:
        """Start a run of it now, whatever its overlap policy. The same ``request_id`` again returns the same run."""
        return self._client.handle(await self._client._run(self._requests.trigger(schedule_id, request_id)))

    async def backfill(
        self, schedule_id: str, from_time: dt.datetime, to_time: dt.datetime
    ) -> Sequence[AsyncRunHandle]:
        """Start a run for each fire time from ``from_time`` on, before ``to_time``, that has none yet.

        Returns the runs of all of them, in order.
        """
        run_ids = await self._client._run(self._requests.backfill(schedule_id, from_time, to_time))
        return [self._client.handle(run_id) for run_id in run_ids]

    async def fire_times(
        self, schedule_id: str, from_time: dt.datetime | None = None, limit: int = 10
    ) -> Sequence[dt.datetime]:
        """When it will fire, from now or ``from_time`` on, without jitter."""
        return await self._client._run(self._requests.fire_times(schedule_id, from_time, limit))
