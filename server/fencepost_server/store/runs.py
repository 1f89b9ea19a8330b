"""Runs and their histories, for those who read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

from fencepost_server.domain.model import Failure, FailureKind, Payload, RunState
from fencepost_server.store import waits
from fencepost_server.store.arrays import Ints, Texts, Uuids
from fencepost_server.store.connection import Database
from fencepost_server.store.pipeline import Params
from fencepost_server.store.queries import query
from fencepost_server.store.tasks import NO_RUN
from fencepost_server.store.waits import OpenWaitRow

Place = tuple[datetime, str]
"""A place in the order of lists: created_at, run_id."""

NEWEST: Place = (datetime(9999, 1, 1, tzinfo=UTC), "ffffffff-ffff-ffff-ffff-ffffffffffff")
_OLDEST = datetime(1, 1, 1, tzinfo=UTC)
_SCAN = 10_000
_MOST_COUNTED = 1000


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
    attributes: str | None
    """JSON text of an object of strings; None: none."""
    parent_run_id: str | None
    control: str | None
    """JSON text of a domain.rows.Control; None: a plain sequence."""


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
    extra: str | None
    """JSON text of a domain.rows.TaskExtra; None: a step of the top sequence."""
    checkpoint_number: int
    progress: str | None
    """What its worker told last, as wire.payloads.payload_text wrote it."""


@dataclass(frozen=True, slots=True)
class RunDetail:
    """A run with its payloads and what it waits for, all of one snapshot or later."""

    summary: RunSummary
    input: Payload
    output: Payload | None
    open_steps: list[OpenStepRow]
    open_waits: list[OpenWaitRow]
    pending_signals: list[tuple[str, int]]
    """The names of signals that no wait has taken, and how many each."""


def _summary(row: tuple[Any, ...]) -> RunSummary:
    run_id, namespace, workflow_id, definition_hash, *rest = row[:16]
    return RunSummary(run_id, namespace, workflow_id, bytes(definition_hash), *rest)


async def get_run(database: Database, namespace: str, run_id: str) -> RunDetail | None:
    """One run, or None."""
    params = {"namespace": namespace, "run_id": run_id}
    async with database.transaction() as session:
        steps = session.send(query("task", "open_steps"), params)
        waiting = waits.send_open(session, params)
        pending = waits.send_pending(session, params)
        run = session.send(query("run", "get_run"), params)
        payloads = session.send(query("run", "payloads"), params)
    rows = run.rows()
    if not rows:
        return None
    summary = _summary(rows[0])
    value: Payload | None = None
    output: Payload | None = None
    for seq, json_text, binary, metadata, is_output in payloads.rows():
        payload = Payload(json_text, None if binary is None else bytes(binary), metadata)
        if seq == 1:
            value = payload
        if is_output and summary.ended_at:
            output = payload
    if value is None:
        return None  # deleted between the reads: its first event went with it
    # Steps, waits, run, payloads were read in this order: a run that ends meanwhile shows as before or after its end.
    if summary.ended_at:
        return RunDetail(summary, value, output, [], [], [])
    open_steps = [OpenStepRow(*row) for row in steps.rows()]
    return RunDetail(summary, value, output, open_steps, waits.read_open(waiting), pending.rows())


async def get_summary(database: Database, namespace: str, run_id: str) -> RunSummary | None:
    """One run without its payloads, or None."""
    rows = await database.rows(query("run", "get_run"), {"namespace": namespace, "run_id": run_id})
    return _summary(rows[0]) if rows else None


async def latest(database: Database, namespace: str, run_id: str) -> str | None:
    """The last run of the chain that a run is in, also if the run itself, the first one, is kept no more; None if it
    has no chain.
    """
    rows = await database.rows(query("run", "latest"), {"namespace": namespace, "run_id": run_id})
    return rows[0][0] if rows else None


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
class RunFilter:
    """Which runs a list is of: those for which all of it holds. What is empty or None does not matter.

    ``created_after`` is included, ``created_before`` is not.
    """

    namespace: str
    workflow_id: str = ""
    states: frozenset[int] = frozenset()
    user_id: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    created_after: datetime | None = None
    created_before: datetime | None = None
    failure_code: str = ""
    parent_run_id: str | None = None

    def stored_failures(self) -> list[str]:
        """How the stored text of a failure with the code begins: as far as its message."""
        if not self.failure_code:
            return []
        return [Failure(kind, self.failure_code, "").to_json().removesuffix('"}') for kind in FailureKind]


@dataclass(frozen=True, slots=True)
class RunPage:
    """Runs, newest first, and where the next page begins (None: there is none)."""

    runs: list[RunSummary]
    next_before: Place | None


class _Lead(IntEnum):
    """By which index the candidates of a list are found: numbers of the statements list_runs and count_candidates."""

    ALL = 0
    WORKFLOW = 1
    USER = 2
    PARENT = 3
    ATTRIBUTE = 4


async def in_order(database: Database, statement: bytes, params: Params) -> list[Any]:
    """The rows of a statement that reads ranges of indexes in their order, each up to a limit."""
    async with database.transaction() as session:
        session.send(query("run", "in_order"))
        result = session.send(statement, params)
    return result.rows()


async def list_runs(database: Database, wanted: RunFilter, before: Place | None, limit: int) -> RunPage:
    """One page: runs before a place in the order, or from the newest. Looks at a bounded number of runs, so that what
    is rare can give an empty page that has a next one; where every run fits, at no more than it returns.
    """
    begin = min(before or NEWEST, (wanted.created_before or NEWEST[0], NO_RUN if wanted.created_before else NEWEST[1]))
    params: dict[str, Any] = {
        "namespace": wanted.namespace,
        "workflow_id": wanted.workflow_id,
        "user_id": wanted.user_id,
        "parent_run_id": wanted.parent_run_id,
        "created_after": wanted.created_after or _OLDEST,
        "before_at": begin[0],
        "before_run": begin[1],
        "states": Ints(() if set(RunState) <= wanted.states else sorted(wanted.states)),
        "failures": Texts(wanted.stored_failures()),
    }
    lead, key = await _lead(database, wanted, params)
    rest = {k: v for k, v in wanted.attributes.items() if k != key}
    params |= {"lead": int(lead), "key": key, "value": wanted.attributes.get(key, "")}
    params |= {"keys": Texts(rest), "values": Texts(rest.values())}
    narrow = bool(rest or params["states"] or params["failures"]) or _filters(wanted) - {lead}
    scan = _SCAN if narrow else limit
    rows = await in_order(database, query("run", "list_runs"), {**params, "scan": scan, "limit": limit})
    found = [_summary(row) for row in rows if row[16]]
    if len(found) == limit or (rows and rows[-1][17] == scan):
        return RunPage(found, (rows[-1][9], rows[-1][0]))
    return RunPage(found, None)


async def _lead(database: Database, wanted: RunFilter, params: Params) -> tuple[_Lead, str]:
    """The filter that leaves the fewest runs, and if it is an attribute its key. Only where there are several, they
    are counted, and only so far.
    """
    leads = _filters(wanted)
    if _Lead.PARENT in leads or not leads:
        return (_Lead.PARENT if leads else _Lead.ALL), ""
    keys = list(wanted.attributes)
    if len(leads) == 1 and len(keys) <= 1:
        return leads.pop(), keys[0] if keys else ""
    counted = {"keys": Texts(keys), "values": Texts(wanted.attributes.values()), "most": _MOST_COUNTED}
    rows = await in_order(database, query("run", "count_candidates"), {**params, **counted})
    # Of several that leave many, an attribute says more than a user or a workflow.
    _, lead, place = min((count, -lead, place) for lead, place, count in rows)
    return _Lead(-lead), keys[place - 1] if place else ""


def _filters(wanted: RunFilter) -> set[_Lead]:
    """The filters that have an index."""
    there = {
        _Lead.WORKFLOW: wanted.workflow_id,
        _Lead.USER: wanted.user_id,
        _Lead.PARENT: wanted.parent_run_id,
        _Lead.ATTRIBUTE: wanted.attributes,
    }
    return {lead for lead, value in there.items() if value}


async def workflows(database: Database, run_ids: Sequence[str]) -> dict[str, str]:
    """For each run that is there the id of its workflow."""
    return dict(await database.rows(query("run", "workflows"), {"run_ids": Uuids(run_ids)}))


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
