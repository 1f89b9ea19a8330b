"""Schedules for tests, through the plain stubs, and their rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost.v1 import schedule_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from fencepost.v1.schedule_service_pb2_grpc import ScheduleServiceStub
from tests.engine.rows import execute, fetch
from tests.fixtures.api import DEADLINE, Api


def stub(api: Api) -> ScheduleServiceStub:
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
    """A spec of workflow wf; every hour unless told otherwise."""
    when: dict[str, Any] = {} if "interval" in fields else {"cron": cron or "0 * * * *"}
    return pb.ScheduleSpec(**{"workflow_id": "wf", "input": Payload(json=input), **when, **fields})


async def create(api: Api, wanted: pb.ScheduleSpec, schedule_id: str = "s", **fields: Any) -> pb.CreateScheduleResponse:
    """Make a schedule."""
    request = pb.CreateScheduleRequest(schedule_id=schedule_id, spec=wanted, **fields)
    return await stub(api).CreateSchedule(request, timeout=DEADLINE)


async def get(api: Api, schedule_id: str = "s") -> pb.Schedule:
    """Read a schedule."""
    response = await stub(api).GetSchedule(pb.GetScheduleRequest(schedule_id=schedule_id), timeout=DEADLINE)
    return response.schedule


async def set_back(dsn: str, ago: timedelta, schedule_id: str = "s") -> datetime:
    """Let the next fire time of a schedule be one that lies so far back, on the grid of whole seconds; as after a time
    without any server. Returns it.
    """
    [(at,)] = await fetch(dsn, "select date_trunc('second', clock_timestamp() - %s)", [ago])
    await move(dsn, at, schedule_id)
    return at.astimezone(UTC)  # type: ignore[no-any-return]  # a timestamptz is a datetime


async def move(dsn: str, at: datetime, schedule_id: str = "s") -> None:
    """Let the next fire time of a schedule be another one."""
    changed = await execute(
        dsn, "update schedule set next_fire_at = %s, due_at = %s where schedule_id = %s", [at, at, schedule_id]
    )
    assert changed == 1


async def runs(dsn: str) -> list[tuple[str, str]]:
    """All runs with the keys that schedules gave them, in the order of the keys."""
    return await fetch(dsn, "select run_id::text, key from run_key where kind = 4 order by key")  # type: ignore[return-value]  # two texts
