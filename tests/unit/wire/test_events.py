"""Every type of event has its message, with all that its row says."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from fencepost_server.domain.graph import compile_graph
from fencepost_server.domain.manifest import parse_manifest
from fencepost_server.domain.model import EventType, Failure, FailureKind, Payload, RunState, TimerKind
from fencepost_server.domain.ops import HistoryEvent
from fencepost_server.store.runs import EventRecord, RunSummary
from fencepost_server.wire.events import CONTENTS, event, history_event
from tests.fixtures.manifests import manifest

AT = datetime(2026, 11, 29, 12, 0, 0, 250_000, tzinfo=UTC)
LATER = "2026-11-30T12:00:00.000001+00:00"
GRAPH = compile_graph(parse_manifest(manifest(2)).canonical)
RUN = RunSummary(
    run_id="r",
    namespace="default",
    workflow_id="wf",
    definition_hash=b"\1" * 32,
    state=2,
    user_id="",
    request_key="",
    priority=3,
    failure=None,
    created_at=AT,
    ended_at=None,
    last_seq=9,
    dedupe_key="",
    attributes=None,
    parent_run_id=None,
    control=None,
)
FAILURE = Failure(FailureKind.PERMANENT, "CODE", "why\0", Payload(json="1"), "n1", 2)
FAILED = json.loads(FAILURE.to_json())
FAILURE_JSON = {
    "kind": "FAILURE_KIND_PERMANENT",
    "code": "CODE",
    "message": "why\0",
    "feedback": {"json": "1"},
    "node_id": "n1",
    "attempt": 2,
}
PLACED = {"scope": 4, "item": 3}
OUTPUT = Payload(json='{"a": 1.10}', metadata='{"k": "v"}')
OUTPUT_JSON = {"json": '{"a": 1.10}', "metadata": {"k": "v"}}
STAMP = "2026-11-30T12:00:00.000001Z"


def shown(kind: EventType, payload: Payload | None = None, detail: dict[str, Any] | None = None, **columns: Any) -> Any:
    """What an event says, as JSON with the contract's names; numbers of 64 bits are text there."""
    from google.protobuf.json_format import MessageToDict

    fields = {"node_index": None, "task_id": None, "token": None, "attempt": None, "input_seq": None, **columns}
    text = None if detail is None else json.dumps(detail)
    record = EventRecord(7, kind, AT, payload=payload or Payload(), detail=text, **fields)
    message = event(record, GRAPH, RUN)
    assert message.seq == 7
    assert message.event_time.ToDatetime(tzinfo=UTC) == AT
    document = MessageToDict(message, preserving_proto_field_name=True)
    assert message.WhichOneof("kind") == kind.name.lower()
    return document[kind.name.lower()]


