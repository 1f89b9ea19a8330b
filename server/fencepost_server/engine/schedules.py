"""Making, reading and changing schedules, and starting runs of theirs at a call."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice, takewhile

from fencepost_server.domain import firing
from fencepost_server.domain.errors import (
    DatabaseUnavailable,
    FencepostError,
    InvalidRequest,
    ScheduleExists,
    ScheduleNotFound,
    StaleEtag,
)
from fencepost_server.domain.firing import State
from fencepost_server.domain.model import NULL
from fencepost_server.domain.schedule import Spec, fire_times, spec_to_json
from fencepost_server.domain.violation import Violation
from fencepost_server.engine.engine import Engine
from fencepost_server.engine.firing import BACKFILL, CALL, call_key, fire_key, start_request
from fencepost_server.engine.keys import SCHEDULE_KEY
from fencepost_server.engine.operations import Started
from fencepost_server.engine.starting import comparable
from fencepost_server.store import schedules
from fencepost_server.store.pipeline import Session
from fencepost_server.store.schedules import ScheduleRow

MAX_FIRE_TIMES = 1000
"""Fire times of one call."""
_TICK = timedelta(microseconds=1)
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Created:
    """A schedule, and whether this call made it."""

    row: ScheduleRow
    created: bool


def etag(row: ScheduleRow) -> str:
    """Another one after each update, and of each schedule that had the id."""
    return f"{row.uuid}-{row.version}"


async def create(engine: Engine, namespace: str, schedule_id: str, spec: Spec, *, paused: bool) -> Created:
    """Make a schedule; the same content again changes nothing. Raises ScheduleExists."""
    row_uuid = str(uuid.uuid4())
    for _ in range(_TRIES):
        async with engine.reads.transaction() as session:
            now, _running = await schedules.running(session, ())
            state = State(None) if paused else firing.resumed(spec, row_uuid, State(None), now)
            made = await schedules.insert(session, namespace, schedule_id, row_uuid, spec, state, paused=paused, at=now)
            row = await schedules.get(session, namespace, schedule_id)
        if row is None:
            continue  # it was there at the insert and was deleted before the read
        if not made and not _same(row.spec(), spec):
            raise ScheduleExists(f"schedule {schedule_id!r} exists with another content")
        _tell(engine, row, now)
        return Created(row, made)
    raise DatabaseUnavailable(f"schedule {schedule_id!r} came and went too often")


def _same(one: Spec, other: Spec) -> bool:
    return replace(one, input=NULL) == replace(other, input=NULL) and comparable(one.input) == comparable(other.input)


def _tell(engine: Engine, row: ScheduleRow, now: datetime) -> None:
    if row.state.due_at is not None:
        engine.firing.due_by((row.state.due_at - now).total_seconds())


async def get(engine: Engine, namespace: str, schedule_id: str) -> ScheduleRow:
    """One schedule. Raises ScheduleNotFound."""
    async with engine.reads.transaction() as session:
        return await _found(session, namespace, schedule_id)


async def _found(session: Session, namespace: str, schedule_id: str, *, lock: bool = False) -> ScheduleRow:
    row = await schedules.get(session, namespace, schedule_id, lock=lock)
    if row is None:
        raise ScheduleNotFound(f"no schedule {schedule_id!r} in namespace {namespace!r}")
    return row


async def list_page(engine: Engine, namespace: str, after: str, limit: int, max_bytes: int) -> list[ScheduleRow]:
    """A page by id. It ends early when the inputs get too large."""
    return await schedules.list_schedules(engine.reads, namespace, after, limit, max_bytes)


async def update(
    engine: Engine, namespace: str, schedule_id: str, spec: Spec, *, etag_: str, request_id: str
) -> ScheduleRow:
    """Replace what a schedule does. Raises ScheduleNotFound, StaleEtag."""
    async with engine.reads.transaction() as session:
        row = await _found(session, namespace, schedule_id, lock=True)
        if request_id and request_id == row.update_request:
            return row  # asked again because the answer was lost (I6)
        if etag_ and etag_ != etag(row):
            raise StaleEtag(f"schedule {schedule_id!r} was changed since it was read", metadata={"etag": etag(row)})
        now, _running = await schedules.running(session, ())
        row = replace(
            row,
            spec_json=spec_to_json(spec),
            input=spec.input,
            version=row.version + 1,
            update_request=request_id,
            state=row.state if row.paused else firing.resumed(spec, row.uuid, row.state, now),
        )
        schedules.change(session, row)
    _tell(engine, row, now)
    return row


async def pause(engine: Engine, namespace: str, schedule_id: str, reason: str) -> ScheduleRow:
    """Let it fire no more. Raises ScheduleNotFound."""
    async with engine.reads.transaction() as session:
        row = await _found(session, namespace, schedule_id, lock=True)
        now, _running = await schedules.running(session, ())
        row = replace(row, paused=True, pause_reason=reason, state=firing.paused(row.state, now))
        schedules.change(session, row)
    _tell(engine, row, now)
    return row


async def resume(engine: Engine, namespace: str, schedule_id: str) -> ScheduleRow:
    """Let it fire again, from now on. Raises ScheduleNotFound."""
    async with engine.reads.transaction() as session:
        row = await _found(session, namespace, schedule_id, lock=True)
        if not row.paused:
            return row
        now, _running = await schedules.running(session, ())
        state = firing.resumed(row.spec(), row.uuid, row.state, now)
        row = replace(row, paused=False, pause_reason="", state=state)
        schedules.change(session, row)
    _tell(engine, row, now)
    return row


async def delete(engine: Engine, namespace: str, schedule_id: str) -> bool:
    """Delete it; its runs go on. False if there was none."""
    return await schedules.delete(engine.reads, namespace, schedule_id)


async def trigger(engine: Engine, namespace: str, schedule_id: str, request_id: str) -> Started:
    """Start a run now. Raises ScheduleNotFound, and what a start can be refused with."""
    row = await get(engine, namespace, schedule_id)
    key = call_key(row.uuid, request_id or str(uuid.uuid4()))
    started = await engine.start_run(start_request(row, row.spec(), key, CALL))
    if started.created:
        await schedules.started(engine.reads, row.uuid, started.run_id, 1)
    return started


async def backfill(engine: Engine, namespace: str, schedule_id: str, begin: datetime, end: datetime) -> Sequence[str]:
    """Start a run for each fire time from ``begin`` to before ``end`` that has none. Returns those started by this call
    or by one before. Raises ScheduleNotFound, InvalidRequest, and what a start can be refused with; then some runs
    may be started, and a repeat starts the others.
    """
    async with engine.reads.transaction() as session:
        row = await _found(session, namespace, schedule_id)
        now, _running = await schedules.running(session, ())
    if end > now:
        raise _wrong("to_time", "must have passed")
    spec = row.spec()
    times = await asyncio.to_thread(_between, spec, begin, end)
    if len(times) > MAX_FIRE_TIMES:
        raise _wrong("to_time", f"the range has more than {MAX_FIRE_TIMES} fire times")
    keys = [fire_key(row.uuid, at) for at in times]
    futures = [engine.submit_start(start_request(row, spec, key, BACKFILL)) for key in keys]
    outcomes = [await future for future in futures]
    created = [outcome.run_id for outcome in outcomes if isinstance(outcome, Started) and outcome.created]
    if created:
        await schedules.started(engine.reads, row.uuid, created[-1], len(created))
    for outcome in outcomes:
        if isinstance(outcome, FencepostError):
            raise outcome
    runs = await schedules.runs_of(engine.reads, namespace, SCHEDULE_KEY, keys, BACKFILL.encode())
    return [runs[key] for key in keys if key in runs]


def _between(spec: Spec, begin: datetime, end: datetime) -> list[datetime]:
    times = takewhile(lambda at: at < end, fire_times(spec, begin - _TICK))
    return list(islice(times, MAX_FIRE_TIMES + 1))


def _wrong(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"invalid request: {path}: {message}", violations=[Violation(path, message)])


async def list_fire_times(
    engine: Engine, namespace: str, schedule_id: str, begin: datetime | None, limit: int
) -> list[datetime]:
    """The next fire times, from now or ``begin`` on. Raises ScheduleNotFound."""
    async with engine.reads.transaction() as session:
        row = await _found(session, namespace, schedule_id)
        now, _running = await schedules.running(session, ())
    times = fire_times(row.spec(), (begin or now) - _TICK)
    return await asyncio.to_thread(lambda: list(islice(times, limit)))
