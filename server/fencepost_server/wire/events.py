"""Entries of a history as messages of the contract: one function for each type of event.

What is stored where is engine.fold's choice: columns for what is looked up by, ``detail`` (JSON) for the rest. A place
in a parallel or map node is in ``detail`` only where there is one. An event of a code run has no node: ``detail`` has a
name for people, and what its op is matched by at a replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost.v1 import payload_pb2, run_pb2
from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import EventType, Failure, Payload, RunState
from fencepost_server.domain.ops import HistoryEvent
from fencepost_server.store.runs import EventRecord, RunSummary
from fencepost_server.wire.payloads import duration, failure_out, payload_out, timestamp


def event(record: EventRecord, graph: Graph, run: RunSummary) -> run_pb2.Event:
    """An entry of a history of a run that is pinned to ``graph``."""
    detail = json.loads(record.detail) if record.detail else {}
    return _message(
        record,
        _Entry(
            record, detail, node_id(graph, record.node_index) or detail.get("node", ""), record.payload,
            record.input_seq or 0, run.workflow_id, run.definition_hash, graph, record.node_index,
        ),
    )  # fmt: skip


def history_event(event: HistoryEvent, workflow_id: str = "", definition_hash: bytes = b"") -> run_pb2.Event:
    """An event of a code run on its way to a worker. Workflow and hash are the run's: its first event tells them."""
    quick = _QUICK.get(event.type)
    if quick is not None:
        return quick(event)
    detail = json.loads(event.detail) if event.detail else {}
    payload = Payload() if event.payload is None else event.payload
    return _message(event, _Entry(event, detail, detail.get("node", ""), payload, 0, workflow_id, definition_hash))


def _message(record: EventRecord | HistoryEvent, entry: _Entry) -> run_pb2.Event:
    kind = EventType(record.type)
    # One that has nothing to say is an event all the same: given by name, its field is set.
    content: dict[str, Any] = {kind.name.lower(): CONTENTS[kind](entry)}
    return run_pb2.Event(seq=record.seq, event_time=timestamp(record.at), **content)


