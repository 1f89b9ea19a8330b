"""What `--json` prints: the SDK's values as plain documents with stable keys.

Keys are those of the contract. Times are RFC 3339 in UTC. A JSON payload stands there to the letter, so that no number
is changed on the way; a binary one has a key of its own with the suffix ``_base64``.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
from typing import Any

import msgspec

from fencepost import Definition, Event, Failure, FencepostError, OpenStep, OpenWait, Run, Value, Violation

_ZEROS = frozenset(
    {("case_index", "choice_made"), ("items", "scope_opened"), ("grace", "run_ending"), ("delay", "timer_started")}
)
"""Where 0 is something to tell."""


def run_document(run: Run, *, listed: bool = False) -> dict[str, Any]:
    """A run; one of a list has neither input nor output nor steps."""
    document: dict[str, Any] = {
        "run_id": run.run_id,
        "namespace": run.namespace,
        "workflow_id": run.workflow_id,
        "definition_hash": run.definition_hash,
        "state": run.state.value,
        "user_id": run.user_id,
        "request_key": run.request_key,
        "dedupe_key": run.dedupe_key,
        "priority": run.priority,
        "create_time": stamp(run.create_time),
        "end_time": stamp(run.end_time),
        "last_seq": run.last_seq,
        "attributes": dict(run.attributes),
        "parent_run_id": run.parent_run_id,
        "failure": failure_document(run.failure),
    }
    if run.ending is not None:
        document["ending"] = run.ending.value
    for key in ("next_run_id", "previous_run_id"):
        if getattr(run, key):
            document[key] = getattr(run, key)
    if not listed:
        document |= value_document("input", run.input) | value_document("output", run.output)
        document["open_steps"] = [_open_step(step) for step in run.open_steps]
        document["open_waits"] = [_open_wait(wait) for wait in run.open_waits]
        document["pending_signals"] = [
            {"signal_name": name, "count": count} for name, count in run.pending_signals.items()
        ]
        if run.waiting_reason:
            document["waiting_reason"] = run.waiting_reason
    return document


def _open_step(step: OpenStep) -> dict[str, Any]:
    document: dict[str, Any] = {
        "task_id": step.task_id,
        "node_id": step.node_id,
        "handler": step.handler,
        "queue": step.queue,
        "state": step.state.value,
        "attempt": step.attempt,
        "operational_failures": step.operational_failures,
        "corrective_failures": step.corrective_failures,
        "ready_time": stamp(step.ready_time),
        "lease_expire_time": stamp(step.lease_expire_time),
        "worker_name": step.worker_name,
        "last_failure": failure_document(step.last_failure),
        "undo": step.undo,
        "checkpoint_number": step.checkpoint_number,
    }
    if step.decide:
        document["decide"] = True
    if step.waiting_reason:
        document["waiting_reason"] = step.waiting_reason
    if step.scope_id:
        document |= {"scope_id": step.scope_id, "item": step.item}
    if step.progress is not None:
        document |= value_document("progress", step.progress)
    return document


def _open_wait(wait: OpenWait) -> dict[str, Any]:
    document: dict[str, Any] = {"seq": wait.seq, "node_id": wait.node_id}
    if wait.fire_time is not None:
        document["fire_time"] = stamp(wait.fire_time)
    if wait.signal_name:
        document["signal_name"] = wait.signal_name
    if wait.child_run_id:
        document["child_run_id"] = wait.child_run_id
    return document


def failure_document(failure: Failure | None) -> dict[str, Any] | None:
    """A failure, or null."""
    if failure is None:
        return None
    return {
        "kind": failure.kind.value,
        "code": failure.code,
        "message": failure.message,
        "node_id": failure.node_id,
        "attempt": failure.attempt,
        **value_document("feedback", failure.feedback),
    }


def event_document(event: Event) -> dict[str, Any]:
    """An event; keys that its kind does not have are left out."""
    document: dict[str, Any] = {"seq": event.seq, "event_time": stamp(event.time), "kind": event.kind.value}
    for key in (field.name for field in dataclasses.fields(event)):
        value = getattr(event, key)
        if key in {"seq", "time", "kind", "payload"} or value is None:
            continue
        if not value and (key, event.kind.value) not in _ZEROS:
            continue
        if isinstance(value, dt.datetime):
            document[key] = stamp(value)
        elif isinstance(value, Failure):
            document[key] = failure_document(value)
        else:
            document[key] = value.value if isinstance(value, enum.Enum) else value
    if event.scope_id:
        document["item"] = event.item
    if event.payload is not None:
        document |= value_document("payload", event.payload)
    return document


def definition_document(definition: Definition, *, listed: bool = False) -> dict[str, Any]:
    """A definition; one of a list has no manifest."""
    document: dict[str, Any] = {
        "workflow_id": definition.workflow_id,
        "definition_hash": definition.definition_hash,
        "compatibility_id": definition.compatibility_id,
        "state": definition.state.value,
        "create_time": stamp(definition.create_time),
    }
    if not listed:
        document["manifest"] = raw(definition.manifest_json)
    return document


def error_document(error: FencepostError) -> dict[str, Any]:
    """Why something was refused."""
    return {
        "reason": error.reason,
        "message": error.message,
        "violations": [violation_document(violation) for violation in error.violations],
        "metadata": error.metadata,
    }


def violation_document(violation: Violation) -> dict[str, str]:
    """One fault."""
    return {"path": violation.path, "message": violation.message}


def stamp(time: dt.datetime | None) -> str | None:
    """A time in UTC, or null."""
    return None if time is None else time.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")


def raw(text: str | None) -> msgspec.Raw:
    """JSON text to be printed to the letter, in one line: between tokens a line break may be any other space, and
    inside of a string there is none."""
    return msgspec.Raw((text or "null").replace("\r", " ").replace("\n", " ").encode())


def value_document(key: str, value: Value | None) -> dict[str, Any]:
    """A payload under a key that says whether it is JSON; null for none."""
    if value is not None and value.binary is not None:
        return {f"{key}_base64": base64.b64encode(value.binary).decode()}
    return {key: None if value is None else raw(value.json)}
