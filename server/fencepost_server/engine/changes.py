"""What a batch has decided: rows to write, and whom to tell what after the commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import Any

from fencepost_server.domain.errors import FencepostError
from fencepost_server.domain.model import LeasedTask, RunRow, TaskRow
from fencepost_server.domain.ops import HistoryEvent
from fencepost_server.domain.rows import ScopeRow
from fencepost_server.engine.operations import (
    Answer,
    Command,
    Commanded,
    Deliver,
    Fire,
    Report,
    Start,
    Started,
    WorkerSession,
)

TaskKey = tuple[str, int]
Blocked = tuple[str, str, str]
"""run_id, workflow_id and the code of the failure of a run that waits for a person."""
EventRow = tuple[
    str, int, int, datetime, int | None, int | None, int | None, int | None, int | None, bytes | None, str | None,
    bytes | None, str | None, str | None,
]  # fmt: skip
"""run_id, seq, type, at, node_index, task_id, token, attempt, input_seq, digest, payload, binary, metadata, detail."""
_TYPE = itemgetter(2)


@dataclass(slots=True)
class NewTask:
    """A task to insert: leased already, or ready."""

    row: TaskRow
    namespace: str


@dataclass(slots=True)
class NewRun:
    """A run to insert, with what never changes."""

    row: RunRow
    request_key: str
    attributes: str | None
    parent_run_id: str | None
    chain_id: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Work that somebody may take, now or after ``delay`` seconds."""

    namespace: str
    queue: str
    handler: str
    priority: int
    delay: float = 0.0


@dataclass(slots=True)
class Rows:
    """What is still to be written."""

    new_runs: dict[str, NewRun] = field(default_factory=dict)
    changed_runs: dict[str, RunRow] = field(default_factory=dict)
    events: list[EventRow] = field(default_factory=list)
    new_tasks: list[NewTask] = field(default_factory=list)
    gone_tasks: list[TaskKey] = field(default_factory=list)
    changed_tasks: dict[TaskKey, TaskRow] = field(default_factory=dict)
    changed_scopes: dict[TaskKey, ScopeRow] = field(default_factory=dict)
    extra: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    """By the name of their statement in extra.sql."""

    def add(self, statement: str, *row: Any) -> None:
        """A row for a statement of extra.sql."""
        self.extra.setdefault(statement, []).append(row)


@dataclass(slots=True)
class Changes:
    """See the module."""

    now: datetime
    rows: Rows = field(default_factory=Rows)
    reports: list[tuple[Report, Answer]] = field(default_factory=list)
    starts: list[tuple[Start, Started]] = field(default_factory=list)
    commands: list[tuple[Command, Commanded | FencepostError]] = field(default_factory=list)
    handled: list[Fire | Deliver] = field(default_factory=list)
    leased: list[tuple[WorkerSession, LeasedTask]] = field(default_factory=list)
    revoked: list[tuple[str, str, int, int, str]] = field(default_factory=list)
    """(session_id, run_id, task_id, token, reason) of leases that somebody else than their holder ended."""
    cancelled: list[tuple[str, str, int, int, str, float]] = field(default_factory=list)
    """(session_id, run_id, task_id, token, reason, seconds) of leases whose holders should stop."""
    pushed: list[Push] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    freed_keys: list[RunRow] = field(default_factory=list)
    """Runs that have ended and held a dedupe key."""
    changed: set[str] = field(default_factory=set)
    """Runs that have new events."""
    messages: bool = False
    """There is something to deliver to other runs."""
    undo_logs: list[list[tuple[Any, ...]]] = field(default_factory=list)
    """Undo logs that were read, for engine.context.UndoOrders: only what is committed stays true."""
    timers: list[datetime] = field(default_factory=list)
    """When new timers are due."""
    events: Counter[int] = field(default_factory=Counter)
    """How many events were written, by type."""
    opened: int = 0
    """Items of maps that were opened, in all runs together."""

    def take_rows(self) -> Rows:
        """What is to be written now; what comes later is written later in the same transaction."""
        rows, self.rows = self.rows, Rows()
        self.events.update(map(_TYPE, rows.events))
        return rows


Eager = Callable[[Report, RunRow, str, str], int | None]
"""May the session of a report take the next step of its run (queue, handler) at once? Its depth, or None."""


Taker = Callable[[RunRow, str, str], WorkerSession | None]
"""A session that waits for such a task (run, queue, handler) while nothing else that it could do waits; or None."""
Sticky = Callable[[str], WorkerSession | None]
"""By its id: the session to lease the DECIDE task of a run that it decided last; None if it can't take it."""
Push = tuple[str, str, int, int, int, tuple[HistoryEvent, ...]]
"""session_id, run_id, task_id, token; the number of the event before; new events of a run that the session holds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that decisions keep."""

    free_redeliveries: int
    max_payload_bytes: int
    max_map_items: int
    max_pending_signals: int
    cancel_grace: float
    max_history_events: int


Told = tuple[list[tuple[Report, Answer]], list[LeasedTask]]


def by_session(changes: Changes) -> dict[WorkerSession, Told]:
    """Answers and leased tasks, grouped by the session that is told them together."""
    grouped: dict[WorkerSession, Told] = {}
    for report, answer in changes.reports:
        if report.session is not None:
            grouped.setdefault(report.session, ([], []))[0].append((report, answer))
    for session, task in changes.leased:
        grouped.setdefault(session, ([], []))[1].append(task)
    return grouped
