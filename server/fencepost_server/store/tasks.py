"""Leases outside the lanes: claimed, renewed, adopted, cut short, found expired. They lock tasks only, and skip
locked ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from fencepost_server.domain.model import DECIDE_TASK, PARKED_UNTIL, Checkpoint, Payload
from fencepost_server.store.arrays import Ints, Texts, Uuids, columns
from fencepost_server.store.connection import Database
from fencepost_server.store.pipeline import Session
from fencepost_server.store.queries import query

Ref = tuple[str, int, int]
"""run_id, task_id, token."""

ALWAYS = datetime(1970, 1, 1, tzinfo=UTC)
NO_RUN = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class Want:
    """Ready work to look for."""

    queue: str
    handler: str
    priority: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """A task that was just leased, with what its worker is told. The order of fields is that of the statement claim."""

    run_id: str
    task_id: int
    token: int
    session_id: str
    queue: str
    handler: str
    priority: int
    node_index: int
    attempt: int
    lease_ms: int
    timeout_ms: int | None
    feedback: str | None
    workflow_id: str
    definition_hash: bytes
    user_id: str
    input: Payload
    extra: str | None
    checkpoint: Checkpoint | None
    undo_output: Payload | None
    control: str | None
    """Of the run, if the task is not a step of a plain sequence."""
    last_seq: int
    """Of the run's history."""


History = list[tuple[Any, ...]]
"""Events; columns as the statement history of extra.sql has them."""
After = Callable[[Sequence[Claimed]], Sequence[tuple[str, int]]]
"""Of which runs, among those of claimed tasks, the history after a number is wanted."""


async def claim(
    database: Database, namespace: str, wants: Sequence[Want], sessions: Sequence[str], max_bytes: int, after: After
) -> tuple[list[Claimed], dict[str, History]]:
    """Lease ready tasks, the wants in their order, the n-th task to the n-th of ``sessions``. One round trip, and one
    more if ``after`` wants histories: the first page of each, by run.

    Takes no more once the inputs of those before come to ``max_bytes``. Raises DatabaseUnavailable, and then tasks may
    have been leased.
    """
    queues, handlers, priorities = columns([(w.queue, w.handler, w.priority) for w in wants], Texts, Texts, Ints)
    params = {
        "namespace": namespace, "queues": queues, "handlers": handlers, "priorities": priorities,
        "sessions": Uuids(sessions), "limit": len(sessions), "max_bytes": max_bytes,
    }  # fmt: skip
    claimed = [_claimed(row) for row in await database.rows(query("task", "claim"), params)]
    wanted = after(claimed)
    histories: dict[str, History] = {run_id: [] for run_id, _seq in wanted}
    if wanted:  # after the commit of the leases: most claims want none, and rows are not kept locked for it
        run_ids, seqs = columns(wanted, Uuids, Ints)
        for ord_, *row in await database.rows(query("extra", "history"), {"a": run_ids, "b": seqs}):
            histories[wanted[ord_ - 1][0]].append(tuple(row))
    return claimed, histories


def _claimed(row: tuple[Any, ...]) -> Claimed:
    number = row[19]
    checkpoint = Checkpoint(number, _payload(row[20:23])) if number else None
    undo_output = None if row[18] is None else _payload(row[23:26])
    values = (
        *row[:13],
        bytes(row[13]),
        row[14],
        _payload(row[15:18]),
        row[18],
        checkpoint,
        undo_output,
        row[26],
        row[27],
    )
    return Claimed(*values)


