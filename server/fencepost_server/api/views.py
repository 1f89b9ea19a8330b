"""Rows as messages of the contract."""

from __future__ import annotations

import json

from fencepost.v1 import definition_service_pb2, run_pb2
from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import IDLE_UNTIL, PARKED_UNTIL, Failure, TaskKind
from fencepost_server.domain.rows import Control
from fencepost_server.store.definitions import DefinitionRow
from fencepost_server.store.runs import OpenStepRow, RunDetail, RunSummary
from fencepost_server.store.waits import OpenWaitRow
from fencepost_server.wire.events import node_id
from fencepost_server.wire.payloads import failure_out, payload_of_text, payload_out, timestamp


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
    if run.control is not None:
        control = Control.from_json(run.control)
        if control.ending is not None and run.ended_at is None:
            message.ending = control.ending["state"]
        message.next_run_id = control.next_run
        message.previous_run_id = control.previous_run
    return message


def run_detail(run: RunDetail, graph: Graph) -> run_pb2.Run:
    """A run with everything."""
    message = run_summary(run.summary)
    message.input.CopyFrom(payload_out(run.input))
    if run.output is not None:
        message.output.CopyFrom(payload_out(run.output))
    message.open_steps.extend(_open_step(step, graph) for step in run.open_steps if not _idle(step))
    # Of a run that is ending times and signals are only kept, for a retry: it waits for its children.
    waits = [wait for wait in run.open_waits if not message.ending or wait.child_run_id is not None]
    message.open_waits.extend(_open_wait(wait, graph) for wait in waits)
    for name, count in run.pending_signals:
        message.pending_signals.add(signal_name=name, count=count)
    return message


def _idle(step: OpenStepRow) -> bool:
    """The task of a code run that decides, while its function waits for an event."""
    return not step.leased and IDLE_UNTIL <= step.visible_at < PARKED_UNTIL


def _open_step(step: OpenStepRow, graph: Graph) -> run_pb2.OpenStep:
    if step.leased:
        state = run_pb2.STEP_STATE_LEASED
    elif step.visible_at >= PARKED_UNTIL:
        state = run_pb2.STEP_STATE_PARKED
    elif step.later:
        state = run_pb2.STEP_STATE_RETRYING
    else:
        state = run_pb2.STEP_STATE_READY
    extra = json.loads(step.extra) if step.extra else {}
    decides = extra.get("kind") == TaskKind.DECIDE
    message = run_pb2.OpenStep(
        task_id=step.task_id,
        node_id=node_id(graph, step.node_index) or ("" if decides else extra.get("plan", ("", ""))[1]),
        handler=step.handler,
        queue=step.queue,
        state=state,
        attempt=step.attempt,
        operational_failures=step.operational_failures,
        corrective_failures=step.corrective_failures,
        ready_time=None if step.visible_at >= PARKED_UNTIL else timestamp(step.visible_at),
        lease_expire_time=timestamp(step.lease_expires_at),
        worker_name=step.worker_name or "",
        decide=decides,
        undo=extra.get("kind") == TaskKind.UNDO,
        scope_id=extra.get("scope", 0),
        item=extra.get("item", 0),
        checkpoint_number=step.checkpoint_number,
        progress=None if step.progress is None else payload_out(payload_of_text(step.progress)),
    )
    if step.last_failure is not None:
        message.last_failure.CopyFrom(failure_out(Failure.from_json(step.last_failure)))
    return message


def _open_wait(wait: OpenWaitRow, graph: Graph) -> run_pb2.OpenWait:
    name = node_id(graph, wait.node_index) or wait.name
    message = run_pb2.OpenWait(seq=wait.seq, node_id=name, fire_time=timestamp(wait.fire_at))
    if wait.signal_name is not None:
        message.signal_name = wait.signal_name
    if wait.child_run_id is not None:
        message.child_run_id = wait.child_run_id
    return message


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
