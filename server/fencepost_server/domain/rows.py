"""The rows of what a run has beyond its open steps: control flow, timers, undo, children.

Like RunRow and TaskRow they are mutable: the fold of a batch changes them and writes what became of them. ``place``
is where in a run something happens: in which scope (0: the top sequence) and which branch or item of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from fencepost_server.domain.jsontext import dumps, loads
from fencepost_server.domain.model import TaskKind, TaskRow


class Place(NamedTuple):
    """A branch or item of an open parallel or map node."""

    scope: int = 0
    item: int = 0


TOP = Place()
"""The top sequence."""


@dataclass(slots=True)
class Decider:
    """Where the function of a code run is. Of its lease this knows while it is ``idle``; else its task's row does."""

    advance_no: int = 0
    """Of the last accepted Advance."""
    digest: str = ""
    """Of that, in hex: to know a repeat (I6)."""
    seen_seq: int = 0
    """Its seen_seq."""
    idle: bool = False
    """It has given its lease back, and waits for an event."""
    token: int = 0
    session: str = ""
    """Who decided last."""
    known: int = 0
    """The last event that this session was told of."""
    awaited: bool = False
    """An event came while the run was paused."""
    refusals: int = 0
    """How often in a row its end was refused because of events that it had not seen."""
    over: bool = False
    """The function has ended, or has no say any more."""
    failed_seq: int = 0
    """Of a function that has raised: the event of the failure that it let through."""
    tried: list[str] = field(default_factory=list)
    """The worker processes that could not go on with it since the last accepted Advance."""


@dataclass(slots=True)
class Control:
    """What is known of a run beyond its one open step. A run that is a plain sequence has none of it."""

    open_steps: int = 0
    open_waits: int = 0
    """Of a graph: timers of nodes, and waits for signals. What the function of a code run waits for is not counted: it
    may stop what has ended already.
    """
    open_children: int = 0
    signals: int = 0
    """Signals that no wait has taken."""
    undos: int = 0
    """Rows of the undo log: completed steps and children that can be undone, and steps that may have acted."""
    ending: dict[str, Any] | None = None
    """What the run will end as, once it is ENDING: state, failure (JSON of a Failure), retryable; and if a code run was
    asked to end, the grace in seconds.
    """
    paused: bool = False
    blocked: bool = False
    """A step of it is parked."""
    undo_failed: bool = False
    """Its undo is stopped until RetryRun."""
    began: bool = False
    """Something has come of it: a worker has reported on a step, a sleep or a child has ended, a signal was taken."""
    extras: bool = False
    """It has, or had, rows in the tables of extra.sql, to be cleared when it ends."""
    parent: tuple[str, int] | None = None
    """The run that waits for this one, and the event there that started it."""
    depth: int = 0
    """How many parents are above it."""
    stops: int = 0
    """How many activations were kept for a retry."""
    undone: bool = False
    """A step of it was undone: it can't go on any more."""
    decider: Decider | None = None
    """Of a code run."""
    chain: str = ""
    """The first run of the chain, if this is not the only one."""
    previous_run: str = ""
    """Whose work this run goes on with."""
    next_run: str = ""
    """Who goes on with the work of this run."""

    @property
    def is_ending(self) -> bool:
        """Nothing new is begun any more. A code run still decides, for its clean-up, until its function has ended."""
        return self.ending is not None and (self.decider is None or self.decider.over)

    def to_json(self) -> str:
        """As stored: what differs from a new one. Written by each batch for each of its runs, so it is kept quick."""
        value: dict[str, Any] = {}
        for key, fresh in _FRESH:
            mine = getattr(self, key)
            if mine != fresh:
                value[key] = mine
        decider = self.decider
        if decider is not None:
            value["decider"] = [getattr(decider, key) for key in _DECIDER]
        return dumps(value)

    @staticmethod
    def from_json(text: str) -> Control:
        """The inverse of ``to_json``."""
        control = Control(**loads(text))
        if control.parent is not None:
            control.parent = (control.parent[0], control.parent[1])
        if control.decider is not None:
            control.decider = Decider(*control.decider)  # type: ignore[misc]  # an array, in JSON
        return control


_FRESH = tuple((key, value) for key, value in asdict(Control()).items())
_DECIDER = tuple(each.name for each in fields(Decider))