def node_id(graph: Graph, index: int | None) -> str:
    """The id of a node, by its index; empty for what is of the run as a whole."""
    return "" if index is None else graph.node_id(index)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row, in the words of the contract."""

    record: EventRecord | HistoryEvent
    detail: dict[str, Any]
    node: str
    content: Payload
    input_seq: int
    workflow_id: str
    definition_hash: bytes
    graph: Graph | None = None
    node_index: int | None = None

    @property
    def task_id(self) -> int:
        """Of a step; of others the event that they refer to."""
        return self.record.task_id or 0

    @property
    def token(self) -> int:
        return self.record.token or 0

    @property
    def attempt(self) -> int:
        return self.record.attempt or 0

    @property
    def scope(self) -> int:
        return int(self.detail.get("scope", 0))

    @property
    def item(self) -> int:
        return int(self.detail.get("item", 0))

    @property
    def op(self) -> int:
        """Of a code run: the number of the op; 0 for all others."""
        return int(self.detail.get("op", 0))

    @property
    def input_hash(self) -> bytes:
        return bytes.fromhex(self.detail.get("input_hash", ""))

    @property
    def payload(self) -> payload_pb2.Payload:
        return payload_out(self.content)

    @property
    def own_input(self) -> payload_pb2.Payload | None:
        """Of a code run: what its op was given, which is kept with it."""
        return self.payload if self.op else None

    @property
    def own_input_seq(self) -> int:
        """The event that holds the input of an op or of a node."""
        return self.record.seq if self.op else self.input_seq

    @property
    def failure(self) -> run_pb2.Failure | None:
        if self.detail.get("failure") is None:
            return None
        return failure_out(Failure.from_json(json.dumps(self.detail["failure"])))

    @property
    def reason(self) -> str:
        return str(self.detail.get("reason", ""))

    @property
    def state(self) -> run_pb2.RunState.ValueType:
        return run_pb2.RunState.ValueType(self.detail["state"])

    def seconds(self, key: str) -> Duration | None:
        seconds = self.detail.get(key)
        return None if seconds is None else duration(seconds)

    def time(self, key: str) -> Timestamp | None:
        text = self.detail.get(key)
        return None if text is None else timestamp(datetime.fromisoformat(text))


# Runs


def _run_started(e: _Entry) -> Message:
    return run_pb2.RunStarted(
        workflow_id=e.workflow_id,
        definition_hash=e.definition_hash.hex(),
        input=e.payload,
        continued_from_run_id=e.detail.get("continued_from", ""),
        deadline_time=e.time("deadline_at"),
    )


def _run_ending(e: _Entry) -> Message:
    return run_pb2.RunEnding(state=e.state, failure=e.failure, grace=e.seconds("grace"))


# Steps, and their undoing


def _step_scheduled(e: _Entry) -> Message:
    work = None
    if e.node_index is not None and e.graph is not None and not e.graph.broken:
        work = e.graph.work(e.node_index, undo=False)
    return run_pb2.StepScheduled(
        node_id=e.node,
        handler=e.detail.get("handler", "") if work is None else work.handler,
        queue=e.detail.get("queue", "") if work is None else work.queue,
        input_seq=e.own_input_seq,
        scope_id=e.scope,
        item=e.item,
        op=e.op,
        input=e.own_input,
        input_hash=e.input_hash,
    )


def _step_retrying(e: _Entry) -> Message:
    return run_pb2.StepRetrying(
        task_id=e.task_id, node_id=e.node, failure=e.failure, fencing_token=e.token, ready_time=e.time("ready_at")
    )


def _step_completed(e: _Entry) -> Message:
    return run_pb2.StepCompleted(
        task_id=e.task_id, node_id=e.node, output=e.payload, fencing_token=e.token, attempt=e.attempt
    )


def _step_failed(e: _Entry) -> Message:
    return run_pb2.StepFailed(
        task_id=e.task_id,
        node_id=e.node,
        failure=e.failure,
        fencing_token=e.token,
        operational_failures=e.detail.get("operational_failures", 0),
        corrective_failures=e.detail.get("corrective_failures", 0),
    )


def _step_cancelled(e: _Entry) -> Message:
    return run_pb2.StepCancelled(task_id=e.task_id, node_id=e.node, fencing_token=e.token)


def _undo_scheduled(e: _Entry) -> Message:
    return run_pb2.UndoScheduled(
        node_id=e.node,
        of_seq=e.detail["of"],
        handler=e.detail["handler"],
        queue=e.detail["queue"],
        of_run_id=e.detail.get("of_run", ""),
    )


def _undo_retrying(e: _Entry) -> Message:
    return run_pb2.UndoRetrying(
        task_id=e.task_id, node_id=e.node, failure=e.failure, fencing_token=e.token, ready_time=e.time("ready_at")
    )


def _undo_completed(e: _Entry) -> Message:
    return run_pb2.UndoCompleted(
        task_id=e.task_id, node_id=e.node, output=e.payload, fencing_token=e.token, attempt=e.attempt
    )


def _undo_failed(e: _Entry) -> Message:
    return run_pb2.UndoFailed(task_id=e.task_id, node_id=e.node, failure=e.failure, fencing_token=e.token)


def _undo_skipped(e: _Entry) -> Message:
    of_run = e.detail.get("of_run", "")
    of_seq = e.detail["of"] if of_run else e.input_seq
    return run_pb2.UndoSkipped(node_id=e.node, of_seq=of_seq, reason=e.reason, of_run_id=of_run)


# Timers and signals


def _timer_started(e: _Entry) -> Message:
    return run_pb2.TimerStarted(
        node_id=e.node,
        fire_time=e.time("fire_at"),
        scope_id=e.scope,
        item=e.item,
        op=e.op,
        delay=e.seconds("delay"),
    )


def _timer_fired(e: _Entry) -> Message:
    return run_pb2.TimerFired(timer_seq=e.task_id, node_id=e.node, kind=run_pb2.TimerKind.ValueType(e.detail["kind"]))


def _signal_awaited(e: _Entry) -> Message:
    return run_pb2.SignalAwaited(
        node_id=e.node,
        signal_name=e.detail["name"],
        timeout_time=e.time("timeout_at"),
        scope_id=e.scope,
        item=e.item,
        op=e.op,
    )


def _signal_received(e: _Entry) -> Message:
    return run_pb2.SignalReceived(
        signal_name=e.detail["name"], payload=e.payload, request_id=e.detail.get("request_id", "")
    )


def _signal_taken(e: _Entry) -> Message:
    return run_pb2.SignalTaken(node_id=e.node, wait_seq=e.task_id, signal_seq=e.input_seq)


# Control flow


def _scope_opened(e: _Entry) -> Message:
    return run_pb2.ScopeOpened(
        node_id=e.node, items=e.detail["items"], input_seq=e.input_seq, scope_id=e.scope, item=e.item
    )


def _item_opened(e: _Entry) -> Message:
    return run_pb2.ItemOpened(node_id=e.node, scope_id=e.task_id, item=e.item, input=e.payload)


def _scope_closed(e: _Entry) -> Message:
    return run_pb2.ScopeClosed(node_id=e.node, scope_id=e.task_id, output=e.payload)


def _child_scheduled(e: _Entry) -> Message:
    return run_pb2.ChildScheduled(
        node_id=e.node,
        child_run_id=e.detail["child"],
        workflow_id=e.detail["workflow"],
        input_seq=e.own_input_seq,
        scope_id=e.scope,
        item=e.item,
        op=e.op,
        input=e.own_input,
        input_hash=e.input_hash,
    )


def _child_ended(e: _Entry) -> Message:
    return run_pb2.ChildEnded(
        node_id=e.node,
        child_seq=e.task_id,
        child_run_id=e.detail["child"],
        state=e.state,
        output=e.payload if e.detail["state"] == RunState.COMPLETED else None,
        failure=e.failure,
    )


# What only code runs have


def _local_step_ended(e: _Entry) -> Message:
    return run_pb2.LocalStepEnded(
        op=e.op,
        name=e.node,
        input_hash=e.input_hash,
        output=e.payload if e.failure is None else None,
        failure=e.failure,
        attempts=e.detail.get("attempts", 1),
        fencing_token=e.token,
    )


def _attributes_set(e: _Entry) -> Message:
    return run_pb2.AttributesSet(attributes=e.detail["attributes"], op=e.op)


CONTENTS: Mapping[EventType, Callable[[_Entry], Message]] = {
    EventType.RUN_STARTED: _run_started,
    EventType.STEP_SCHEDULED: _step_scheduled,
    EventType.STEP_RETRYING: _step_retrying,
    EventType.STEP_COMPLETED: _step_completed,
    EventType.STEP_FAILED: _step_failed,
    EventType.RUN_COMPLETED: lambda e: run_pb2.RunCompleted(output_seq=e.input_seq),
    EventType.RUN_FAILED: lambda e: run_pb2.RunFailed(failure=e.failure),
    EventType.RUN_BLOCKED: lambda e: run_pb2.RunBlocked(failure=e.failure),
    EventType.TIMER_STARTED: _timer_started,
    EventType.TIMER_FIRED: _timer_fired,
    EventType.SIGNAL_AWAITED: _signal_awaited,
    EventType.SIGNAL_RECEIVED: _signal_received,
    EventType.SIGNAL_TAKEN: _signal_taken,
    EventType.SCOPE_OPENED: _scope_opened,
    EventType.ITEM_OPENED: _item_opened,
    EventType.SCOPE_CLOSED: _scope_closed,
    EventType.CHOICE_MADE: lambda e: run_pb2.ChoiceMade(node_id=e.node, case_index=e.detail["case"]),
    EventType.INPUT_BUILT: lambda e: run_pb2.InputBuilt(node_id=e.node, input=e.payload),
    EventType.CHILD_SCHEDULED: _child_scheduled,
    EventType.CHILD_ENDED: _child_ended,
    EventType.NODE_FAILED: lambda e: run_pb2.NodeFailed(node_id=e.node, failure=e.failure),
    EventType.RUN_ENDING: _run_ending,
    EventType.STEP_CANCELLED: _step_cancelled,
    EventType.UNDO_SCHEDULED: _undo_scheduled,
    EventType.UNDO_RETRYING: _undo_retrying,
    EventType.UNDO_COMPLETED: _undo_completed,
    EventType.UNDO_FAILED: _undo_failed,
    EventType.UNDO_SKIPPED: _undo_skipped,
    EventType.RUN_CANCELLED: lambda e: run_pb2.RunCancelled(failure=e.failure),
    EventType.RUN_TERMINATED: lambda e: run_pb2.RunTerminated(reason=e.reason),
    EventType.RUN_PAUSED: lambda e: run_pb2.RunPaused(reason=e.reason),
    EventType.RUN_RESUMED: lambda e: run_pb2.RunResumed(reason=e.reason),
    EventType.RUN_RETRIED: lambda e: run_pb2.RunRetried(reason=e.reason, ignored_seq=int(e.detail.get("ignored", 0))),
    EventType.LOCAL_STEP_ENDED: _local_step_ended,
    EventType.PATCH_MARKED: lambda e: run_pb2.PatchMarked(patch_id=e.detail["patch"]),
    EventType.ATTRIBUTES_SET: _attributes_set,
    EventType.OP_CANCELLED: lambda e: run_pb2.OpCancelled(op=e.op, of_seq=e.task_id),
    EventType.RUN_CONTINUED: lambda e: run_pb2.RunContinued(next_run_id=e.detail["next"]),
}
"""What each type of event says. Its field of the contract has the type's name in lower case."""