def test_every_type_of_event_has_its_field_of_the_contract() -> None:
    fields = {field.name for field in run_pb2.Event.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert {kind.name.lower() for kind in EventType} == fields
    assert CONTENTS.keys() == set(EventType)


STEP = {"node_index": 1, "task_id": 5, "token": 6, "attempt": 2}
STEP_JSON = {"task_id": "5", "node_id": "n2", "fencing_token": "6"}
CASES: dict[EventType, tuple[dict[str, Any], dict[str, Any]]] = {
    EventType.RUN_STARTED: (
        {"payload": OUTPUT},
        {"workflow_id": "wf", "definition_hash": "01" * 32, "input": OUTPUT_JSON},
    ),
    EventType.STEP_SCHEDULED: (
        {"node_index": 1, "input_seq": 3, "detail": PLACED},
        {"node_id": "n2", "handler": "s2", "queue": "default", "input_seq": "3", "scope_id": "4", "item": 3},
    ),
    EventType.STEP_RETRYING: (
        {**STEP, "detail": {"failure": FAILED, "ready_at": LATER}},
        {**STEP_JSON, "failure": FAILURE_JSON, "ready_time": STAMP},
    ),
    EventType.STEP_COMPLETED: ({**STEP, "payload": OUTPUT}, {**STEP_JSON, "output": OUTPUT_JSON, "attempt": 2}),
    EventType.STEP_FAILED: (
        {**STEP, "detail": {"failure": FAILED, "operational_failures": 4, "corrective_failures": 1}},
        {**STEP_JSON, "failure": FAILURE_JSON, "operational_failures": 4, "corrective_failures": 1},
    ),
    EventType.RUN_COMPLETED: ({"input_seq": 6}, {"output_seq": "6"}),
    EventType.RUN_FAILED: ({"detail": {"failure": FAILED}}, {"failure": FAILURE_JSON}),
    EventType.RUN_BLOCKED: ({"detail": {"failure": FAILED}}, {"failure": FAILURE_JSON}),
    EventType.TIMER_STARTED: (
        {"node_index": 0, "detail": {"fire_at": LATER, **PLACED}},
        {"node_id": "n1", "fire_time": STAMP, "scope_id": "4", "item": 3},
    ),
    EventType.TIMER_FIRED: (
        {"node_index": 0, "task_id": 3, "detail": {"kind": int(TimerKind.SIGNAL_TIMEOUT)}},
        {"timer_seq": "3", "node_id": "n1", "kind": "TIMER_KIND_SIGNAL_TIMEOUT"},
    ),
    EventType.SIGNAL_AWAITED: (
        {"node_index": 0, "detail": {"name": "approve", "timeout_at": LATER, **PLACED}},
        {"node_id": "n1", "signal_name": "approve", "timeout_time": STAMP, "scope_id": "4", "item": 3},
    ),
    EventType.SIGNAL_RECEIVED: (
        {"payload": OUTPUT, "detail": {"name": "approve", "request_id": "q"}},
        {"signal_name": "approve", "payload": OUTPUT_JSON, "request_id": "q"},
    ),
    EventType.SIGNAL_TAKEN: (
        {"node_index": 1, "task_id": 3, "input_seq": 5},
        {"node_id": "n2", "wait_seq": "3", "signal_seq": "5"},
    ),
    EventType.SCOPE_OPENED: (
        {"node_index": 0, "input_seq": 1, "detail": {"items": 12, **PLACED}},
        {"node_id": "n1", "items": 12, "input_seq": "1", "scope_id": "4", "item": 3},
    ),
    EventType.ITEM_OPENED: (
        {"node_index": 0, "task_id": 4, "payload": OUTPUT, "detail": {"item": 3}},
        {"node_id": "n1", "scope_id": "4", "item": 3, "input": OUTPUT_JSON},
    ),
    EventType.SCOPE_CLOSED: (
        {"node_index": 0, "task_id": 4, "payload": OUTPUT},
        {"node_id": "n1", "scope_id": "4", "output": OUTPUT_JSON},
    ),
    EventType.CHOICE_MADE: ({"node_index": 0, "detail": {"case": -1}}, {"node_id": "n1", "case_index": -1}),
    EventType.INPUT_BUILT: ({"node_index": 1, "payload": OUTPUT}, {"node_id": "n2", "input": OUTPUT_JSON}),
    EventType.CHILD_SCHEDULED: (
        {"node_index": 1, "input_seq": 3, "detail": {"child": "c", "workflow": "w2", **PLACED}},
        {
            "node_id": "n2",
            "child_run_id": "c",
            "workflow_id": "w2",
            "input_seq": "3",
            "scope_id": "4",
            "item": 3,
        },
    ),
    EventType.CHILD_ENDED: (
        {"node_index": 1, "task_id": 4, "payload": OUTPUT, "detail": {"child": "c", "state": RunState.COMPLETED}},
        {
            "node_id": "n2",
            "child_seq": "4",
            "child_run_id": "c",
            "state": "RUN_STATE_COMPLETED",
            "output": OUTPUT_JSON,
        },
    ),
    EventType.NODE_FAILED: (
        {"node_index": 1, "detail": {"failure": FAILED}},
        {"node_id": "n2", "failure": FAILURE_JSON},
    ),
    EventType.RUN_ENDING: (
        {"detail": {"state": RunState.CANCELLED, "failure": FAILED, "grace": 2.5}},
        {"state": "RUN_STATE_CANCELLED", "failure": FAILURE_JSON, "grace": "2.500s"},
    ),
    EventType.STEP_CANCELLED: ({"node_index": 1, "task_id": 5, "token": 6}, STEP_JSON),
    EventType.UNDO_SCHEDULED: (
        {"node_index": 1, "input_seq": 3, "detail": {"of": 6, "handler": "s2.undo", "queue": "q"}},
        {"node_id": "n2", "of_seq": "6", "handler": "s2.undo", "queue": "q"},
    ),
    EventType.UNDO_RETRYING: (
        {**STEP, "detail": {"failure": FAILED, "ready_at": LATER}},
        {**STEP_JSON, "failure": FAILURE_JSON, "ready_time": STAMP},
    ),
    EventType.UNDO_COMPLETED: ({**STEP, "payload": OUTPUT}, {**STEP_JSON, "output": OUTPUT_JSON, "attempt": 2}),
    EventType.UNDO_FAILED: ({**STEP, "detail": {"failure": FAILED}}, {**STEP_JSON, "failure": FAILURE_JSON}),
    EventType.UNDO_SKIPPED: (
        {"node_index": 1, "input_seq": 6, "detail": {"reason": "by hand"}},
        {"node_id": "n2", "of_seq": "6", "reason": "by hand"},
    ),
    EventType.RUN_CANCELLED: ({"detail": {"failure": FAILED}}, {"failure": FAILURE_JSON}),
    EventType.RUN_TERMINATED: ({"detail": {"reason": "stop"}}, {"reason": "stop"}),
    EventType.RUN_PAUSED: ({"detail": {"reason": "wait"}}, {"reason": "wait"}),
    EventType.RUN_RESUMED: ({"detail": {"reason": "go"}}, {"reason": "go"}),
    EventType.RUN_RETRIED: ({"detail": {"reason": "mended"}}, {"reason": "mended"}),
    EventType.LOCAL_STEP_ENDED: (
        {"token": 6, "payload": OUTPUT, "detail": {"op": 3, "node": "charge", "input_hash": "0aff", "attempts": 2}},
        {
            "op": "3",
            "name": "charge",
            "input_hash": "Cv8=",
            "output": OUTPUT_JSON,
            "attempts": 2,
            "fencing_token": "6",
        },
    ),
    EventType.PATCH_MARKED: ({"detail": {"patch": "p"}}, {"patch_id": "p"}),
    EventType.ATTRIBUTES_SET: (
        {"detail": {"op": 3, "attributes": {"a": "b"}}},
        {"attributes": {"a": "b"}, "op": "3"},
    ),
    EventType.OP_CANCELLED: ({"task_id": 4, "detail": {"op": 3}}, {"op": "3", "of_seq": "4"}),
    EventType.RUN_CONTINUED: ({"detail": {"next": "r2"}}, {"next_run_id": "r2"}),
}
# Of code runs, which have no nodes: a name for people, and what their ops are matched by.
CODE: list[tuple[EventType, dict[str, Any], dict[str, Any]]] = [
    (
        EventType.RUN_STARTED,
        {"payload": OUTPUT, "detail": {"continued_from": "r0", "deadline_at": LATER}},
        {
            "workflow_id": "wf",
            "definition_hash": "01" * 32,
            "input": OUTPUT_JSON,
            "continued_from_run_id": "r0",
            "deadline_time": STAMP,
        },
    ),
    (
        EventType.STEP_SCHEDULED,
        {"payload": OUTPUT, "detail": {"op": 2, "node": "s9", "handler": "s9", "queue": "q", "input_hash": "0aff"}},
        {
            "node_id": "s9",
            "handler": "s9",
            "queue": "q",
            "input_seq": "7",
            "op": "2",
            "input": OUTPUT_JSON,
            "input_hash": "Cv8=",
        },
    ),
    (
        EventType.STEP_COMPLETED,
        {"task_id": 5, "token": 6, "attempt": 2, "payload": OUTPUT, "detail": {"node": "s9"}},
        {"task_id": "5", "node_id": "s9", "fencing_token": "6", "attempt": 2, "output": OUTPUT_JSON},
    ),
    (
        EventType.TIMER_STARTED,
        {"detail": {"op": 4, "node": "sleep", "delay": 86400.25, "fire_at": LATER}},
        {"node_id": "sleep", "fire_time": STAMP, "op": "4", "delay": "86400.250s"},
    ),
    (
        EventType.TIMER_FIRED,
        {"task_id": 3, "detail": {"kind": int(TimerKind.SLEEP), "node": "sleep"}},
        {"timer_seq": "3", "node_id": "sleep", "kind": "TIMER_KIND_SLEEP"},
    ),
    (
        EventType.SIGNAL_AWAITED,
        {"detail": {"op": 5, "node": "approve", "name": "approve", "timeout_at": LATER}},
        {"node_id": "approve", "signal_name": "approve", "timeout_time": STAMP, "op": "5"},
    ),
    (
        EventType.SIGNAL_RECEIVED,
        {"payload": OUTPUT, "detail": {"name": "approve"}},
        {"signal_name": "approve", "payload": OUTPUT_JSON},
    ),
    (
        EventType.CHILD_SCHEDULED,
        {
            "payload": OUTPUT,
            "detail": {"op": 6, "node": "w2", "child": "c", "workflow": "w2", "input_hash": "0aff"},
        },
        {
            "node_id": "w2",
            "child_run_id": "c",
            "workflow_id": "w2",
            "input_seq": "7",
            "op": "6",
            "input": OUTPUT_JSON,
            "input_hash": "Cv8=",
        },
    ),
    (
        EventType.LOCAL_STEP_ENDED,
        {"token": 6, "detail": {"op": 3, "node": "charge", "attempts": 2, "failure": FAILED}},
        {"op": "3", "name": "charge", "failure": FAILURE_JSON, "attempts": 2, "fencing_token": "6"},
    ),
    (EventType.RUN_RESUMED, {}, {}),
]


@pytest.mark.parametrize("kind", EventType)
def test_an_event_says_all_that_its_row_has(kind: EventType) -> None:
    row, expected = CASES[kind]
    assert shown(kind, **row) == expected


@pytest.mark.parametrize(("kind", "row", "expected"), CODE)
def test_an_event_of_a_code_run_says_all_that_its_op_is_matched_by(
    kind: EventType, row: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert shown(kind, **row) == expected


@pytest.mark.parametrize("kind", EventType)
def test_an_event_on_its_way_to_a_worker_says_what_its_history_says(kind: EventType) -> None:
    """Those that are made at once as those that are not; but for what only graphs have."""
    rows = [row for of, row, _ in CODE if of is kind] or [{**CASES[kind][0], "node_index": None, "input_seq": None}]
    for row in rows:
        fields = {"node_index": None, "task_id": None, "token": None, "attempt": None, "input_seq": None, **row}
        detail, payload = fields.pop("detail", None), fields.pop("payload", None)
        text = None if detail is None else json.dumps(detail)
        record = EventRecord(7, kind, AT, payload=payload or Payload(), detail=text, **fields)
        told = HistoryEvent(7, kind, AT, fields["task_id"], fields["token"], fields["attempt"], payload, text)
        assert history_event(told, RUN.workflow_id, RUN.definition_hash) == event(record, GRAPH, RUN)


def test_what_a_row_leaves_out_is_unset() -> None:
    """A node of the top sequence, a wait for ever, no request id, no lease, no reason."""
    assert shown(EventType.STEP_SCHEDULED, node_index=0, input_seq=1) == {
        "node_id": "n1",
        "handler": "s1",
        "queue": "default",
        "input_seq": "1",
    }
    assert shown(EventType.TIMER_STARTED, detail={"fire_at": LATER}) == {"fire_time": STAMP}
    assert shown(EventType.SIGNAL_AWAITED, node_index=0, detail={"name": "n"}) == {"node_id": "n1", "signal_name": "n"}
    assert shown(EventType.STEP_CANCELLED, node_index=0, task_id=2) == {"task_id": "2", "node_id": "n1"}
    assert shown(EventType.RUN_PAUSED) == {}
    failed = {"child": "c", "state": RunState.FAILED, "failure": FAILED}
    ended = shown(EventType.CHILD_ENDED, node_index=0, task_id=4, detail=failed)
    assert "output" not in ended
    assert ended["failure"] == FAILURE_JSON
