"""Entries of a history as messages of the contract: one function for each type of event.

What is stored where is engine.fold's choice: columns for what is looked up by, ``detail`` (JSON) for the rest. A place
in a parallel or map node is in ``detail`` only where there is one.
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
from fencepost_server.domain.model import EventType, Failure, RunState
from fencepost_server.store.runs import EventRecord, RunSummary
from fencepost_server.wire.payloads import duration, failure_out, payload_out, timestamp


def event(record: EventRecord, graph: Graph, run: RunSummary) -> run_pb2.Event:
    """An entry of a history of a run that is pinned to ``graph``."""
    kind = EventType(record.type)
    detail = json.loads(record.detail) if record.detail else {}
    content = CONTENTS[kind](_Entry(record, detail, graph, run))
    message = run_pb2.Event(seq=record.seq, event_time=timestamp(record.at))
    field = getattr(message, kind.name.lower())
    field.CopyFrom(content)
    field.SetInParent()  # one that has nothing to say is an event all the same
    return message


def node_id(graph: Graph, index: int | None) -> str:
    """The id of a node, by its index; empty for what is of the run as a whole."""
    return "" if index is None else graph.node_id(index)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row, in the words of the contract."""

    record: EventRecord
    detail: dict[str, Any]
    graph: Graph
    run: RunSummary

    @property
    def node(self) -> str:
        return node_id(self.graph, self.record.node_index)

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
    def input_seq(self) -> int:
        return self.record.input_seq or 0

    @property
    def scope(self) -> int:
        return int(self.detail.get("scope", 0))

    @property
    def item(self) -> int:
        return int(self.detail.get("item", 0))

    @property
    def payload(self) -> payload_pb2.Payload:
        return payload_out(self.record.payload)

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

    @property
    def grace(self) -> Duration | None:
        seconds = self.detail.get("grace")
        return None if seconds is None else duration(seconds)

    def time(self, key: str) -> Timestamp | None:
        text = self.detail.get(key)
        return None if text is None else timestamp(datetime.fromisoformat(text))


# Runs


def _run_started(e: _Entry) -> Message:
    return run_pb2.RunStarted(
        workflow_id=e.run.workflow_id, definition_hash=e.run.definition_hash.hex(), input=e.payload
    )


def _run_ending(e: _Entry) -> Message:
    return run_pb2.RunEnding(state=e.state, failure=e.failure, grace=e.grace)


# Steps, and their undoing


def _step_scheduled(e: _Entry) -> Message:
    assert e.record.node_index is not None  # written with its node
    work = None if e.graph.broken else e.graph.work(e.record.node_index, undo=False)
    return run_pb2.StepScheduled(
        node_id=e.node,
        handler="" if work is None else work.handler,
        queue="" if work is None else work.queue,
        input_seq=e.input_seq,
        scope_id=e.scope,
        item=e.item,
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
        node_id=e.node, of_seq=e.detail["of"], handler=e.detail["handler"], queue=e.detail["queue"]
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
    return run_pb2.UndoSkipped(node_id=e.node, of_seq=e.input_seq, reason=e.reason)


# Timers and signals


def _timer_started(e: _Entry) -> Message:
    return run_pb2.TimerStarted(node_id=e.node, fire_time=e.time("fire_at"), scope_id=e.scope, item=e.item)


def _timer_fired(e: _Entry) -> Message:
    return run_pb2.TimerFired(timer_seq=e.task_id, node_id=e.node, kind=run_pb2.TimerKind.ValueType(e.detail["kind"]))


def _signal_awaited(e: _Entry) -> Message:
    return run_pb2.SignalAwaited(
        node_id=e.node, signal_name=e.detail["name"], timeout_time=e.time("timeout_at"), scope_id=e.scope, item=e.item
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
        input_seq=e.input_seq,
        scope_id=e.scope,
        item=e.item,
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
    EventType.RUN_RETRIED: lambda e: run_pb2.RunRetried(reason=e.reason),
}
"""What each type of event says. Its field of the contract has the type's name in lower case."""
