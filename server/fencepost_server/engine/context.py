"""One run under decision: its rows, its history's next number, and how the deciding code asks for more.

The code that decides is written as coroutines that do no I/O. What it needs to see beyond the locked rows it awaits
with ``read``; engine.commit answers the needs of all runs of a batch in one round trip, after it has written what was
decided so far, so that what is read is always what has been decided.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from fencepost_server.domain.code import op_node
from fencepost_server.domain.graph import Graph, GraphNode, Work
from fencepost_server.domain.jsontext import dumps, parse
from fencepost_server.domain.model import (
    Ended,
    EventType,
    Failure,
    Payload,
    RunRow,
    RunState,
    TaskKind,
    TaskRow,
    TimerKind,
)
from fencepost_server.domain.ops import HistoryEvent
from fencepost_server.domain.rows import TOP, Control, Place, ScopeRow, TaskExtra
from fencepost_server.domain.transitions import RunEvent, Verdict, verdict
from fencepost_server.engine.changes import Changes, Eager, Limits, Ready, Sticky, Taker
from fencepost_server.engine.operations import MessageKind, Report
from fencepost_server.store.extras import Need

Rows = list[tuple[Any, ...]]
INPUTS = frozenset(
    (EventType.STEP_COMPLETED, EventType.STEP_FAILED, EventType.TIMER_FIRED, EventType.SIGNAL_RECEIVED,
     EventType.CHILD_ENDED, EventType.RUN_ENDING)
)  # fmt: skip
"""What the function of a code run waits for."""
_UNDO_ORDERS = 2000
_STATES = {int(state): state for state in RunState}


class _Reading:
    """What ``await`` hands to whoever drives the coroutine: a need, for which it gets rows."""

    __slots__ = ("_need",)

    def __init__(self, need: Need) -> None:
        self._need = need

    def __await__(self) -> Generator[Need, Rows, Rows]:
        rows = yield self._need
        return rows


@dataclass(frozen=True, slots=True)
class Environment:
    """What all runs of a batch share."""

    now: datetime
    epoch: int
    hold_until: datetime
    limits: Limits
    random: Callable[[], float]
    eager: Eager
    taker: Taker
    changes: Changes
    undo_orders: UndoOrders
    sticky: Sticky
    active: Mapping[tuple[str, str], Graph]
    """The definitions that runs which continue as new begin with, by namespace and workflow."""
    removed: Mapping[tuple[str, str], frozenset[bytes]]
    """Hashes of definitions that were removed, of the workflows that are looked at."""


class UndoOrders:
    """What comes after what in undo logs that were read, bounded.

    While a run is undone nothing is added to its log, and it is worked off in order: what follows a step stays true,
    whoever works it off. What is forgotten is read again.
    """

    def __init__(self) -> None:
        self._after: OrderedDict[tuple[str, int], tuple[Any, ...]] = OrderedDict()

    def keep(self, rows: Rows) -> None:
        """Rows of the statement next_undo for one run: run_id and of_seq come first, and last their position: large
        ones are left out, and what comes after what is not known there.
        """
        for row, following in pairwise(rows):
            if following[-1] == row[-1] + 1:
                self._after[row[0], row[1]] = following
        while len(self._after) > _UNDO_ORDERS:
            self._after.popitem(last=False)

    def after(self, run_id: str, of_seq: int) -> tuple[Any, ...] | None:
        """The row that follows; None if it is not known."""
        return self._after.pop((run_id, of_seq), None)


class Value:
    """A value on its way from one node to the next: the event that holds it, its size, and itself once it was read."""

    __slots__ = ("payload", "seq", "size")

    def __init__(self, seq: int, size: int, payload: Payload | None = None) -> None:
        self.seq = seq
        self.size = size
        self.payload = payload


Activation = tuple[bool, int, Place, Value]
"""Whether a node is entered (else left), its index, where, and with what value."""


class RunContext:
    """One run of a batch. ``tasks`` has the locked ones by id, ``ended`` how those that are gone ended.

    One is made for each run of each batch, so its rarer parts are made when they are needed.
    """

    __slots__ = (
        "_payloads",
        "_recorded",
        "_scopes",
        "_sources",
        "_todo",
        "changes",
        "ended",
        "env",
        "graph",
        "inputs",
        "leased",
        "next_undo",
        "now",
        "opened",
        "output_size",
        "plain",
        "recent",
        "report",
        "run",
        "tasks",
        "took_slot",
        "written",
    )  # fmt: skip

    def __init__(self, env: Environment, run: RunRow, graph: Graph) -> None:
        self.env = env
        self.now = env.now
        self.changes = env.changes
        self.run = run
        self.graph = graph
        self.tasks: dict[int, TaskRow] = {}
        self.ended: dict[int, Ended] = {}
        self.report: Report | None = None
        """The report under way: its session may take the next step."""
        self.took_slot = False
        """The slot that the report freed is taken."""
        self.leased: dict[int, int] = {}
        """Tasks that this batch has made and leased, each with its token before that: nobody has been told yet."""
        self.next_undo: tuple[Any, ...] | None = None
        """What is undone next, if it is known."""
        self._todo: deque[Activation] | None = None
        self.plain = None if run.control is None else Control.from_json(run.control)
        """The control of the run if it has any: a plain sequence has none."""
        self._scopes: dict[int, ScopeRow] | None = None
        self._payloads: dict[int, Payload] | None = None
        self._sources: dict[int, object] | None = None
        self._recorded: dict[tuple[int, int, int], int] | None = None
        self.inputs = False
        """An event was added that the function of a code run has to see."""
        self.recent: list[HistoryEvent] = []
        """Of a code run: the events that this batch has added."""
        self.output_size = 0
        """About the bytes of the run's output, once it has one."""
        self.opened = 0
        """Items of maps that this batch has opened in the run."""
        self.written = 0
        """About the bytes of payloads that this batch has added to the history of the run."""

    # What is known

    @property
    def state(self) -> RunState:
        """Of the run."""
        return _STATES[self.run.state]

    @property
    def control(self) -> Control:
        """The control of the run; a plain sequence gets one, with the one step that is open."""
        if self.plain is None:
            began = self.run.state != RunState.PENDING
            steps = 0 if self.state.final else 1
            self.plain = Control(open_steps=steps, began=began, blocked=self.run.state == RunState.BLOCKED)
        return self.plain

    def verdict(self, event: RunEvent) -> Verdict:
        """What an event does to the run as it is. To a code run that cleans up, what it waits for still happens."""
        if event in (RunEvent.TIMER, RunEvent.CHILD_ENDED) and self.state is RunState.ENDING and not self.is_ending:
            return Verdict.ACT
        undo_failed = self.plain is not None and self.plain.undo_failed
        return verdict(self.state, event, undo_failed=undo_failed)

    def is_known(self, task_id: int) -> bool:
        """Whether a task was read, or its end."""
        return task_id in self.tasks or task_id in self.ended

    def work(self, task: TaskRow, extra: TaskExtra) -> Work:
        """What a task is made of."""
        node = self.node(task.node_index, extra.plan)
        work = node.undo if extra.kind is TaskKind.UNDO else node.work
        assert work is not None  # tasks are made of nodes that have it
        return work

    def node(self, index: int, plan: Sequence[str] | None) -> GraphNode:
        """A node of the graph; of a code run, the one that stands for an op."""
        return self.graph.nodes[index] if plan is None else op_node(*plan)

    @property
    def is_ending(self) -> bool:
        """Nothing new is begun any more."""
        return self.plain is not None and self.plain.is_ending

    # What has to be read

    async def read(self, statement: str, *key: Any) -> Rows:
        """Rows of a statement of extra.sql."""
        return await _Reading(Need(statement, key))

    async def payload(self, value: Value) -> Payload:
        """The payload of a value."""
        if value.payload is None and self._payloads is not None:
            value.payload = self._payloads.get(value.seq)
        if value.payload is None:
            value.payload = await self.payload_of(self.run.run_id, value.seq)
            self.keep(value.seq, value.payload)
        return value.payload

    async def payload_of(self, run_id: str, seq: int) -> Payload:
        """The payload of an event of any run: events never change."""
        rows = await self.read("payload", run_id, seq)
        return _payload(*rows[0]) if rows else Payload()

    async def json(self, value: Value) -> object:
        """A value as jsontext.parse gives it. Raises NotJson for a binary one."""
        payload = await self.payload(value)
        if payload.binary is not None:
            raise NotJson("the value is binary")
        return parse(payload.json or "null")

    async def source(self, seq: int) -> object:
        """The JSON in an event that several nodes may take from: read and parsed once a batch. As ``json``."""
        if self._sources is None:
            self._sources = {}
        if seq not in self._sources:
            self._sources[seq] = await self.json(Value(seq, 0))
        return self._sources[seq]

    async def recorded(self, scope: int, node: int, item: int) -> int | None:
        """The event that holds the output of an earlier node."""
        if self._recorded is None:
            self._recorded = {}
        key = (scope, node, item)
        if key not in self._recorded:
            rows = await self.read("recorded", self.run.run_id, *key)
            if not rows:
                return None
            self._recorded[key] = rows[0][0]
        return self._recorded[key]

    def keep(self, seq: int, payload: Payload) -> None:
        """Remember a payload for the rest of the batch."""
        if self._payloads is None:
            self._payloads = {}
        self._payloads[seq] = payload

    async def scope(self, scope_id: int) -> ScopeRow:
        """An open scope. It is read once a batch: whoever holds the run is alone with it."""
        scope = self._known_scopes.get(scope_id)
        if scope is None:
            rows = await self.read("scope", self.run.run_id, scope_id)
            scope = self._known_scopes[scope_id] = ScopeRow(*rows[0])
        return scope

    @property
    def _known_scopes(self) -> dict[int, ScopeRow]:
        if self._scopes is None:
            self._scopes = {}
        return self._scopes

    def open_scope(self, scope: ScopeRow) -> None:
        """A new scope."""
        self._known_scopes[scope.scope_id] = scope
        self.control.extras = True
        self.changes.rows.add(
            "insert_scope", scope.run_id, scope.scope_id, scope.node_index, scope.total, scope.done, scope.next_item,
            scope.item_bytes, scope.output_bytes, scope.parent_scope, scope.parent_item,
        )  # fmt: skip

    def change_scope(self, scope: ScopeRow) -> None:
        """Its counters are to be written."""
        self.changes.rows.changed_scopes[scope.run_id, scope.scope_id] = scope

    def close_scope(self, scope: ScopeRow) -> None:
        """Its join is done."""
        self._known_scopes.pop(scope.scope_id, None)
        self.changes.rows.changed_scopes.pop((scope.run_id, scope.scope_id), None)
        self.changes.rows.add("delete_scope", scope.run_id, scope.scope_id)

    # What is decided

    def enter(self, index: int, place: Place, value: Value) -> None:
        """A node is to begin with a value."""
        self._queue((True, index, place, value))

    def leave(self, index: int, place: Place, value: Value) -> None:
        """A node has ended with a value."""
        self._queue((False, index, place, value))

    def _queue(self, activation: Activation) -> None:
        """A queue rather than a recursion, because a map may have thousands of items."""
        if self._todo is None:
            self._todo = deque()
        self._todo.append(activation)

    def next_activation(self) -> Activation | None:
        """What to enter or leave next; None: nothing."""
        return self._todo.popleft() if self._todo else None

    def take_activations(self) -> list[Activation]:
        """All that was to be entered or left: nothing follows any more."""
        taken, self._todo = list(self._todo or ()), None
        return taken

    def start_timer(
        self, seq: int, kind: TimerKind, fire_at: datetime, index: int, place: Place, value: Value, **more: int
    ) -> None:
        """Something is due at a time. ``place`` in its row has all that is needed then, ``more`` is added to it."""
        self.control.extras = True
        where = {"node": index, "scope": place.scope, "item": place.item, "seq": value.seq, "size": value.size, **more}
        row = (self.run.run_id, seq, kind, self.run.namespace, fire_at, json.dumps(where))
        self.changes.rows.add("insert_timer", *row)
        self.changes.timers.append(fire_at)

    def event(
        self,
        kind: EventType,
        *,
        node_index: int | None = None,
        task_id: int | None = None,
        token: int | None = None,
        attempt: int | None = None,
        input_seq: int | None = None,
        digest: bytes | None = None,
        payload: Payload | None = None,
        detail: dict[str, Any] | None = None,
        place: Place = TOP,
    ) -> int:
        """Append to the run's history; returns the event's number. Time never runs backwards in a history."""
        run = self.run
        seq = run.next_seq
        run.next_seq = seq + 1
        run.last_event_at = max(run.last_event_at, self.env.now)
        json_text, binary, metadata = (
            (None, None, None) if payload is None else (payload.json, payload.binary, payload.metadata)
        )
        if payload is not None:
            self.written += payload.size
        if place is not TOP and place != TOP:
            detail = {**(detail or {}), "scope": place.scope, "item": place.item}
        if self.graph.code is not None:
            return self._code_event(seq, kind, task_id, token, attempt, input_seq, digest, payload, detail)
        self.changes.rows.events.append(
            (run.run_id, seq, kind, run.last_event_at, node_index, task_id, token, attempt, input_seq, digest,
             json_text, binary, metadata, None if detail is None else dumps(detail))
        )  # fmt: skip
        self.touch()
        return seq

    def _code_event(
        self,
        seq: int,
        kind: EventType,
        task_id: int | None,
        token: int | None,
        attempt: int | None,
        input_seq: int | None,
        digest: bytes | None,
        payload: Payload | None,
        detail: dict[str, Any] | None,
    ) -> int:
        """As ``event``, of a code run: it has no nodes, and its function is to see what it waits for."""
        at = self.run.last_event_at
        text = None if detail is None else dumps(detail)
        json_text, binary, metadata = (
            (None, None, None) if payload is None else (payload.json, payload.binary, payload.metadata)
        )
        self.changes.rows.events.append(
            (self.run.run_id, seq, kind, at, None, task_id, token, attempt, input_seq, digest, json_text, binary,
             metadata, text)
        )  # fmt: skip
        self.recent.append(HistoryEvent(seq, kind, at, task_id, token, attempt, payload, text))
        if kind in INPUTS:
            self.inputs = True
        self.touch()
        return seq

    def touch(self) -> None:
        """The run's row is to be written."""
        run_id, rows = self.run.run_id, self.changes.rows
        self.changes.changed.add(run_id)
        if run_id not in rows.new_runs:
            rows.changed_runs[run_id] = self.run

    def settle(self) -> None:
        """After an operation: what state the run is in, and its control as it is stored."""
        control = self.plain
        run = self.run
        if control is None or (self.state.final and run.ended_at is None):
            return
        if control.ending is None and not self.state.final:  # how a run that ends fares is decided there
            run.state = _open_state(control)
        kept = control.ending is not None or control.parent is not None or control.decider is not None
        text = None if self.state.final and not kept else control.to_json()
        if text != run.control:
            run.control = text
            self.touch()

    def ready(self, task: TaskRow, delay: float = 0.0) -> None:
        """Somebody may take a task, now or later."""
        self.changes.ready.append(Ready(self.run.namespace, task.queue, task.handler, task.priority, delay))

    def remove_task(self, task: TaskRow, *, keep_checkpoint: bool = False) -> None:
        """A task is over."""
        key = (task.run_id, task.task_id)
        self.tasks.pop(task.task_id, None)
        rows = self.changes.rows
        if rows.changed_tasks:
            rows.changed_tasks.pop(key, None)
        rows.gone_tasks.append(key)
        if task.checkpoint_number and not keep_checkpoint:
            rows.add("delete_checkpoint", *key)

    def send(self, target: str, kind: MessageKind, seq: int, body: dict[str, Any]) -> None:
        """Tell another run something, by the outbox: it is delivered once, after this commit."""
        row = (target, kind, self.run.run_id, seq, self.run.namespace, json.dumps(body))
        self.changes.rows.add("insert_message", *row)
        self.changes.messages = True

    def revoke(self, task: TaskRow, reason: str) -> None:
        """Tell the holder of a lease, if there is one, that it is gone."""
        if task.lease_session is not None:
            self.changes.revoked.append((task.lease_session, task.run_id, task.task_id, task.token, reason))


class NotJson(ValueError):
    """A decision needs to look into a value that is binary."""


def _payload(json_text: str | None, binary: bytes | None, metadata: str | None) -> Payload:
    return Payload(json_text, None if binary is None else bytes(binary), metadata)


def payload_of_row(row: Sequence[Any]) -> Payload:
    """A payload from three columns."""
    return _payload(row[0], row[1], row[2])


def _open_state(control: Control) -> RunState:
    if control.paused:
        return RunState.PAUSED
    if control.blocked:
        return RunState.BLOCKED
    if control.decider is not None:
        waits = control.decider.idle and not control.open_steps
        return RunState.WAITING if waits else RunState.RUNNING if control.began else RunState.PENDING
    if control.open_steps == 0 and (control.open_waits or control.open_children):
        return RunState.WAITING
    return RunState.RUNNING if control.began else RunState.PENDING


def failure_json(failure: Failure) -> Any:
    """A failure as details of events have it."""
    return json.loads(failure.to_json())