def _payload(parts: tuple[Any, ...]) -> Payload:
    json_text, binary, metadata = parts
    return Payload(json_text, None if binary is None else bytes(binary), metadata)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A code run whose DECIDE task is blocked. ``control``: of the run, as stored."""

    run_id: str
    queue: str
    handler: str
    control: str | None


async def blocked_deciders(
    database: Database, namespace: str, places: Sequence[tuple[str, str]], after: str, limit: int
) -> list[Blocked]:
    """Runs whose DECIDE task (queue, handler) is blocked; a page, by run id."""
    queues, handlers = columns(places, Texts, Texts)
    rows = await database.rows(
        query("task", "blocked_deciders"),
        {"namespace": namespace, "queues": queues, "handlers": handlers, "until": PARKED_UNTIL, "after": after,
         "limit": limit},
    )  # fmt: skip
    return [Blocked(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class Lease:
    """What a renewed lease has left, in seconds, and whether its step should stop. ``last_seq``: of a DECIDE task, the
    number of the run's last event.
    """

    seconds: float
    cancel_wanted: bool = False
    last_seq: int = 0


async def renew(
    session: Session, namespace: str, refs: Sequence[Ref], progress: Mapping[Ref, str]
) -> tuple[dict[Ref, Lease], set[Ref]]:
    """Renew leases, and write down how far their steps are where that is told, as JSON text. Returns the renewed ones,
    and those that are current but were locked just now.
    """
    # Those with progress first: a column that is shorter than the others is filled up with nulls by the statement, so
    # that heartbeats which tell of none carry none.
    ordered = [*progress, *(ref for ref in refs if ref not in progress)] if progress else refs
    params = {"namespace": namespace, "progress": Texts(progress.values())}
    renewed, locked = await _extend(session, "renew", params, ordered)
    deciding = [ref for ref in renewed if ref[1] == DECIDE_TASK]
    if deciding:
        rows = await session.rows(query("run", "progress"), {"run_ids": Uuids([ref[0] for ref in deciding])})
        last = {run_id: last_seq for run_id, last_seq, _ended in rows}
        renewed |= {ref: replace(renewed[ref], last_seq=last.get(ref[0], 0)) for ref in deciding}
    return renewed, locked


async def adopt(
    session: Session, namespace: str, session_id: str, refs: Sequence[Ref]
) -> tuple[dict[Ref, Lease], set[Ref]]:
    """Move held leases to a process's new session. Returns as ``renew``."""
    return await _extend(session, "adopt", {"namespace": namespace, "session": session_id}, refs)


async def _extend(
    session: Session, statement: str, params: dict[str, Any], refs: Sequence[Ref]
) -> tuple[dict[Ref, Lease], set[Ref]]:
    """Answers are by the whole reference: one batch can hold a stale token and the current one of the same task."""
    rows = await session.rows(query("task", statement), {**params, **_ref_columns(refs)})
    done: dict[Ref, Lease] = {
        (run_id, task_id, token): Lease(seconds, cancel_wanted)
        for run_id, task_id, token, seconds, cancel_wanted in rows
    }
    rest = [ref for ref in refs if ref not in done]
    if not rest:
        return done, set()
    rows = await session.rows(query("task", "read_leases"), {"namespace": params["namespace"], **_ref_columns(rest)})
    return done, {(run_id, task_id, token) for run_id, task_id, token in rows}


def _ref_columns(refs: Sequence[Ref]) -> dict[str, Any]:
    return dict(zip(("run_ids", "task_ids", "tokens"), columns(refs, Uuids, Ints, Ints), strict=True))


async def session_leases(database: Database, session_ids: Sequence[str], limit: int) -> list[tuple[Ref, str]]:
    """What sessions have on lease, with the session of each."""
    rows = await database.rows(query("task", "session_leases"), {"sessions": Uuids(session_ids), "limit": limit})
    return [((run_id, task_id, token), session_id) for run_id, task_id, token, session_id in rows]


async def shorten(database: Database, session_ids: Sequence[str], grace: float) -> set[str]:
    """Cut the leases of ended sessions down to the grace. Returns the sessions of which some could not be had: call
    again.
    """
    params = {"sessions": Uuids(session_ids), "grace": timedelta(seconds=grace)}
    async with database.transaction() as session:
        session.send(query("task", "shorten"), params)
        left = await session.rows(query("task", "long_sessions"), params)
    return {session_id for (session_id,) in left}


@dataclass(frozen=True, slots=True)
class Expired:
    """A lease that seems to have run out."""

    run_id: str
    task_id: int
    token: int
    namespace: str
    expires_at: datetime


async def expired(database: Database, after: Expired | None, limit: int) -> list[Expired]:
    """The next candidates of a sweep, oldest first."""
    rows = await database.rows(
        query("task", "expired"),
        {
            "after_at": ALWAYS if after is None else after.expires_at,
            "after_run": NO_RUN if after is None else after.run_id,
            "after_task": 0 if after is None else after.task_id,
            "limit": limit,
        },
    )
    return [Expired(*row) for row in rows]
