"""The statements of a group commit, as functions over rows. engine.commit calls them in the order of the one
lock order: deployments, runs by id, tasks by id, (messages: see extras,) keys sorted; it reads, decides, and writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from fencepost_server.domain.model import Ended, RunRow, TaskRow
from fencepost_server.store.arrays import Blobs, Bools, Ints, Names, Texts, Times, Uuids, columns
from fencepost_server.store.pipeline import Result, Session
from fencepost_server.store.queries import query

TaskKey = tuple[str, int]


def _q(name: str) -> bytes:
    return query("batch", name)


_LOCK_DEPLOYMENTS, _LOCK_RUNS, _LOCK_RUNS_SKIPPING, _LOCK_TASKS, _READ_CLOCK = map(
    _q, ("lock_deployments", "lock_runs", "lock_runs_skipping", "lock_tasks", "read_clock")
)
_READ_DEFINITIONS, _READ_OUTCOMES, _INSERT_KEYS, _READ_KEYS, _UPDATE_KEYS, _DELETE_KEYS = map(
    _q, ("read_definitions", "read_outcomes", "insert_keys", "read_keys", "update_keys", "delete_keys")
)
_INSERT_RUNS, _UPDATE_RUNS, _DELETE_TASKS, _INSERT_TASKS, _UPDATE_TASKS, _INSERT_EVENTS = map(
    _q, ("insert_runs", "update_runs", "delete_tasks", "insert_tasks", "update_tasks", "insert_events")
)
_READ_RUNS, _READ_DECIDERS = _q("read_runs"), _q("read_deciders")
_READ_FOR_STARTS = query("definition", "read_for_starts")


@dataclass(frozen=True, slots=True)
class Clock:
    """The one time of a batch, the epoch of tokens, until when no lease expires, and when a server last looked."""

    now: datetime
    epoch: int
    hold_until: datetime
    last_pass_at: datetime


class LeasedDecider(NamedTuple):
    """A DECIDE task on lease. ``fresh``: nothing has gone wrong with it since the last Advance. The order of fields is
    that of the statement read_deciders.
    """

    token: int
    handler: str
    fresh: bool


@dataclass(frozen=True, slots=True)
class Locked:
    """What a batch holds."""

    active: dict[tuple[str, str], bytes]
    """(namespace, workflow_id) → hash of the active definition."""
    removed: dict[tuple[str, str], frozenset[bytes]]
    """(namespace, workflow_id) → hashes of the definitions that were removed."""
    runs: dict[str, RunRow]
    tasks: dict[TaskKey, TaskRow]
    deciders: dict[str, LeasedDecider]
    """By run: its DECIDE task, if that is leased; read, and not locked."""
    clock: Clock


async def lock_and_read(
    session: Session,
    workflows: Collection[tuple[str, str]],
    run_ids: Collection[str],
    task_keys: Collection[TaskKey],
    decided: Collection[str],
    *,
    skip_locked: bool,
) -> Locked:
    """One round trip: lock in order, then read the clock, and the DECIDE tasks of the runs ``decided``. With
    ``skip_locked``, runs that others hold are left out.
    """
    deciders: Result | None = None
    deployments: Result | None = None
    runs: Result | None = None
    tasks: Result | None = None
    if workflows:
        namespaces, workflow_ids = columns(sorted(workflows), Texts, Texts)
        deployments = session.send(_LOCK_DEPLOYMENTS, {"namespaces": namespaces, "workflow_ids": workflow_ids})
    if run_ids:
        lock = _LOCK_RUNS_SKIPPING if skip_locked else _LOCK_RUNS
        runs = session.send(lock, {"run_ids": Uuids(sorted(run_ids))})
    if task_keys and not skip_locked:
        tasks = _send_lock_tasks(session, task_keys)
    if decided:
        deciders = session.send(_READ_DECIDERS, {"run_ids": Uuids(decided)})
    clock = session.send(_READ_CLOCK)
    await session.sync()
    locked_runs = {} if runs is None else {row[0]: RunRow(*row) for row in runs.rows()}
    if skip_locked and task_keys:
        # The tasks of a run that could not be locked must not be touched: only now is it known which these are.
        tasks = _send_lock_tasks(session, [key for key in task_keys if key[0] in locked_runs])
        clock = session.send(_READ_CLOCK)
        await session.sync()
    deployed = [] if deployments is None else deployments.rows()
    return Locked(
        {(ns, wf): bytes(active) for ns, wf, active, _removed in deployed},
        {(ns, wf): frozenset(map(bytes, removed)) for ns, wf, _active, removed in deployed},
        locked_runs,
        {} if tasks is None else {(row[0], row[1]): TaskRow(*row) for row in tasks.rows()},
        {} if deciders is None else {row[0]: LeasedDecider(*row[1:]) for row in deciders.rows()},
        Clock(*(clock.rows())[0]),
    )


def _send_lock_tasks(session: Session, task_keys: Collection[TaskKey]) -> Result:
    run_ids, task_ids = columns(sorted(task_keys), Uuids, Ints)
    return session.send(_LOCK_TASKS, {"run_ids": run_ids, "task_ids": task_ids})


async def read_runs(session: Session, run_ids: Collection[str]) -> dict[str, bytes]:
    """Which of these runs exist: their definition hashes by run id."""
    if not run_ids:
        return {}
    rows = await session.rows(_READ_RUNS, {"run_ids": Uuids(run_ids)})
    return {run_id: bytes(hash_) for run_id, hash_ in rows}


async def read_definitions(session: Session, hashes: Collection[bytes]) -> dict[bytes, str]:
    """Canonical manifests by hash."""
    rows = await session.rows(_READ_DEFINITIONS, {"hashes": Blobs(hashes)})
    return {bytes(h): manifest for h, manifest in rows}


async def read_definitions_for_starts(
    session: Session, wanted: Collection[tuple[str, str, bytes]]
) -> dict[tuple[str, str, bytes], str]:
    """Canonical manifests by (namespace, workflow_id, hash)."""
    namespaces, workflow_ids, hashes = columns(list(wanted), Texts, Texts, Blobs)
    rows = await session.rows(
        _READ_FOR_STARTS, {"namespaces": namespaces, "workflow_ids": workflow_ids, "hashes": hashes}
    )
    return {(ns, wf, bytes(h)): manifest for ns, wf, h, manifest in rows}


async def read_outcomes(session: Session, task_keys: Collection[TaskKey]) -> dict[TaskKey, Ended]:
    """How tasks that are gone ended."""
    run_ids, task_ids = columns(sorted(task_keys), Uuids, Ints)
    rows = await session.rows(_READ_OUTCOMES, {"run_ids": run_ids, "task_ids": task_ids})
    return {
        (run_id, task_id): Ended(type_, token, None if digest is None else bytes(digest), detail)
        for run_id, task_id, type_, token, digest, detail in rows
    }


Key = tuple[str, int, str, str, str]
"""namespace, kind, workflow_id, user_id, key."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """What a key stands for. ``created``: whether the run was made by the request that brought the key first."""

    run_id: str
    definition_hash: bytes
    fingerprint: bytes
    created: bool
    input_differs: bool = False


def insert_keys(session: Session, rows: Iterable[tuple[Key, KeyRow, datetime | None]]) -> None:
    """Claim keys; those that exist stay as they are. Waits for transactions that insert the same ones."""
    flat = sorted((*key, row.run_id, row.definition_hash, row.fingerprint, row.created, at) for key, row, at in rows)
    names = (
        "namespaces",
        "kinds",
        "workflow_ids",
        "user_ids",
        "keys",
        "run_ids",
        "hashes",
        "fingerprints",
        "created",
        "expires_at",
    )
    values = columns(flat, Texts, Ints, Texts, Texts, Texts, Uuids, Blobs, Blobs, Bools, Times)
    session.send(_INSERT_KEYS, dict(zip(names, values, strict=True)))


async def read_keys(session: Session, keys: Sequence[Key]) -> dict[Key, KeyRow]:
    """What the keys stand for, after ``insert_keys``."""
    rows = await session.rows(_READ_KEYS, _key_columns(keys))
    return {
        keys[ord_ - 1]: KeyRow(run_id, bytes(h), bytes(fp), made, differs)
        for ord_, run_id, h, fp, made, differs in rows
    }


def update_keys(session: Session, rows: Sequence[tuple[Key, KeyRow]]) -> None:
    """Bind keys of this transaction to other runs than they were inserted for."""
    params = _key_columns([key for key, _ in rows])
    params["run_ids"] = Uuids(row.run_id for _, row in rows)
    params["hashes"] = Blobs(row.definition_hash for _, row in rows)
    params["fingerprints"] = Blobs(row.fingerprint for _, row in rows)
    params["created"] = Bools(row.created for _, row in rows)
    params["input_differs"] = Bools(row.input_differs for _, row in rows)
    session.send(_UPDATE_KEYS, params)


def delete_keys(session: Session, rows: Sequence[tuple[Key, str]]) -> None:
    """Take back keys of this transaction, of requests that were refused after all. ``rows``: (key, run_id)."""
    params = _key_columns([key for key, _ in rows])
    params["run_ids"] = Uuids(run_id for _, run_id in rows)
    session.send(_DELETE_KEYS, params)


def _key_columns(keys: Sequence[Key]) -> dict[str, Any]:
    names = ("namespaces", "kinds", "workflow_ids", "user_ids", "keys")
    return dict(zip(names, columns(keys, Texts, Ints, Texts, Texts, Texts), strict=True))


def insert_runs(session: Session, rows: Sequence[tuple[RunRow, str, str | None, str | None, str | None]]) -> None:
    """New runs, each with its request key, its attributes (JSON text), its parent and the first run of its chain. A run
    was made when its events were.
    """
    names = (
        "run_ids", "namespaces", "workflow_ids", "hashes", "user_ids", "request_keys", "dedupe_keys", "priorities",
        "states", "node_indexes", "next_seqs", "created_ats", "output_seqs", "failures", "ended_ats", "controls",
        "attributes", "parents", "chains",
    )  # fmt: skip
    flat = [
        (r.run_id, r.namespace, r.workflow_id, r.definition_hash, r.user_id, key, r.dedupe_key, r.priority, r.state,
         r.node_index, r.next_seq, r.last_event_at, r.output_seq, r.failure, r.ended_at, r.control, attributes, parent,
         chain)
        for r, key, attributes, parent, chain in rows
    ]  # fmt: skip
    values = columns(
        flat, Uuids, Names, Names, Blobs, Texts, Texts, Texts, Ints, Ints, Ints, Ints, Times, Ints, Texts, Times, Texts,
        Texts, Uuids, Uuids,
    )  # fmt: skip
    session.send(_INSERT_RUNS, dict(zip(names, values, strict=True)))


def update_runs(session: Session, rows: Collection[RunRow]) -> None:
    """What became of locked runs."""
    names = (
        "run_ids", "states", "node_indexes", "next_seqs", "last_event_ats", "output_seqs", "failures", "ended_ats",
        "controls",
    )  # fmt: skip
    flat = [
        (r.run_id, r.state, r.node_index, r.next_seq, r.last_event_at, r.output_seq, r.failure, r.ended_at, r.control)
        for r in rows
    ]
    values = columns(flat, Uuids, Ints, Ints, Ints, Times, Ints, Texts, Times, Texts)
    session.send(_UPDATE_RUNS, dict(zip(names, values, strict=True)))


def delete_tasks(session: Session, keys: Sequence[TaskKey]) -> None:
    """Tasks that have ended."""
    run_ids, task_ids = columns(keys, Uuids, Ints)
    session.send(_DELETE_TASKS, {"run_ids": run_ids, "task_ids": task_ids})


def insert_tasks(session: Session, rows: Sequence[tuple[TaskRow, str]]) -> None:
    """New tasks, ready or leased, each with its namespace."""
    names = (
        "run_ids", "task_ids", "namespaces", "queues", "handlers", "priorities", "node_indexes", "input_seqs",
        "input_bytes", "visible_ats", "attempts", "tokens", "lease_mss", "timeout_mss", "lease_sessions",
        "lease_expires_ats", "attempt_deadline_ats", "extras", "resume_ats",
    )  # fmt: skip
    flat = [
        (t.run_id, t.task_id, ns, t.queue, t.handler, t.priority, t.node_index, t.input_seq, t.input_bytes,
         t.visible_at, t.attempt, t.token, t.lease_ms, t.timeout_ms, t.lease_session, t.lease_expires_at,
         t.attempt_deadline_at, t.extra, t.resume_at)
        for t, ns in rows
    ]  # fmt: skip
    values = columns(
        flat, Uuids, Ints, Names, Names, Names, Ints, Ints, Ints, Ints, Times, Ints, Ints, Ints, Ints, Uuids, Times,
        Times, Texts, Times,
    )  # fmt: skip
    session.send(_INSERT_TASKS, dict(zip(names, values, strict=True)))


def update_tasks(session: Session, rows: Collection[TaskRow]) -> None:
    """Tasks that went back to ready."""
    names = (
        "run_ids", "task_ids", "visible_ats", "attempts", "operational_failures", "corrective_failures", "redeliveries",
        "tokens", "last_failures", "feedbacks", "outcomes", "resume_ats",
    )  # fmt: skip
    flat = [
        (t.run_id, t.task_id, t.visible_at, t.attempt, t.operational_failures, t.corrective_failures, t.redeliveries,
         t.token, t.last_failure, t.feedback, t.outcomes, t.resume_at)
        for t in rows
    ]  # fmt: skip
    values = columns(flat, Uuids, Ints, Times, Ints, Ints, Ints, Ints, Ints, Texts, Texts, Texts, Times)
    session.send(_UPDATE_TASKS, dict(zip(names, values, strict=True)))


def insert_events(session: Session, rows: Sequence[tuple[Any, ...]]) -> None:
    """Events, each a tuple in the order of engine.changes.EventRow."""
    names = (
        "run_ids", "seqs", "types", "ats", "node_indexes", "task_ids", "tokens", "attempts", "input_seqs", "digests",
        "payloads", "binaries", "metadata", "details",
    )  # fmt: skip
    values = columns(rows, Uuids, Ints, Ints, Times, Ints, Ints, Ints, Ints, Ints, Blobs, Texts, Blobs, Texts, Texts)
    session.send(_INSERT_EVENTS, dict(zip(names, values, strict=True)))
