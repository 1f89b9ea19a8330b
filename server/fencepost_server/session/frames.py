"""The parts that frames are made of: references, tasks and results, in the contract's form."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from google.protobuf.duration_pb2 import Duration

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.errors import InvalidFrame
from fencepost_server.domain.model import LeasedTask, Outcome
from fencepost_server.engine.operations import Answer, Report, ReportKind
from fencepost_server.wire.payloads import (
    duration,
    failure_in,
    failure_out,
    payload_in,
    payload_out,
    retry_after_in,
)
from fencepost_server.wire.status import reason_number

_TASK_OVERHEAD = 1024  # bytes of a Task beside its input and feedback, generously

Ref = tuple[str, int, int]
"""run_id, task_id, token."""

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def ref_of(task: pb.TaskRef) -> Ref:
    """A well-formed reference. Raises InvalidFrame."""
    run_id = task.run_id
    if _UUID.fullmatch(run_id) is None or task.task_id < 1 or task.fencing_token < 1:
        raise InvalidFrame("task: run_id must be a UUID in lower case, task_id and fencing_token positive")
    return (run_id, task.task_id, task.fencing_token)


def completed(item: pb.CompleteItem, namespace: str, limit: int) -> Report:
    """The report of a step that ended with an output. Raises InvalidFrame, InvalidJson, PayloadTooLarge."""
    output, value = payload_in(item.output, limit, "output")
    return Report(ReportKind.COMPLETE, *ref_of(item.task), namespace, output.digest(), output, value)


def failed(item: pb.FailItem, namespace: str, limit: int) -> Report:
    """The report of an attempt that failed. Raises as ``completed``, for the feedback."""
    ref = ref_of(item.task)
    failure = failure_in(item.failure, limit)
    retry_after = retry_after_in(item.retry_after) if item.HasField("retry_after") else None
    digest = hashlib.sha256(b"fail" + failure.to_json().encode()).digest()
    return Report(ReportKind.FAIL, *ref, namespace, digest, failure=failure, retry_after=retry_after)


def released(item: pb.ReleaseItem, namespace: str, _limit: int) -> Report:
    """The report of a task that was given back. Raises InvalidFrame."""
    return Report(ReportKind.RELEASE, *ref_of(item.task), namespace)


@lru_cache(maxsize=1000)
def _duration(seconds: float) -> Duration:
    """Leases and timeouts come from few nodes, so their messages are made once. Copied into a frame, never changed."""
    return duration(seconds)


def task_message(task: LeasedTask) -> pb.Task:
    """A task on lease, as its worker is told of it."""
    return pb.Task(
        task=pb.TaskRef(run_id=task.run_id, task_id=task.task_id, fencing_token=task.token),
        kind=pb.TASK_KIND_STEP,
        workflow_id=task.workflow_id,
        definition_hash=task.definition_hash.hex(),
        handler=task.handler,
        node_id=task.node_id,
        attempt=task.attempt,
        lease_duration=_duration(min(task.lease_seconds, task.timeout_seconds or task.lease_seconds)),
        attempt_timeout=None if task.timeout_seconds is None else _duration(task.timeout_seconds),
        input=payload_out(task.input),
        feedback=None if task.feedback is None else failure_out(task.feedback),
        idempotency_key=f"{task.run_id}/{task.task_id}",
        user_id=task.user_id,
    )


def size_of(task: LeasedTask) -> int:
    """About the bytes of its message, never fewer: a character of JSON may take three."""
    size = _TASK_OVERHEAD + 3 * len(task.input.json or "")
    size += len(task.input.binary or b"") + len(task.input.metadata or "")
    if task.feedback is not None and task.feedback.feedback is not None:
        size += 3 * task.feedback.feedback.size
    return size


def result_message(index: int, answer: Answer) -> pb.ItemResult:
    """The answer to one item of a frame."""
    if answer.outcome is Outcome.OK:
        return pb.ItemResult(index=index, outcome=pb.ITEM_OUTCOME_OK)
    result = pb.ItemResult(
        index=index,
        outcome=int(answer.outcome),  # type: ignore[arg-type]  # the numbers are the contract's
        message=answer.message,
    )
    if answer.reason:
        result.reason = reason_number(answer.reason)
    for violation in answer.violations:
        result.violations.add(path=violation.path, message=violation.message)
    return result
