"""Runs and their histories, for those who read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fencepost_server.domain.model import Payload, RunState
from fencepost_server.store.arrays import Ints, Uuids
from fencepost_server.store.connection import Database
from fencepost_server.store.queries import query

NEWEST = (datetime(9999, 1, 1, tzinfo=UTC), "ffffffff-ffff-ffff-ffff-ffffffffffff")
_SCAN = 10_000


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run without its payloads. The order of fields is that of the statements get_run and list_runs."""

    run_id: str
    namespace: str
    workflow_id: str
    definition_hash: bytes
    state: int
    user_id: str
    request_key: str
    priority: int
    failure: str | None
    created_at: datetime
    ended_at: datetime | None
    last_seq: int
    dedupe_key: str


@dataclass(frozen=True, slots=True)
class OpenStepRow:
    """An open task. The order of fields is that of the statement open_steps."""

    task_id: int
    node_index: int
    handler: str
    queue: str
    attempt: int
    operational_failures: int
    corrective_failures: int
    visible_at: datetime
    lease_expires_at: datetime | None
    last_failure: str | None
    worker_name: str | None
    later: bool
    leased: bool


@dataclass(frozen=True, slots=True)
class RunDetail:
    """A run with its payloads and open steps, all of one snapshot or later."""

    summary: RunSummary
    input: Payload
    output: Payload | None
    open_steps: list[OpenStepRow]


def _summary(row: tuple[Any, ...]) -> RunSummary:
    run_id, namespace, workflow_id, definition_hash, *rest = row[:13]
    return RunSummary(run_id, namespace, workflow_id, bytes(definition_hash), *rest)


async def get_run(database: Database, namespace: str, run_id: str) -> RunDetail | None:
    """One run, or None."""
    params = {"namespace": namespace, "run_id": run_id}
    async with database.transaction() as session:
        steps = await session.send(query("task", "open_steps"), params)
        run = await session.send(query("run", "get_run"), params)
        payloads = await session.send(query("run", "payloads"), params)
    rows = await run.fetchall()
    if not rows:
        return None
    summary = _summary(rows[0])
    value, output = Payload(), None
    for seq, json_text, binary, metadata, is_output in await payloads.fetchall():
        payload = Payload(json_text, None if binary is None else bytes(binary), metadata)
        if seq == 1:
            value = payload
        if is_output and summary.ended_at:
            output = payload
    # Steps, run and payloads were read in this order: a run that ends meanwhile shows as before or after its end.
    open_steps = [] if summary.ended_at else [OpenStepRow(*row) for row in await steps.fetchall()]
    return RunDetail(summary, value, output, open_steps)


async def get_summary(database: Database, namespace: str, run_id: str) -> RunSummary | None:
    """One run without its payloads, or None."""
    rows = await database.rows(query("run", "get_run"), {"namespace": namespace, "run_id": run_id})
    return _summary(rows[0]) if rows else None


async def run_by_key(
    database: Database, namespace: str, kind: int, workflow_id: str, user_id: str, key: str
) -> str | None:
    """The id of the run that a key stands for, or None."""
    rows = await database.rows(
        query("run", "run_by_key"),
        {"namespace": namespace, "kind": kind, "workflow_id": workflow_id, "user_id": user_id, "key": key},
    )
    return rows[0][0] if rows else None


@dataclass(frozen=True, slots=True)
class RunPage:
    """Runs, newest first, and where the next page begins (None: there is none)."""

    runs: list[RunSummary]
    next_before: tuple[datetime, str] | None


async def list_runs(
    database: Database,
    namespace: str,
    workflow_id: str,
    states: Sequence[int],
    before: tuple[datetime, str],
    limit: int,
) -> RunPage:
    """One page. Reads a bounded number of rows, so that a rare state can give an empty page that has a next one; where
    every run fits, no more rows than it returns.
    """
    scan = limit if set(RunState) <= set(states) else _SCAN
    name = "list_runs_of_workflow" if workflow_id else "list_runs"
    rows = await database.rows(
        query("run", name),
        {
            "namespace": namespace,
            "workflow_id": workflow_id,
            "states": Ints(states),
            "before_at": before[0],
            "before_run": before[1],
            "scan": scan,
            "limit": limit,
        },
    )
    found = [_summary(row) for row in rows if row[13]]
    if rows and (len(rows) == limit or rows[-1][14] == scan):
        last = rows[-1]
        return RunPage(found, (last[9], last[0]))
    return RunPage(found, None)


async def progress(database: Database, run_ids: Sequence[str]) -> list[tuple[str, int, bool]]:
    """For each run the number of its last event, and whether it has ended."""
    rows = await database.rows(query("run", "progress"), {"run_ids": Uuids(run_ids)})
    return [(run_id, last_seq, ended) for run_id, last_seq, ended in rows]


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An entry of a history. The order of fields is that of the statement history."""

    seq: int
    type: int
    at: datetime
    node_index: int | None
    task_id: int | None
    token: int | None
    attempt: int | None
    input_seq: int | None
    payload: Payload
    detail: str | None


def _record(row: tuple[Any, ...]) -> EventRecord:
    json_text, binary, metadata, detail = row[8:]
    payload = Payload(json_text, None if binary is None else bytes(binary), metadata)
    return EventRecord(*(*row[:8], payload, detail))


async def history(database: Database, run_id: str, after: int, limit: int) -> list[EventRecord]:
    """Events after a number, in order."""
    rows = await database.rows(query("run", "history"), {"run_id": run_id, "after": after, "limit": limit})
    return [_record(row) for row in rows]