@dataclass(frozen=True, slots=True)
class TaskExtra:
    """What is special about a task: it is no step of the top sequence, or undoes one."""

    kind: TaskKind = TaskKind.STEP
    scope: int = 0
    item: int = 0
    of: int = 0
    """Of an UNDO: the event of what is undone."""
    output_seq: int | None = None
    """Of an UNDO: the event that holds the step's output."""
    unfinished: bool = False
    step: int = 0
    """Of an UNDO: the task of the step that is undone; 0 for a child."""
    acted: bool = False
    """An attempt was made before an operator's retry, from which attempts count anew."""
    plan: tuple[str, str, str] | None = None
    """Of an op of a code run: a domain.code.Plan."""
    origin: str = ""
    """Of an UNDO: the run of the chain whose step is undone, if it is another one."""

    @property
    def place(self) -> Place:
        """Where in the run it is."""
        return Place(self.scope, self.item) if self.scope else TOP

    def step_key(self, run_id: str) -> str:
        """The idempotency key of the step that is undone. A local step is no task: its key has the number of its op,
        negative, so that it is no task's.
        """
        return f"{self.origin or run_id}/{self.step}" if self.step else ""

    def to_json(self) -> str | None:
        """As stored: None if there is nothing special."""
        if self is PLAIN:
            return None
        value = {key: value for key, value in asdict(self).items() if value != _PLAIN[key]}
        return json.dumps(value) if value else None

    @staticmethod
    def from_json(text: str | None) -> TaskExtra:
        """The inverse of ``to_json``."""
        if text is None:
            return PLAIN
        return _short_extra(text) if len(text) <= _SHORT else _extra(text)


def _extra(text: str) -> TaskExtra:
    value = json.loads(text)
    plan = value.get("plan")
    kind = TaskKind(value.get("kind", TaskKind.STEP))
    return TaskExtra(**{**value, "kind": kind, "plan": None if plan is None else tuple(plan)})


_SHORT = 100
_short_extra = lru_cache(maxsize=1000)(_extra)
"""Of DECIDE tasks, and of the steps of a branch, all are alike."""

PLAIN = TaskExtra()
"""Of a step of the top sequence."""
_PLAIN = asdict(PLAIN)


@dataclass(slots=True)
class ScopeRow:
    """An open parallel or map node. The order of fields is that of the statement scope."""

    run_id: str
    scope_id: int
    node_index: int
    total: int
    done: int
    next_item: int
    item_bytes: int
    output_bytes: int
    parent_scope: int
    parent_item: int

    @property
    def parent(self) -> Place:
        """Where the node itself is."""
        return Place(self.parent_scope, self.parent_item)


@dataclass(slots=True)
class TimerRow:
    """Something that is due at a time. ``place``: JSON object with node, scope, item and the like."""

    run_id: str
    seq: int
    kind: int
    namespace: str
    fire_at: datetime
    place: str


@dataclass(slots=True)
class ChildRow:
    """A child run that has not ended."""

    run_id: str
    seq: int
    child_run_id: str
    place: str


@dataclass(slots=True)
class UndoRow:
    """A completed step, or child, that can be undone; with ``unfinished`` one that may have acted. The order of fields
    is that of the statement next_undo.
    """

    run_id: str
    of_seq: int
    unfinished: bool
    node_index: int
    task_id: int
    input_seq: int
    input_bytes: int
    output_seq: int | None
    token: int
    scope_id: int
    item: int
    plan: str | None = None
    """JSON of a plan, of an op of a code run."""
    origin: str | None = None
    """The run of the chain that it was a step of, if that is another one: where its input and output are."""
    origin_seq: int | None = None
    """``of_seq`` there: here it is a number that keeps the order."""


def stopped_task(task: TaskRow) -> str:
    """A task as kept for RetryRun."""
    value = asdict(task)
    for name in ("visible_at", "lease_session", "lease_expires_at", "attempt_deadline_at", "resume_at"):
        del value[name]
    return json.dumps({"task": value})


def restarted_task(value: dict[str, Any], now: datetime) -> TaskRow:
    """A task of ``stopped_task``, ready again with fresh attempts. Its token goes on (I3)."""
    fresh = {"attempt": 0, "operational_failures": 0, "corrective_failures": 0, "redeliveries": 0}
    leases = {"lease_session": None, "lease_expires_at": None, "attempt_deadline_at": None}
    task = TaskRow(**{**value, **fresh, **leases, "visible_at": now, "resume_at": None})
    if value["attempt"] > 0:
        task.extra = replace(TaskExtra.from_json(task.extra), acted=True).to_json()
    return task
