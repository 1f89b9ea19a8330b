"""Builds the worker's frames from leases and outcomes. Pure; the session numbers and remembers them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fencepost.failure import Completed, Failed
from fencepost.lease import CancelReason
from fencepost.models import FAILURE_KIND_NUMBERS, fill_payload, payload_size
from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from fencepost.codec import Value
    from fencepost.lease import DecideLease, Lease

# What an item takes beside its payload and texts: three numbers, a UUID, tags and lengths, rounded up.
ITEM_OVERHEAD = 160


def seconds_of(duration: Duration) -> float:
    """A Duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def stop_reason(reason: error_pb2.ErrorReason.ValueType) -> CancelReason:
    """Why the server wants a step to stop; that its run ends, if it does not say."""
    is_cancelled = reason == error_pb2.ERROR_REASON_RUN_CANCELLED
    return CancelReason.RUN_CANCELLED if is_cancelled else CancelReason.RUN_ENDED


def fill_ref(ref: pb.TaskRef, lease: Lease) -> None:
    """Write the name of a lease into an empty TaskRef."""
    ref.run_id = lease.run_id
    ref.task_id = lease.task_id
    ref.fencing_token = lease.token


def take(waiting: deque[Lease], max_items: int, max_bytes: int) -> list[Lease]:
    """Take from ``waiting`` what fits into one frame, at least one; skip what has no outcome any more."""
    taken: list[Lease] = []
    room = max_bytes
    while waiting and len(taken) < max_items:
        outcome = waiting[0].outcome
        if outcome is not None:
            room -= outcome.size + ITEM_OVERHEAD
            if room < 0 and taken:
                break
            taken.append(waiting[0])
        waiting.popleft()
    return taken


def fill_outcomes(frame: pb.SessionRequest, leases: Iterable[Lease]) -> None:
    """Write leases with outcomes of one class into a frame: a Complete, a Fail or a Release."""
    for lease in leases:
        outcome = lease.outcome
        if isinstance(outcome, Completed):
            completed = frame.complete.items.add()
            fill_ref(completed.task, lease)
            output = outcome.output
            if output.json is not None and not output.metadata:
                completed.output.json = output.json
            elif output.binary is not None or output.metadata:
                fill_payload(completed.output, output)
        elif isinstance(outcome, Failed):
            _fill_failure(frame.fail.items.add(), lease, outcome)
        else:
            fill_ref(frame.release.items.add().task, lease)


def fill_failure(failure: run_pb2.Failure, outcome: Failed) -> None:
    """Write why something failed into an empty Failure."""
    failure.kind = FAILURE_KIND_NUMBERS[outcome.kind]
    failure.code = outcome.code
    failure.message = outcome.message
    if outcome.feedback is not None:
        fill_payload(failure.feedback, outcome.feedback)
        # Present even if it is null, which leaves the payload empty.
        failure.feedback.SetInParent()


def _fill_failure(item: pb.FailItem, lease: Lease, outcome: Failed) -> None:
    fill_ref(item.task, lease)
    fill_failure(item.failure, outcome)
    if outcome.retry_after is not None:
        nanos, seconds = math.modf(outcome.retry_after)
        item.retry_after.seconds = int(seconds)
        item.retry_after.nanos = int(nanos * 1e9)
        item.retry_after.SetInParent()
    if outcome.checkpoint is not None:
        item.checkpoint.number, state = outcome.checkpoint
        fill_payload(item.checkpoint.state, state)
        item.checkpoint.state.SetInParent()


def fill_advances(frame: pb.SessionRequest, leases: Iterable[DecideLease]) -> None:
    """Write the Advances of leases that have one into an Advance frame."""
    items = frame.advance.items
    for lease in leases:
        if lease.advance is not None:
            items.append(lease.advance)


def fill_answers(frame: pb.SessionRequest, waiting: deque[pb.QueryResultItem], max_items: int, max_bytes: int) -> None:
    """Write what fits of the answers to queries into a QueryResult frame, at least one."""
    items = frame.query_result.items
    room = max_bytes
    while waiting and len(items) < max_items:
        room -= waiting[0].ByteSize() + ITEM_OVERHEAD
        if room < 0 and items:
            break
        items.append(waiting.popleft())


def fill_checkpoints(frame: pb.SessionRequest, leases: Iterable[Lease]) -> None:
    """Write the states that are on their way into a Checkpoint frame."""
    for lease in leases:
        saving = lease.saving
        if saving is not None:
            item = frame.checkpoint.items.add()
            fill_ref(item.task, lease)
            item.number = saving.number
            fill_payload(item.state, saving.state)
            # Present even if it is null, which leaves the payload empty.
            item.state.SetInParent()


def fill_heartbeat(heartbeat: pb.Heartbeat, leases: Iterable[Lease], max_bytes: int) -> None:
    """Write the names of leases, and the progress that their steps have told since the last one.

    What of it there is no room for is told by the next one.
    """
    told: list[tuple[Lease, Value]] = []
    room = max_bytes
    for lease in leases:
        fill_ref(heartbeat.tasks.add(), lease)
        room -= ITEM_OVERHEAD
        # Read once: the step's thread may set another at any time.
        progress = lease.progress
        if progress is not None and progress is not lease.progress_sent:
            told.append((lease, progress))
    for lease, progress in told:
        room -= ITEM_OVERHEAD + payload_size(progress)
        if room < 0:
            break
        item = heartbeat.progress.add()
        fill_ref(item.task, lease)
        fill_payload(item.progress, progress)
        lease.progress_sent = progress
