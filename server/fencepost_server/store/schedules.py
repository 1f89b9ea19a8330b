"""Rows of schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fencepost_server.domain.firing import State
from fencepost_server.domain.model import Payload
from fencepost_server.domain.schedule import Spec, spec_from_json, spec_to_json
from fencepost_server.store.arrays import Ints, Texts, Times, Uuids, columns
from fencepost_server.store.connection import Database
from fencepost_server.store.pipeline import Session
from fencepost_server.store.queries import query
from fencepost_server.store.runs import in_order


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A schedule as stored. What it asks for is read by ``spec``, so that one that can't be read harms no other."""

    uuid: str
    namespace: str
    schedule_id: str
    spec_json: str
    input: Payload
    version: int
    update_request: str
    paused: bool
    pause_reason: str
    state: State
    last_run_id: str | None
    started_runs: int
    last_error: str
    created_at: datetime

    def spec(self) -> Spec:
        """When to start what. Raises ValueError, KeyError, TypeError if another release wrote something else."""
        return spec_from_json(self.spec_json, self.input)


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a fire time: its run, or why there is none."""

    uuid: str
    fire_at: datetime
    run_id: str | None
    error: str


def _row(row: tuple[Any, ...]) -> ScheduleRow:
    uuid, namespace, schedule_id, spec, text, binary, metadata, version, request, paused, reason, *rest = row
    next_at, starting_at, pending_at, due_at, last_at, last_run, started, overlap, missed, error, created_at = rest
    payload = Payload(text, None if binary is None else bytes(binary), metadata)
    state = State(next_at, starting_at, pending_at, last_at, overlap, missed, due_at)
    return ScheduleRow(
        uuid, namespace, schedule_id, spec, payload, version, request, paused, reason, state, last_run, started, error,
        created_at,
    )  # fmt: skip


async def lock_due(session: Session, limit: int) -> list[ScheduleRow]:
    """Lock some that are due; those that another transaction holds are left out."""
    return [_row(row) for row in await session.rows(query("schedule", "lock_due"), {"limit": limit})]


async def running(session: Session, run_ids: Sequence[str]) -> tuple[datetime, dict[str, str]]:
    """The database's time (I11), and which of the runs have not ended, each with the run that it has become by
    continuing as new, or itself.
    """
    now, active, live = (await session.rows(query("schedule", "running"), {"run_ids": Uuids(run_ids)}))[0]
    return now, dict(zip(active, live, strict=True))


def advance(session: Session, changed: Sequence[tuple[str, State]]) -> None:
    """Write what was decided on locked rows, given by uuid."""
    rows = [
        (
            uuid,
            state.next_fire_at,
            state.starting_at,
            state.pending_at,
            state.last_fire_at,
            state.skipped_overlap,
            state.skipped_missed,
            state.due_at,
        )
        for uuid, state in changed
    ]
    names = (
        "uuids",
        "next_fire_ats",
        "starting_ats",
        "pending_ats",
        "last_fire_ats",
        "skipped_overlaps",
        "skipped_misseds",
        "due_ats",
    )
    values = columns(rows, Uuids, Times, Times, Times, Times, Ints, Ints, Times)
    session.send(query("schedule", "advance"), dict(zip(names, values, strict=True)))


def park(session: Session, uuid: str, due_at: datetime, error: str) -> None:
    """Put a locked row off that can't be handled."""
    session.send(query("schedule", "park"), {"uuid": uuid, "due_at": due_at, "error": error})


async def first_due(session: Session) -> float | None:
    """In how many seconds the first schedule is due; None: none is."""
    rows = await session.rows(query("schedule", "first_due"))
    return rows[0][0] if rows else None


async def settle(database: Database, settled: Sequence[Settled]) -> None:
    """Write down what became of fire times. What another server has written already stays."""
    rows = sorted((s.uuid, s.fire_at, s.run_id, s.error) for s in settled)
    names = ("uuids", "fire_ats", "run_ids", "errors")
    values = columns(rows, Uuids, Times, Uuids, Texts)
    await database.rows(query("schedule", "settle"), dict(zip(names, values, strict=True)))


async def hurry(database: Database, uuids: Sequence[str]) -> None:
    """The run that these wait for has ended."""
    await database.rows(query("schedule", "hurry"), {"uuids": Uuids(uuids)})


async def started(database: Database, uuid: str, run_id: str, runs: int) -> None:
    """Runs were started at a call, the last of them ``run_id``."""
    await database.rows(query("schedule", "started"), {"uuid": uuid, "run_id": run_id, "runs": runs})


async def insert(
    session: Session,
    namespace: str,
    schedule_id: str,
    uuid: str,
    spec: Spec,
    state: State,
    *,
    paused: bool,
    at: datetime,
) -> bool:
    """Make a schedule. False if there is one of that id."""
    params = {
        "namespace": namespace,
        "schedule_id": schedule_id,
        "uuid": uuid,
        "paused": paused,
        "next_fire_at": state.next_fire_at,
        "due_at": state.due_at,
        "created_at": at,
        **_spec(spec_to_json(spec), spec.input),
    }
    return bool(await session.rows(query("schedule", "insert"), params))


def _spec(text: str, value: Payload) -> Mapping[str, Any]:
    return {
        "spec": text,
        "input": value.json,
        "input_binary": value.binary,
        "input_metadata": value.metadata,
    }


async def get(session: Session, namespace: str, schedule_id: str, *, lock: bool = False) -> ScheduleRow | None:
    """One schedule, or None; locked before it is read if wanted."""
    params = {"namespace": namespace, "schedule_id": schedule_id}
    if lock:
        session.send(query("schedule", "lock"), params)
    rows = await session.rows(query("schedule", "get"), params)
    return _row(rows[0]) if rows else None


async def list_schedules(database: Database, namespace: str, after: str, limit: int, bytes_: int) -> list[ScheduleRow]:
    """A page by id, of ``limit`` schedules, or about ``bytes_`` bytes of inputs, or one at least."""
    params = {"namespace": namespace, "after": after, "limit": limit, "bytes": bytes_}
    return [_row(row) for row in await in_order(database, query("schedule", "list"), params)]


def change(session: Session, row: ScheduleRow) -> None:
    """Write what a call has changed in a locked row."""
    params = {
        "uuid": row.uuid,
        "version": row.version,
        "update_request": row.update_request,
        "paused": row.paused,
        "pause_reason": row.pause_reason,
        "next_fire_at": row.state.next_fire_at,
        "starting_at": row.state.starting_at,
        "pending_at": row.state.pending_at,
        "due_at": row.state.due_at,
        "skipped_overlap": row.state.skipped_overlap,
        **_spec(row.spec_json, row.input),
    }
    session.send(query("schedule", "change"), params)


async def delete(database: Database, namespace: str, schedule_id: str) -> bool:
    """Delete a schedule. False if there was none."""
    params = {"namespace": namespace, "schedule_id": schedule_id}
    return bool(await database.rows(query("schedule", "delete"), params))


async def runs_of(database: Database, namespace: str, kind: int, keys: Sequence[str], origin: bytes) -> dict[str, str]:
    """By key, the runs of schedule keys that were started in one way."""
    params = {"namespace": namespace, "kind": kind, "keys": Texts(keys), "origin": origin}
    return dict(await database.rows(query("schedule", "runs_of"), params))
