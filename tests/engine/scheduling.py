"""Schedules for tests, through the plain stub, and their rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost.v1 import schedule_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from fencepost.v1.schedule_service_pb2_grpc import ScheduleServiceStub
from tests.engine.rows import execute, fetch
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from fencepost.v1.schedule_service_pb2_grpc import ScheduleServiceAsyncStub

MINUTE = timedelta(minutes=1)


def stub(api: Api) -> ScheduleServiceAsyncStub:
    """The plain stub of the service."""
    return ScheduleServiceStub(api.channel)


def span(seconds: float) -> Duration:
    """A Duration."""
    message = Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def stamp(at: datetime) -> Timestamp:
    """A Timestamp."""
    message = Timestamp()
    message.FromDatetime(at)
    return message


def spec(cron: str = "", *, input: str = "null", **fields: Any) -> pb.ScheduleSpec:
    """A spec of workflow wf; on the first of January unless told otherwise, so that nothing happens by itself."""
    when: dict[str, Any] = {} if "interval" in fields else {"cron": cron or "0 0 1 1 *"}
    return pb.ScheduleSpec(**{"workflow_id": "wf", "input": Payload(json=input), **when, **fields})


async def create(api: Api, wanted: pb.ScheduleSpec, schedule_id: str = "s", **fields: Any) -> pb.CreateScheduleResponse:
    """Make a schedule."""
    request = pb.CreateScheduleRequest(schedule_id=schedule_id, spec=wanted, **fields)
    return await stub(api).CreateSchedule(request, timeout=DEADLINE)


async def get(api: Api, schedule_id: str = "s") -> pb.Schedule:
    """Read a schedule."""
    response = await stub(api).GetSchedule(pb.GetScheduleRequest(schedule_id=schedule_id), timeout=DEADLINE)
    return response.schedule


async def trigger(api: Api, request_id: str = "", schedule_id: str = "s") -> str:
    """Start a run now; returns its id."""
    request = pb.TriggerScheduleRequest(schedule_id=schedule_id, request_id=request_id)
    return (await stub(api).TriggerSchedule(request, timeout=DEADLINE)).run_id


async def backfill(api: Api, begin: datetime, end: datetime) -> list[str]:
    """Start runs for past fire times; returns their ids."""
    request = pb.BackfillScheduleRequest(schedule_id="s", from_time=stamp(begin), to_time=stamp(end))
    return list((await stub(api).BackfillSchedule(request, timeout=DEADLINE)).run_ids)


async def now(dsn: str) -> datetime:
    """The database's time, to the whole second below."""
    [(found,)] = await fetch(dsn, "select date_trunc('second', clock_timestamp())")
    at: datetime = found.astimezone(UTC)
    return at


async def move(dsn: str, at: datetime, schedule_id: str = "s") -> None:
    """Let the next fire time of a schedule be another one, as if its spec had made it so."""
    changed = await execute(
        dsn, "update schedule set next_fire_at = %s, due_at = %s where schedule_id = %s", [at, at, schedule_id]
    )
    assert changed == 1


async def fire_now(dsn: str, schedule_id: str = "s") -> datetime:
    """Let a schedule fire now; returns the fire time, which is another one each time."""
    [(found,)] = await fetch(dsn, "select clock_timestamp()")
    at: datetime = found.astimezone(UTC)
    await move(dsn, at, schedule_id)
    return at


async def until(api: Api, timeout: float = 30.0, schedule_id: str = "s", **fields: Any) -> pb.Schedule:
    """The schedule when its fields have these values."""

    async def reached() -> pb.Schedule:
        found = await get(api, schedule_id)
        assert {name: getattr(found, name) for name in fields} == fields
        return found

    return await eventually(reached, timeout)


async def until_at_rest(dsn: str, timeout: float = 30.0) -> None:
    """Wait until no start is under way and every schedule waits for its next fire time."""

    async def reached() -> bool:
        rows = await fetch(
            dsn, "select starting_at, pending_at, due_at, next_fire_at from schedule where due_at <= clock_timestamp()"
        )
        assert rows == []
        return await fetch(dsn, "select 1 from schedule where starting_at is not null") == []

    await eventually(reached, timeout)


async def keys(dsn: str) -> list[str]:
    """The keys that schedules gave to runs, in order."""
    return [key for (key,) in await fetch(dsn, "select key from run_key where kind = 4 order by key")]
