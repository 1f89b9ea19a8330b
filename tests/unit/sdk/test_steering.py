"""What a worker hears of a step that should stop or be undone, and what it tells of its progress."""

from __future__ import annotations

import pytest

from fencepost import CancelReason, StepContext, TaskKind
from fencepost.failure import Released
from fencepost.lease import clock
from fencepost.v1 import error_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.unit.sdk.building import DONE, OK, ack, frames, given, only, opened, ref, task

CANCELLED = error_pb2.ERROR_REASON_RUN_CANCELLED


def cancel(
    *tasks: pb.TaskRef, remaining: int = 30, reason: error_pb2.ErrorReason.ValueType = CANCELLED
) -> pb.SessionResponse:
    frame = pb.SessionResponse(cancel=pb.Cancel(tasks=tasks, reason=reason))
    frame.cancel.remaining.seconds = remaining
    return frame


def wanted(frame_id: int, lease: float) -> pb.SessionResponse:
    """The answer to a heartbeat that finds its one lease cancelled."""
    frame = ack(frame_id, {0: OK}, lease=lease)
    frame.ack.results[0].cancel_wanted = True
    return frame


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (CANCELLED, CancelReason.RUN_CANCELLED),
        (error_pb2.ERROR_REASON_RUN_ENDED, CancelReason.RUN_ENDED),
        (error_pb2.ERROR_REASON_UNSPECIFIED, CancelReason.RUN_ENDED),
    ],
)
def test_a_step_is_told_to_stop_once_and_why_and_keeps_its_lease(
    reason: error_pb2.ErrorReason.ValueType, told: CancelReason
) -> None:
    session = opened()
    lease, other = given(session, task(1), task(2))
    effects = session.receive(cancel(ref(1), ref(2, token=9), reason=reason), 100)
    assert effects.cancel == [lease]
    assert (lease.cancel_reason, lease.cancel_deadline) == (told, 130)
    assert other.cancel_reason is None, "that was another lease"
    assert session.receive(cancel(ref(1), reason=reason), 110).cancel == []
    assert session.held_count == 2


def test_what_a_step_reports_in_its_grace_is_sent_and_counts() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.receive(cancel(ref(1)), 0)
    session.finish(lease, DONE)
    frame = only(session)
    session.receive(ack(frame.frame_id, {0: OK}), 0)
    assert (session.counters.completed, session.counters.zombies) == (1, 0)


def test_a_step_that_was_not_begun_is_given_back() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.receive(cancel(ref(1)), 0)
    session.finish(lease, Released())
    assert only(session).release.items[0].task == ref(1)
    assert session.counters.zombies == 0


def test_a_heartbeat_tells_it_too_and_counts_the_grace_from_its_send() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.tick(20)
    effects = session.receive(wanted(only(session, 20).frame_id, 25), 29)
    assert effects.cancel == [lease]
    assert lease.cancel_reason is CancelReason.RUN_ENDED
    assert lease.cancel_deadline == lease.expires_at == 45
    session.tick(40)
    assert session.receive(wanted(only(session, 40).frame_id, 3), 41).cancel == []
    assert lease.cancel_deadline == 43


def test_after_the_grace_the_step_is_told_that_its_lease_is_lost() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.receive(cancel(ref(1)), 0)
    revoke = pb.SessionResponse(revoke=pb.Revoke(tasks=[ref(1)], reason=CANCELLED))
    assert session.receive(revoke, 30).cancel == [lease]
    assert lease.cancel_reason is CancelReason.LEASE_LOST
    session.finish(lease, DONE)
    assert frames(session) == [], "nothing of it counts"
    assert (session.counters.zombies, session.counters.lost) == (0, 1)


def test_a_step_that_has_ended_is_not_told() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, DONE)
    assert session.receive(cancel(ref(1)), 0).cancel == []
    assert lease.cancel_reason is None


def test_the_context_tells_the_grace_that_remains() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    context = StepContext(lease)
    assert (context.cancelled, context.grace_remaining) == (False, None)
    session.receive(cancel(ref(1)), clock())
    assert context.cancelled
    assert 25 < (context.grace_remaining or 0) <= 30
    session.receive(pb.SessionResponse(revoke=pb.Revoke(tasks=[ref(1)])), 0)
    assert context.grace_remaining == 0.0


# Undo.


def undo_task(run: int, *, handler: str = "u", unfinished: bool = False) -> pb.Task:
    return task(run, handler=handler, kind=pb.TASK_KIND_UNDO, unfinished=unfinished)


def test_an_undo_task_goes_to_its_undo_handler_with_what_the_step_returned() -> None:
    session = opened()
    made = undo_task(1)
    made.undo_output.json = "[1]"
    lease, unfinished = given(session, made, undo_task(2, unfinished=True))
    assert (lease.step.name, lease.kind, lease.unfinished) == ("u", TaskKind.UNDO, False)
    assert lease.undo_output is not None
    assert lease.undo_output.json == "[1]"
    assert (unfinished.undo_output, unfinished.unfinished) == (None, True)


@pytest.mark.parametrize(
    "stray",
    [
        undo_task(1, handler="s"),
        task(1, handler="u"),
        task(1, kind=0),
    ],
    ids=["a step is no undo handler", "an undo handler is no step", "a kind that is not known"],
)
def test_a_handler_is_not_run_for_what_it_was_not_made_for(stray: pb.Task) -> None:
    session = opened()
    assert given(session, stray) == []
    assert only(session).release.items[0].task == ref(1)


# Progress.


def test_progress_goes_with_the_next_heartbeat_and_the_last_one_wins() -> None:
    session = opened()
    lease, _ = given(session, task(1), task(2))
    context = StepContext(lease)
    context.progress({"done": 1})
    context.progress({"done": 2})
    assert frames(session) == []
    session.tick(20)
    (item,) = only(session, 20).heartbeat.progress
    assert (item.task, item.progress.json) == (ref(1), '{"done":2}')
    session.tick(40)
    assert not only(session, 40).heartbeat.progress, "it was told"
    context.progress({"done": 3})
    session.tick(60)
    assert only(session, 60).heartbeat.progress[0].progress.json == '{"done":3}'


def test_progress_that_a_heartbeat_has_no_room_for_is_told_by_the_next() -> None:
    session = opened(max_bytes=9000)
    leases = given(session, *(task(run) for run in range(1, 5)))
    for lease in leases:
        StepContext(lease).progress("x" * 3000)
    told: list[str] = []
    for now in (20, 40):
        session.tick(now)
        frame = only(session, now)
        assert frame.ByteSize() <= 9000
        assert len(frame.heartbeat.tasks) == 4
        told += [item.task.run_id for item in frame.heartbeat.progress]
    assert sorted(told) == [lease.run_id for lease in leases]
