"""Who a worker is and what it offers, and the leases that it makes of the tasks which come for that.

A handler serves tasks of the kind that it was made for (`step`, `undo`). One of the other kind, such as a manifest that
names a step where it means an undo handler, is given back like one for a handler that was never offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from fencepost.codec import NULL
from fencepost.frames import seconds_of
from fencepost.lease import DecideLease, Lease, TaskKind
from fencepost.models import failure_of, value_of
from fencepost.steps import Step
from fencepost.v1 import worker_service_pb2 as pb

if TYPE_CHECKING:
    from fencepost.lease import Owner
    from fencepost.workflow import Workflow

_TASK_KINDS = {pb.TASK_KIND_STEP: TaskKind.STEP, pb.TASK_KIND_UNDO: TaskKind.UNDO}

WorkflowKey: TypeAlias = tuple[str, str]
"""A code workflow by its id and its compatibility_id."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the worker is, as every Hello says it, the handlers that it can run, by name, and the code workflows that it
    can decide.
    """

    namespace: str
    worker_name: str
    process_nonce: str
    sdk_version: str
    steps: Mapping[str, Step[..., Any]]
    labels: Mapping[str, str]
    max_frame_bytes: int
    workflows: Mapping[WorkflowKey, Workflow[..., Any]] = field(default_factory=dict)

    def fill(self, hello: pb.Hello) -> None:
        """Write it into a Hello."""
        hello.namespace = self.namespace
        hello.worker_name = self.worker_name
        hello.process_nonce = self.process_nonce
        hello.sdk_name = "fencepost-python"
        hello.sdk_version = self.sdk_version
        hello.max_frame_bytes = self.max_frame_bytes
        for step in self.steps.values():
            hello.handlers.add(name=step.name, queue=step.queue)
        for (workflow_id, compatibility_id), workflow in self.workflows.items():
            hello.workflows.add(workflow_id=workflow_id, compatibility_id=compatibility_id, queue=workflow.queue)
        hello.labels.update(self.labels)

    def lease_of(self, task: pb.Task, owner: Owner, sent_at: float, now: float, max_payload_bytes: int) -> Lease:
        """A lease of a task that came at ``now``, counted from ``sent_at``; of `UNKNOWN_STEP` if no handler serves it.

        Copies what is needed: holding on to a message would keep its whole frame in memory.
        """
        ref = task.task
        seconds = seconds_of(task.lease_duration)
        if task.kind == pb.TASK_KIND_DECIDE:
            return DecideLease(
                owner=owner,
                step=DECIDING if (task.workflow_id, task.decide.compatibility_id) in self.workflows else UNKNOWN_STEP,
                task=task,
                expires_at=sent_at + seconds,
                lease_seconds=seconds,
                max_payload_bytes=max_payload_bytes,
                input=NULL,
            )
        kind = _TASK_KINDS.get(task.kind, TaskKind.UNSPECIFIED)
        step = self.steps.get(task.handler)
        state = task.checkpoint
        return Lease(
            owner=owner,
            step=step if step is not None and step.kind is kind else UNKNOWN_STEP,
            run_id=ref.run_id,
            task_id=ref.task_id,
            token=ref.fencing_token,
            workflow_id=task.workflow_id,
            definition_hash=task.definition_hash,
            node_id=task.node_id,
            attempt=task.attempt,
            expires_at=sent_at + seconds,
            lease_seconds=seconds,
            # From now, unlike the lease: counted from a frame of long ago, it would end before it has begun.
            # That the server ends it a little earlier does no harm.
            deadline=now + seconds_of(task.attempt_timeout) if task.HasField("attempt_timeout") else 0.0,
            input=value_of(task.input),
            failure_before=failure_of(task.feedback) if task.HasField("feedback") else None,
            idempotency_key=task.idempotency_key,
            user_id=task.user_id,
            max_payload_bytes=max_payload_bytes,
            kind=kind,
            undo_output=value_of(task.undo_output) if task.HasField("undo_output") else None,
            unfinished=task.unfinished,
            step_idempotency_key=task.step_idempotency_key,
            checkpoint=(state.number, value_of(state.state)) if task.HasField("checkpoint") else (0, None),
        )


def _unknown() -> None:
    """Never run: it stands for a handler that the worker lacks."""


UNKNOWN_STEP: Step[..., Any] = Step(_unknown, "(unknown)")
DECIDING: Step[..., Any] = Step(_unknown, "(decide)")
"""Stands in the leases of DECIDE tasks, which no handler runs."""