# A code run is fed these by the thousand; so they are made at once, without an entry between.


def _quick_local_step_ended(e: HistoryEvent) -> run_pb2.Event:
    detail = json.loads(e.detail or "{}")
    failure = detail.get("failure")
    return run_pb2.Event(
        seq=e.seq,
        event_time=timestamp(e.at),
        local_step_ended=run_pb2.LocalStepEnded(
            op=detail.get("op", 0),
            name=detail.get("node", ""),
            input_hash=bytes.fromhex(detail.get("input_hash", "")),
            output=payload_out(e.payload) if failure is None and e.payload is not None else None,
            failure=None if failure is None else failure_out(Failure.from_json(json.dumps(failure))),
            attempts=detail.get("attempts", 1),
            fencing_token=e.token or 0,
        ),
    )


def _quick_step_completed(e: HistoryEvent) -> run_pb2.Event:
    return run_pb2.Event(
        seq=e.seq,
        event_time=timestamp(e.at),
        step_completed=run_pb2.StepCompleted(
            task_id=e.task_id or 0,
            node_id=json.loads(e.detail).get("node", "") if e.detail else "",
            output=None if e.payload is None else payload_out(e.payload),
            fencing_token=e.token or 0,
            attempt=e.attempt or 0,
        ),
    )


def _quick_timer_fired(e: HistoryEvent) -> run_pb2.Event:
    detail = json.loads(e.detail or "{}")
    return run_pb2.Event(
        seq=e.seq,
        event_time=timestamp(e.at),
        timer_fired=run_pb2.TimerFired(
            timer_seq=e.task_id or 0,
            node_id=detail.get("node", ""),
            kind=run_pb2.TimerKind.ValueType(detail["kind"]),
        ),
    )


def _quick_signal_received(e: HistoryEvent) -> run_pb2.Event:
    detail = json.loads(e.detail or "{}")
    return run_pb2.Event(
        seq=e.seq,
        event_time=timestamp(e.at),
        signal_received=run_pb2.SignalReceived(
            signal_name=detail["name"],
            payload=None if e.payload is None else payload_out(e.payload),
            request_id=detail.get("request_id", ""),
        ),
    )


_QUICK: Mapping[int, Callable[[HistoryEvent], run_pb2.Event]] = {
    EventType.LOCAL_STEP_ENDED: _quick_local_step_ended,
    EventType.STEP_COMPLETED: _quick_step_completed,
    EventType.TIMER_FIRED: _quick_timer_fired,
    EventType.SIGNAL_RECEIVED: _quick_signal_received,
}
