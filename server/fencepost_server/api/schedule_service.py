"""ScheduleService."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost.v1 import schedule_service_pb2 as pb
from fencepost.v1 import schedule_service_pb2_grpc
from fencepost_server.api.calls import call
from fencepost_server.api.checks import Checks, page_token, read_page_token
from fencepost_server.config import Config
from fencepost_server.domain import schedule
from fencepost_server.domain.errors import Internal
from fencepost_server.domain.schedule import Overlap, Spec
from fencepost_server.engine import schedules
from fencepost_server.engine.engine import Engine
from fencepost_server.store.schedules import ScheduleRow
from fencepost_server.wire.payloads import duration, payload_in, payload_out, timestamp

_DEFAULT_PAGE, _DEFAULT_FIRE_TIMES, _PAGE_BYTES = 100, 10, 2 << 20
_MAX_REASON = 1000
_MAX_SECONDS = 400_000_000_000
_LONGEST_TIMEOUT, _SHORTEST_TIMEOUT = 3650 * 86_400.0, 0.001
_SCHEDULES = "schedules"


class ScheduleService(schedule_service_pb2_grpc.ScheduleServiceServicer):
    """See proto/fencepost/v1/schedule_service.proto."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self._config = config
        self._engine = engine

    @call
    async def CreateSchedule(self, request: pb.CreateScheduleRequest) -> pb.CreateScheduleResponse:
        """Make a schedule."""
        checks = Checks()
        namespace, schedule_id = _which(checks, request.namespace, request.schedule_id, request.request_id)
        spec = self._spec(checks, request)
        made = await schedules.create(self._engine, namespace, schedule_id, spec, paused=request.paused)
        return pb.CreateScheduleResponse(schedule=_schedule(made.row), created=made.created)

    @call
    async def GetSchedule(self, request: pb.GetScheduleRequest) -> pb.GetScheduleResponse:
        """Read a schedule."""
        checks = Checks()
        namespace, schedule_id = _which(checks, request.namespace, request.schedule_id)
        checks.done()
        return pb.GetScheduleResponse(schedule=_schedule(await schedules.get(self._engine, namespace, schedule_id)))

    @call
    async def ListSchedules(self, request: pb.ListSchedulesRequest) -> pb.ListSchedulesResponse:
        """List schedules."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        limit = checks.number(request.page_size, "page_size", 1, self._config.max_page_size, _DEFAULT_PAGE)
        checks.done()
        after = ""
        if request.page_token:
            [after] = read_page_token(_SCHEDULES, request.page_token, (str,))
        rows = await schedules.list_page(self._engine, namespace, after, limit + 1, _PAGE_BYTES)
        listed: list[pb.Schedule] = []
        size = 0
        for row in rows[:limit]:
            if listed and size > _PAGE_BYTES:
                break
            listed.append(_schedule(row))
            size += listed[-1].ByteSize()
        # A page that large inputs have cut short may be the last one: then the next one is empty.
        more = len(listed) < len(rows) or size > _PAGE_BYTES
        token = page_token(_SCHEDULES, [listed[-1].schedule_id]) if more else ""
        return pb.ListSchedulesResponse(schedules=listed, next_page_token=token)

    @call
    async def UpdateSchedule(self, request: pb.UpdateScheduleRequest) -> pb.UpdateScheduleResponse:
        """Replace what a schedule does."""
        checks = Checks()
        namespace, schedule_id = _which(checks, request.namespace, request.schedule_id, request.request_id)
        checks.text(request.etag, "etag")
        spec = self._spec(checks, request)
        row = await schedules.update(
            self._engine, namespace, schedule_id, spec, etag_=request.etag, request_id=request.request_id
        )
        return pb.UpdateScheduleResponse(schedule=_schedule(row))

    @call
    async def DeleteSchedule(self, request: pb.DeleteScheduleRequest) -> pb.DeleteScheduleResponse:
        """Delete a schedule."""
        checks = Checks()
        namespace, schedule_id = _which(checks, request.namespace, request.schedule_id, request.request_id)
        checks.done()
        return pb.DeleteScheduleResponse(deleted=await schedules.delete(self._engine, namespace, schedule_id))

    @call
    async def PauseSchedule(self, request: pb.PauseScheduleRequest) -> pb.PauseScheduleResponse:
        """Let a schedule fire no more."""
        checks = Checks()
        namespace, schedule_id = _which(checks, request.namespace, request.schedule_id, request.request_id)
        if len(request.reason) > _MAX_REASON:
            checks.note("reason", f"at most {_MAX_REASON} characters")
        if "\0" in request.reason:
            checks.note("reason", "NUL is not allowed")
        checks.done()
        row = await schedules.pause(self._engine, namespace, schedule_id, request.reason)
        return pb.PauseScheduleResponse(schedule=_schedule(row))

    @call
    async def ResumeSchedule(self, request: pb.ResumeScheduleRequest) -> pb.ResumeScheduleResponse:
        """Let a schedule fire again."""
        checks = Checks()
        namespace, schedule_id = _which(checks, request.namespace, request.schedule_id, request.request_id)
        checks.done()
        row = await schedules.resume(self._engine, namespace, schedule_id)
        return pb.ResumeScheduleResponse(schedule=_schedule(row))

    @call
    async def TriggerSchedule(self, request: pb.TriggerScheduleRequest) -> pb.TriggerScheduleResponse:
        """Start a run now."""
        checks = Checks()
        namespace, schedule_id = _which(checks, request.namespace, request.schedule_id, request.request_id)
        checks.done()
        started = await schedules.trigger(self._engine, namespace, schedule_id, request.request_id)
        return pb.TriggerScheduleResponse(run_id=started.run_id)

    @call
    async def BackfillSchedule(self, request: pb.BackfillScheduleRequest) -> pb.BackfillScheduleResponse:
        """Start runs for past fire times."""
        checks = Checks()
        namespace, schedule_id = _which(checks, request.namespace, request.schedule_id, request.request_id)
        begin = _time(checks, request.from_time, "from_time", given=request.HasField("from_time"))
        end = _time(checks, request.to_time, "to_time", given=request.HasField("to_time"))
        for at, path in ((begin, "from_time"), (end, "to_time")):
            if at is None and not any(fault.path == path for fault in checks.faults):
                checks.note(path, "is required")
        if begin is not None and end is not None and end <= begin:
            checks.note("to_time", "must be after from_time")
        checks.done()
        assert begin is not None and end is not None  # noqa: PT018  # checked above
        runs = await schedules.backfill(self._engine, namespace, schedule_id, begin, end)
        return pb.BackfillScheduleResponse(run_ids=runs)

    @call
    async def ListFireTimes(self, request: pb.ListFireTimesRequest) -> pb.ListFireTimesResponse:
        """Tell when a schedule will fire."""
        checks = Checks()
        namespace, schedule_id = _which(checks, request.namespace, request.schedule_id)
        begin = _time(checks, request.from_time, "from_time", given=request.HasField("from_time"))
        limit = checks.number(request.limit, "limit", 1, schedules.MAX_FIRE_TIMES, _DEFAULT_FIRE_TIMES)
        checks.done()
        times = await schedules.list_fire_times(self._engine, namespace, schedule_id, begin, limit)
        return pb.ListFireTimesResponse(fire_times=[stamp for at in times if (stamp := timestamp(at)) is not None])

    def _spec(self, checks: Checks, request: pb.CreateScheduleRequest | pb.UpdateScheduleRequest) -> Spec:
        """The spec of a request. Raises InvalidRequest with all faults of the request, InvalidJson, PayloadTooLarge."""
        if not request.HasField("spec"):
            checks.note("spec", "is required")
        message = request.spec
        when = message.WhichOneof("when")
        if when is None:
            checks.note("spec.when", "cron or interval is required")
        if when == "interval" and message.time_zone:
            checks.note("spec.time_zone", "is for cron: an interval is counted in UTC")
        if when == "cron" and message.HasField("offset"):
            checks.note("spec.offset", "is for an interval")
        if message.overlap not in pb.OverlapPolicy.values():
            checks.note("spec.overlap", "is not a policy")
        run_timeout = None
        if message.HasField("run_timeout"):
            run_timeout = checks.seconds(message.run_timeout, "spec.run_timeout", _LONGEST_TIMEOUT, _SHORTEST_TIMEOUT)
        catch_up = schedule.DEFAULT_CATCH_UP
        if message.HasField("catch_up_window"):
            catch_up = _span(checks, message.catch_up_window, "spec.catch_up_window")
        spec = Spec(
            cron=" ".join(message.cron.split()),
            time_zone=message.time_zone or "UTC",
            interval=_span(checks, message.interval, "spec.interval") if when == "interval" else None,
            offset=_span(checks, message.offset, "spec.offset"),
            workflow_id=checks.name(message.workflow_id, "spec.workflow_id"),
            user_id=checks.text(message.user_id, "spec.user_id"),
            priority=checks.number(message.priority, "spec.priority", 1, 5, 3),
            attributes=checks.attributes(message.attributes, "spec.attributes"),
            run_timeout=run_timeout,
            overlap=_overlap(message.overlap),
            catch_up=catch_up,
            jitter=_span(checks, message.jitter, "spec.jitter"),
            start_at=_time(checks, message.start_time, "spec.start_time", given=message.HasField("start_time")),
            end_at=_time(checks, message.end_time, "spec.end_time", given=message.HasField("end_time")),
        )
        noted = {fault.path for fault in checks.faults}
        for fault in schedule.faults(spec):
            path = f"spec.{fault.path}"
            if path not in noted and not (when is None and fault.path == "cron"):
                checks.note(path, fault.message)
        checks.done()
        payload, _value = payload_in(message.input, self._config.max_payload_bytes, "spec.input")
        return schedule.with_input(spec, payload)


def _which(checks: Checks, namespace: str, schedule_id: str, request_id: str = "") -> tuple[str, str]:
    checks.text(request_id, "request_id")
    return checks.namespace(namespace), checks.name(schedule_id, "schedule_id")


def _overlap(number: int) -> Overlap:
    """A policy; the default one for 0, and for what was noted as none."""
    return Overlap(number) if number in set(map(int, Overlap)) else Overlap.SKIP


def _span(checks: Checks, value: Duration, path: str) -> timedelta:
    """A duration, rounded to the microsecond. Whether it is a sensible one is for its use to say."""
    if abs(value.seconds) > _MAX_SECONDS:
        checks.note(path, "is too long")
        return timedelta(0)
    return timedelta(seconds=value.seconds, microseconds=round(value.nanos / 1000))


def _time(checks: Checks, value: Timestamp, path: str, *, given: bool) -> datetime | None:
    """A time, or None if there is none; rounded down to the microsecond."""
    if not given:
        return None
    try:
        at: datetime = value.ToDatetime(UTC)
    except (ValueError, OverflowError):
        checks.note(path, "is not a time")
        return None
    if not schedule.EPOCH <= at < datetime(schedule.LAST_YEAR, 1, 1, tzinfo=UTC):
        checks.note(path, f"must be between the years 1970 and {schedule.LAST_YEAR}")
        return None
    return at


def _schedule(row: ScheduleRow) -> pb.Schedule:
    """A row as a message of the contract. One whose spec can't be read harms no list that it is in."""
    spec, error = None, row.last_error
    try:
        spec = _spec_out(row.spec())
    except (ValueError, KeyError, TypeError):
        error = error or f"{Internal.reason}: this release of the server can't read the spec"
    return pb.Schedule(
        schedule_id=row.schedule_id,
        namespace=row.namespace,
        spec=spec,
        paused=row.paused,
        pause_reason=row.pause_reason,
        next_fire_time=timestamp(row.state.next_fire_at),
        last_fire_time=timestamp(row.state.last_fire_at),
        last_run_id=row.last_run_id or "",
        started_runs=row.started_runs,
        skipped_overlap=row.state.skipped_overlap,
        skipped_missed=row.state.skipped_missed,
        last_error=error,
        etag=schedules.etag(row),
        create_time=timestamp(row.created_at),
    )


def _spec_out(spec: Spec) -> pb.ScheduleSpec:
    message = pb.ScheduleSpec(
        workflow_id=spec.workflow_id,
        input=payload_out(spec.input),
        user_id=spec.user_id,
        priority=spec.priority,
        attributes=spec.attributes,
        run_timeout=None if spec.run_timeout is None else duration(spec.run_timeout),
        overlap=int(spec.overlap),  # type: ignore[arg-type]  # the numbers are the contract's
        catch_up_window=_duration(spec.catch_up),
        jitter=_duration(spec.jitter) if spec.jitter else None,
        start_time=timestamp(spec.start_at),
        end_time=timestamp(spec.end_at),
    )
    if spec.interval is None:
        message.cron, message.time_zone = spec.cron, spec.time_zone
    else:
        message.interval.CopyFrom(_duration(spec.interval))
        if spec.offset:
            message.offset.CopyFrom(_duration(spec.offset))
    return message


def _duration(span: timedelta) -> Duration:
    message = Duration()
    message.FromTimedelta(span)
    return message
