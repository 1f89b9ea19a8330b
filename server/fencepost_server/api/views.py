"""Rows as messages of the contract."""

from __future__ import annotations

import json
from datetime import datetime

from fencepost.v1 import definition_service_pb2, run_pb2
from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import PARKED_UNTIL, EventType, Failure
from fencepost_server.store.definitions import DefinitionRow
from fencepost_server.store.runs import EventRecord, OpenStepRow, RunDetail, RunSummary
from fencepost_server.wire.payloads import failure_out, payload_out, timestamp


def run_summary(run: RunSummary) -> run_pb2.Run:
    """A run without payloads and steps."""
    message = run_pb2.Run(
        run_id=run.run_id,
        namespace=run.namespace,
        workflow_id=run.workflow_id,
        definition_hash=run.definition_hash.hex(),
        state=run.state,  # type: ignore[arg-type]  # the numbers are the contract's
        user_id=run.user_id,
        request_key=run.request_key,
        priority=run.priority,
        create_time=timestamp(run.created_at),
        end_time=timestamp(run.ended_at),
        last_seq=run.last_seq,
        dedupe_key=run.dedupe_key,
        attributes=json.loads(run.attributes) if run.attributes else None,
        parent_run_id=run.parent_run_id or "",
    )
    if run.failure is not None:
        message.failure.CopyFrom(failure_out(Failure.from_json(run.failure)))
    return message


def run_detail(run: RunDetail, graph: Graph) -> run_pb2.Run:
    """A run with everything."""
    message = run_summary(run.summary)
    message.input.CopyFrom(payload_out(run.input))
    if run.output is not None:
        message.output.CopyFrom(payload_out(run.output))
    message.open_steps.extend(_open_step(step, graph) for step in run.open_steps)
    return message


def _open_step(step: OpenStepRow, graph: Graph) -> run_pb2.OpenStep:
    if step.leased:
        state = run_pb2.STEP_STATE_LEASED
    elif step.visible_at >= PARKED_UNTIL:
        state = run_pb2.STEP_STATE_PARKED
    elif step.later:
        state = run_pb2.STEP_STATE_RETRYING
    else:
        state = run_pb2.STEP_STATE_READY
    message = run_pb2.OpenStep(
        task_id=step.task_id,
        node_id=graph.nodes[step.node_index].step.id,
        handler=step.handler,
        queue=step.queue,
        state=state,
        attempt=step.attempt,
        operational_failures=step.operational_failures,
        corrective_failures=step.corrective_failures,
        ready_time=None if step.visible_at >= PARKED_UNTIL else timestamp(step.visible_at),
        lease_expire_time=timestamp(step.lease_expires_at),
        worker_name=step.worker_name or "",
    )
    if step.last_failure is not None:
        message.last_failure.CopyFrom(failure_out(Failure.from_json(step.last_failure)))
    return message


def event(record: EventRecord, graph: Graph, started: RunSummary) -> run_pb2.Event:
    """An entry of a history."""
    message = run_pb2.Event(seq=record.seq, event_time=timestamp(record.at))
    detail = json.loads(record.detail) if record.detail else {}
    failure = _failure(detail)
    step = None if record.node_index is None else graph.nodes[record.node_index].step
    node_id = "" if step is None else step.id
    match EventType(record.type):
        case EventType.RUN_STARTED:
            message.run_started.workflow_id = started.workflow_id
            message.run_started.definition_hash = started.definition_hash.hex()
            message.run_started.input.CopyFrom(payload_out(record.payload))
        case EventType.STEP_SCHEDULED:
            assert step is not None  # written with its node
            message.step_scheduled.CopyFrom(
                run_pb2.StepScheduled(
                    node_id=node_id, handler=step.handler, queue=step.queue, input_seq=record.input_seq or 0
                )
            )
        case EventType.STEP_RETRYING:
            message.step_retrying.CopyFrom(
                run_pb2.StepRetrying(
                    task_id=record.task_id or 0,
                    node_id=node_id,
                    failure=failure,
                    fencing_token=record.token or 0,
                    ready_time=timestamp(datetime.fromisoformat(detail["ready_at"])),
                )
            )
        case EventType.STEP_COMPLETED:
            message.step_completed.CopyFrom(
                run_pb2.StepCompleted(
                    task_id=record.task_id or 0,
                    node_id=node_id,
                    output=payload_out(record.payload),
                    fencing_token=record.token or 0,
                    attempt=record.attempt or 0,
                )
            )
        case EventType.STEP_FAILED:
            message.step_failed.CopyFrom(
                run_pb2.StepFailed(
                    task_id=record.task_id or 0,
                    node_id=node_id,
                    failure=failure,
                    fencing_token=record.token or 0,
                    operational_failures=detail["operational_failures"],
                    corrective_failures=detail["corrective_failures"],
                )
            )
        case EventType.RUN_COMPLETED:
            message.run_completed.output_seq = record.input_seq or 0
        case EventType.RUN_FAILED:
            message.run_failed.CopyFrom(run_pb2.RunFailed(failure=failure))
        case EventType.RUN_BLOCKED:
            message.run_blocked.CopyFrom(run_pb2.RunBlocked(failure=failure))
    return message


def _failure(detail: dict[str, object]) -> run_pb2.Failure | None:
    if "failure" not in detail:
        return None
    return failure_out(Failure.from_json(json.dumps(detail["failure"])))


def definition(row: DefinitionRow) -> definition_service_pb2.Definition:
    """A registered definition."""
    if row.removed_at is not None:
        state = definition_service_pb2.DEFINITION_STATE_REMOVED
    elif row.active:
        state = definition_service_pb2.DEFINITION_STATE_ACTIVE
    else:
        state = definition_service_pb2.DEFINITION_STATE_PREVIOUS
    return definition_service_pb2.Definition(
        workflow_id=row.workflow_id,
        definition_hash=row.hash.hex(),
        compatibility_id=row.compatibility_id,
        state=state,
        manifest_json=row.manifest,
        create_time=timestamp(row.created_at),
    )
