"""Schedules, as plain frozen values, and how they are made of the contract's messages and written into them."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from fencepost.codec import encode
from fencepost.frames import seconds_of
from fencepost.models import duration_of, enum_of, fill_payload, stamp_of, time_of, value_of
from fencepost.v1 import schedule_service_pb2 as schedules


class OverlapPolicy(enum.StrEnum):
    """What happens when a schedule fires while a run that it started has not ended.

    SKIP leaves the fire time out; QUEUE_ONE starts one run when the present one has ended; ALLOW starts it beside the
    present one; CANCEL_RUNNING cancels the present one, and starts it when that has ended.
    """

    UNSPECIFIED = "UNSPECIFIED"
    SKIP = "SKIP"
    QUEUE_ONE = "QUEUE_ONE"
    ALLOW = "ALLOW"
    CANCEL_RUNNING = "CANCEL_RUNNING"


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """When to start what. Either ``cron`` or ``interval`` is given; times are aware, spans are in seconds.

    ``cron`` has five fields and is read in ``time_zone`` (IANA, UTC by default); ``interval`` counts from 1970 plus
    ``offset``. ``input``, ``user_id``, ``priority``, ``attributes`` and ``run_timeout`` are those of each run, as in
    `Client.start_run`; a spec that was read has its input as a `Value`. Fire times that no server was up for are left
    out when they are missed by more than ``catch_up_window`` (1 minute by default). Each run starts up to ``jitter``
    later than its time. It fires from ``start_time`` on, and before ``end_time``.
    """

    workflow_id: str
    cron: str = ""
    interval: float | None = None
    time_zone: str = ""
    offset: float = 0.0
    input: object = None
    user_id: str = ""
    priority: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)
    run_timeout: float | None = None
    overlap: OverlapPolicy = OverlapPolicy.SKIP
    catch_up_window: float | None = None
    jitter: float = 0.0
    start_time: dt.datetime | None = None
    end_time: dt.datetime | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as it was when the server answered.

    ``next_fire_time`` is None if it does not fire any more; ``started_runs`` counts its runs, ``skipped_overlap`` and
    ``skipped_missed`` the fire times that were left out; ``last_error`` is why the last run could not be started, ''
    after a success. ``etag`` changes with each update. ``created`` is False if creating found it there.
    """

    schedule_id: str
    namespace: str
    spec: ScheduleSpec
    paused: bool
    pause_reason: str
    next_fire_time: dt.datetime | None
    last_fire_time: dt.datetime | None
    last_run_id: str
    started_runs: int
    skipped_overlap: int
    skipped_missed: int
    last_error: str
    etag: str
    create_time: dt.datetime
    created: bool = True


_OVERLAPS = enum_of(OverlapPolicy, schedules.OverlapPolicy, "OVERLAP_POLICY_", 0)
_OVERLAP_NUMBERS: dict[OverlapPolicy, schedules.OverlapPolicy.ValueType] = {
    policy: cast("schedules.OverlapPolicy.ValueType", number) for number, policy in reversed(_OVERLAPS.items())
}


def fill_spec(message: schedules.ScheduleSpec, spec: ScheduleSpec) -> None:
    """Write a spec into an empty message; what is not given keeps the server's default.

    Raises NotEncodable for its input, ValueError for a policy that there is not or a time without a zone.
    """
    if spec.cron:
        message.cron = spec.cron
    if spec.interval is not None:
        if spec.cron:
            raise ValueError("a schedule has a cron or an interval, not both")
        message.interval.CopyFrom(duration_of(spec.interval))
    message.time_zone = spec.time_zone
    message.workflow_id = spec.workflow_id
    fill_payload(message.input, encode(spec.input))
    message.user_id = spec.user_id
    message.priority = spec.priority
    message.attributes.update(spec.attributes)
    message.overlap = _OVERLAP_NUMBERS[OverlapPolicy(spec.overlap)]
    for target, seconds in ((message.offset, spec.offset), (message.jitter, spec.jitter)):
        if seconds:
            target.CopyFrom(duration_of(seconds))
    if spec.run_timeout is not None:
        message.run_timeout.CopyFrom(duration_of(spec.run_timeout))
    if spec.catch_up_window is not None:
        message.catch_up_window.CopyFrom(duration_of(spec.catch_up_window))
    if spec.start_time is not None:
        message.start_time.CopyFrom(stamp_of(spec.start_time))
    if spec.end_time is not None:
        message.end_time.CopyFrom(stamp_of(spec.end_time))


def spec_of(message: schedules.ScheduleSpec) -> ScheduleSpec:
    """A ScheduleSpec message as a value."""
    return ScheduleSpec(
        workflow_id=message.workflow_id,
        cron=message.cron,
        interval=seconds_of(message.interval) if message.HasField("interval") else None,
        time_zone=message.time_zone,
        offset=seconds_of(message.offset),
        input=value_of(message.input),
        user_id=message.user_id,
        priority=message.priority,
        attributes=dict(message.attributes),
        run_timeout=seconds_of(message.run_timeout) if message.HasField("run_timeout") else None,
        overlap=_OVERLAPS.get(message.overlap, OverlapPolicy.UNSPECIFIED),
        catch_up_window=seconds_of(message.catch_up_window) if message.HasField("catch_up_window") else None,
        jitter=seconds_of(message.jitter),
        start_time=time_of(message.start_time) if message.HasField("start_time") else None,
        end_time=time_of(message.end_time) if message.HasField("end_time") else None,
    )


def schedule_of(message: schedules.Schedule, *, created: bool = True) -> Schedule:
    """A Schedule message as a value."""
    return Schedule(
        schedule_id=message.schedule_id,
        namespace=message.namespace,
        spec=spec_of(message.spec),
        paused=message.paused,
        pause_reason=message.pause_reason,
        next_fire_time=time_of(message.next_fire_time) if message.HasField("next_fire_time") else None,
        last_fire_time=time_of(message.last_fire_time) if message.HasField("last_fire_time") else None,
        last_run_id=message.last_run_id,
        started_runs=message.started_runs,
        skipped_overlap=message.skipped_overlap,
        skipped_missed=message.skipped_missed,
        last_error=message.last_error,
        etag=message.etag,
        create_time=time_of(message.create_time),
        created=created,
    )
