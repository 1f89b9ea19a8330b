"""The parts that frames are made of: references, reports, tasks and results, in the contract's form."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.errors import FrameTooLarge, InvalidFrame
from fencepost_server.domain.model import Checkpoint, EventType, LeasedTask, Outcome, Payload, TaskKind
from fencepost_server.domain.ops import AdvanceAnswer, Decide, HistoryEvent
from fencepost_server.engine.operations import Answer, Report, ReportKind
from fencepost_server.wire.events import history_event
from fencepost_server.wire.payloads import (
    duration,
    failure_in,
    failure_out,
    fill_payload,
    payload_in,
    payload_out,
    retry_after_in,
    timestamp,
)
from fencepost_server.wire.status import reason_number

_TASK_OVERHEAD = 1024  # bytes of a Task beside its payloads, generously
_EVENT_OVERHEAD = 64  # of an Event beside its payload and what its detail has
_FIRST_EVENT_OVERHEAD = 512  # RunStarted names the workflow and its definition
_RESULT_OVERHEAD = 1024

_OK, _UNDO = Outcome.OK, TaskKind.UNDO

Ref = tuple[str, int, int]
"""run_id, task_id, token."""

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_UUID_LENGTH = 36  # looked at first: texts of any length come in, and only those of this one are kept


@lru_cache(maxsize=20_000)  # a run's id comes with each of its steps
def _is_uuid(text: str) -> bool:
    return _UUID.fullmatch(text) is not None


def ref_of(task: pb.TaskRef) -> Ref:
    """A well-formed reference. Raises InvalidFrame."""
    run_id, task_id, token = task.run_id, task.task_id, task.fencing_token
    if len(run_id) != _UUID_LENGTH or not _is_uuid(run_id) or task_id < 1 or token < 1:
        raise InvalidFrame("task: run_id must be a UUID in lower case, task_id and fencing_token positive")
    return (run_id, task_id, token)


def completed(item: pb.CompleteItem, namespace: str, limit: int) -> Report:
    """The report of a step that ended with an output. Raises InvalidFrame, InvalidJson, PayloadTooLarge."""
    output, value = payload_in(item.output, limit, "output")
    run_id, task_id, token = ref_of(item.task)
    return Report(ReportKind.COMPLETE, run_id, task_id, token, namespace, output.digest(), output, value)


def failed(item: pb.FailItem, namespace: str, limit: int) -> Report:
    """The report of an attempt that failed, perhaps with the last checkpoint. Raises as ``completed``, for the feedback
    and the checkpoint.
    """
    ref = ref_of(item.task)
    failure = failure_in(item.failure, limit)
    retry_after = retry_after_in(item.retry_after) if item.HasField("retry_after") else None
    checkpoint = _checkpoint(item.checkpoint, limit, "checkpoint.state") if item.HasField("checkpoint") else None
    said = b"fail" + failure.to_json().encode()
    if checkpoint is not None:
        said += _digest(checkpoint)
    digest = hashlib.sha256(said).digest()
    return Report(
        ReportKind.FAIL, *ref, namespace, digest, failure=failure, retry_after=retry_after, checkpoint=checkpoint
    )


def checkpointed(item: pb.CheckpointItem, namespace: str, limit: int) -> Report:
    """The report of a state of a step that goes on. Raises as ``completed``."""
    ref = ref_of(item.task)
    checkpoint = _checkpoint(item, limit, "state")
    return Report(ReportKind.CHECKPOINT, *ref, namespace, _digest(checkpoint), checkpoint=checkpoint)


def _checkpoint(item: pb.CheckpointItem, limit: int, path: str) -> Checkpoint:
    if item.number < 1:
        raise InvalidFrame("checkpoint: number must be 1 or more")
    state, _ = payload_in(item.state, limit, path)
    return Checkpoint(item.number, state)


def _digest(checkpoint: Checkpoint) -> bytes:
    return hashlib.sha256(b"checkpoint" + checkpoint.number.to_bytes(8, "big") + checkpoint.state.digest()).digest()


def released(item: pb.ReleaseItem, namespace: str, _limit: int) -> Report:
    """The report of a task that was given back. Raises InvalidFrame."""
    return Report(ReportKind.RELEASE, *ref_of(item.task), namespace)


@lru_cache(maxsize=64)
def _time(at: datetime) -> tuple[int, int]:
    """Seconds and nanoseconds since 1970 of a moment; there is one for all that was committed together."""
    message = timestamp(at)
    assert message is not None  # as there is a moment
    return message.seconds, message.nanos


@lru_cache(maxsize=1000)
def _task_of_node(
    kind: TaskKind,
    workflow_id: str,
    definition_hash: bytes,
    handler: str,
    node_id: str,
    lease_seconds: float,
    timeout_seconds: float | None,
) -> pb.Task:
    """What all tasks of a node have in common, and there are few nodes. Copied into a frame, never changed."""
    return pb.Task(
        kind=pb.TaskKind.ValueType(kind),
        workflow_id=workflow_id,
        definition_hash=definition_hash.hex(),
        handler=handler,
        node_id=node_id,
        lease_duration=duration(min(lease_seconds, timeout_seconds or lease_seconds)),
        attempt_timeout=None if timeout_seconds is None else duration(timeout_seconds),
    )


def fill_task(message: pb.Task, task: LeasedTask) -> None:
    """Write a task on lease into an empty Task, as its worker is told of it."""
    message.CopyFrom(
        _task_of_node(
            task.kind, task.workflow_id, task.definition_hash, task.handler, task.node_id, task.lease_seconds,
            task.timeout_seconds,
        )
    )  # fmt: skip
    run_id = task.run_id
    ref = message.task
    ref.run_id = run_id
    ref.task_id = task.task_id
    ref.fencing_token = task.token
    message.attempt = task.attempt
    message.idempotency_key = f"{run_id}/{task.task_id}"
    fill_payload(message.input, task.input)
    # Set only where there is something: most tasks are plain steps, and each field takes its time.
    if task.user_id:
        message.user_id = task.user_id
    if task.feedback is not None:
        message.feedback.CopyFrom(failure_out(task.feedback))
    if task.checkpoint is not None:
        message.checkpoint.CopyFrom(_checkpoint_message(task.checkpoint))
    if task.decide is not None:
        message.decide.CopyFrom(_decide_message(task.decide, task.workflow_id, task.definition_hash))
    if task.kind is _UNDO:
        if task.undo_output is not None:
            fill_payload(message.undo_output, task.undo_output)
        message.unfinished = task.unfinished
        message.step_idempotency_key = task.step_key


def _checkpoint_message(checkpoint: Checkpoint) -> pb.CheckpointItem:
    return pb.CheckpointItem(number=checkpoint.number, state=payload_out(checkpoint.state))


def _decide_message(decide: Decide, workflow_id: str, definition_hash: bytes) -> pb.Decide:
    return pb.Decide(
        events=[history_event(event, workflow_id, definition_hash) for event in decide.events],
        after_seq=decide.after_seq,
        last_seq=decide.last_seq,
        advance_no=decide.advance_no,
        seen_seq=decide.seen_seq,
        compatibility_id=decide.compatibility_id,
    )


def fitting(events: Sequence[HistoryEvent], room: int) -> tuple[Sequence[HistoryEvent], int]:
    """As many of the events, from the first on, as have that many bytes at most; and how many bytes."""
    size = 0
    for index, event in enumerate(events):
        needed = _event_size(event)
        if size + needed > room:
            return events[:index], size
        size += needed
    return events, size


def fit_history(task: LeasedTask, room: int) -> int:
    """Leave out, from the end, the events of a DECIDE task that would make it larger than that: the worker reads them
    with GetHistory. Returns about the bytes of its message.
    """
    base = size_of(task)
    events, size = fitting(task.decide.events, room - base)
    if len(events) < len(task.decide.events):
        task.decide = replace(task.decide, events=tuple(events))
    return base + size


def halve_history(task: LeasedTask) -> bool:
    """Leave out half of the events of a DECIDE task. False if it has none."""
    if task.decide is None or not task.decide.events:
        return False
    task.decide = replace(task.decide, events=task.decide.events[: len(task.decide.events) // 2])
    return True


def _event_size(event: HistoryEvent) -> int:
    """No fewer bytes than its message has: ``detail`` spells everything at least as long."""
    size = _EVENT_OVERHEAD if event.type != EventType.RUN_STARTED else _FIRST_EVENT_OVERHEAD
    if event.detail is not None:
        size += len(event.detail)
    payload = event.payload
    if payload is not None:
        text = payload.json
        if text is not None:
            size += len(text) if text.isascii() else len(text.encode())
        size += len(payload.binary or b"") + 3 * len(payload.metadata or "")
    return size


def events_message(
    ref: Ref, after_seq: int, events: Sequence[HistoryEvent], room: int, last_seq: int = 0
) -> pb.SessionResponse:
    """New events of a run for the worker that holds it, as many as fit. ``last_seq``: of those that are not here."""
    last_seq = max(last_seq, events[-1].seq if events else after_seq)
    some, _ = fitting(events, room - _RESULT_OVERHEAD)
    told = pb.RunEvents(
        task=pb.TaskRef(run_id=ref[0], task_id=ref[1], fencing_token=ref[2]),
        after_seq=after_seq,
        events=[history_event(event) for event in some],
        last_seq=last_seq,
    )
    return pb.SessionResponse(events=pb.Events(runs=[told]))


def size_of(task: LeasedTask) -> int:
    """About the bytes of its message without a history, and rarely fewer: a frame is measured once more before it is
    sent.
    """
    size = _TASK_OVERHEAD + _size_on_wire(task.input)
    if task.feedback is not None:
        size += 3 * len(task.feedback.message)
        if task.feedback.feedback is not None:
            size += _size_on_wire(task.feedback.feedback)
    if task.checkpoint is not None:
        size += _size_on_wire(task.checkpoint.state)
    if task.undo_output is not None:
        size += _size_on_wire(task.undo_output)
    return size


def _size_on_wire(payload: Payload) -> int:
    """A character may take three bytes, or four, which few do."""
    return 3 * len(payload.json or "") + len(payload.binary or b"") + 3 * len(payload.metadata or "")


def too_many(items: int, most: int) -> FrameTooLarge:
    """What a frame is refused with that has more items than it may."""
    return FrameTooLarge(f"{items} items are more than {most}")


def ack_message(frame_id: int, items: Sequence[pb.ItemResult] = ()) -> pb.SessionResponse:
    """The answer to a frame, with those to items of it."""
    return pb.SessionResponse(ack=pb.Ack(frame_id=frame_id, results=items))


def ack_messages(answers: Sequence[tuple[Report, Answer]], room: int) -> list[pb.SessionResponse]:
    """The answers to reports: a message for each frame that they came in."""
    messages: list[pb.SessionResponse] = []
    results_of: dict[int, Any] = {}
    for report, answer in answers:
        results = results_of.get(report.frame_id)
        if results is None:
            messages.append(ack_message(report.frame_id))
            results = results_of[report.frame_id] = messages[-1].ack.results
        fill_result(results.add(), report.index, answer, room)
    return messages


def result_message(index: int, answer: Answer, room: int = 0) -> pb.ItemResult:
    """The answer to one item of a frame. ``room``: how many bytes that of an Advance may have."""
    result = pb.ItemResult()
    fill_result(result, index, answer, room)
    return result


def fill_result(result: pb.ItemResult, index: int, answer: Answer, room: int = 0) -> None:
    """The same, written into an empty ItemResult."""
    result.index = index
    result.outcome = int(answer.outcome)  # type: ignore[assignment]  # the numbers are the contract's
    if answer.advance is not None:
        _fill_advance(result.advance, answer.advance, room)
    elif answer.outcome is not _OK:
        result.message = answer.message
        if answer.reason:
            result.reason = reason_number(answer.reason)
        for violation in answer.violations:
            result.violations.add(path=violation.path, message=violation.message)


def _fill_advance(result: pb.AdvanceResult, answer: AdvanceAnswer, room: int) -> None:
    result.seqs.extend(answer.seqs)
    at = result.event_time
    at.seconds, at.nanos = _time(answer.at)
    result.last_seq = answer.last_seq
    result.kept = answer.kept
    if answer.end_refused:
        result.end_refused = True
    if answer.events:
        events, _ = fitting(answer.events, room - _RESULT_OVERHEAD - 10 * len(answer.seqs))
        result.events.extend([history_event(event) for event in events])
