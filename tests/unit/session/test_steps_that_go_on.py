"""What workers and server tell each other of steps that go on: checkpoints, progress, and that they should stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fencepost.v1 import error_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload as PayloadMessage
from fencepost_server.config import Config
from fencepost_server.domain.errors import DatabaseUnavailable, Internal, SessionTimedOut
from fencepost_server.domain.model import Checkpoint, LeasedTask, Outcome, Payload, TaskKind
from fencepost_server.engine.operations import ALREADY_DONE, LEASE_LOST, OK, Answer, Report, ReportKind
from fencepost_server.session.frames import fill_task, size_of
from fencepost_server.session.session import Session
from fencepost_server.store.tasks import Lease
from fencepost_server.wire.payloads import payload_of_text
from tests.unit.session.test_session import CONFIG, FRAME, LIMIT, Desk, complete, leased, new_session, taken, tasks_of


def ref_of(task: LeasedTask) -> pb.TaskRef:
    return pb.TaskRef(run_id=task.run_id, task_id=task.task_id, fencing_token=task.token)


def key_of(task: LeasedTask) -> tuple[str, int, int]:
    return task.run_id, task.task_id, task.token


def item(task: LeasedTask, number: int = 1, json: str = "null") -> pb.CheckpointItem:
    return pb.CheckpointItem(task=ref_of(task), number=number, state=PayloadMessage(json=json))


def receive(session: Session, frame_id: int, **content: Any) -> None:
    frame = pb.SessionRequest(frame_id=frame_id, **content)
    session.receive(frame, frame.ByteSize())


def holding(*tasks: LeasedTask, desk: Desk | None = None, config: Config = CONFIG) -> Session:
    session = new_session(max(len(tasks), 10), desk, config)
    assert session.settle((), tasks) == []
    taken(session)
    return session


def results_of(session: Session) -> list[pb.ItemResult]:
    return [result for frame in taken(session) for result in frame.ack.results]


# Checkpoints


@pytest.mark.parametrize("answer", [OK, ALREADY_DONE, Answer(Outcome.REFUSED, "INTERNAL")])
def test_a_checkpoint_that_is_answered_ends_no_lease(answer: Answer) -> None:
    desk, task = Desk(), leased(1)
    session = holding(task, desk=desk)
    receive(session, 2, checkpoint=pb.Checkpoint(items=[item(task, 7, '"here"')]))
    [report] = desk.reports
    assert (report.kind, report.checkpoint) == (ReportKind.CHECKPOINT, Checkpoint(7, Payload(json='"here"')))
    assert (report.run_id, report.task_id, report.token) == key_of(task)
    room = session.room()
    session.settle([(report, answer)], ())
    assert [result.outcome for result in results_of(session)] == [int(answer.outcome)]
    assert session.knows(key_of(task))
    assert session.room() == room


def test_a_checkpoint_whose_lease_is_lost_makes_room() -> None:
    desk, task = Desk(), leased(1)
    session = holding(task, desk=desk)
    receive(session, 2, checkpoint=pb.Checkpoint(items=[item(task)]))
    session.settle([(desk.reports[0], LEASE_LOST)], ())
    assert not session.knows(key_of(task))
    assert session.room() == 10


def test_a_checkpoint_that_is_no_good_is_refused_by_itself() -> None:
    desk, tasks = Desk(), [leased(n) for n in range(5)]
    session = holding(*tasks, desk=desk)
    items = [
        item(tasks[0], 0),
        item(tasks[1], 1, "{"),
        item(tasks[2], 1, '"' + "x" * LIMIT + '"'),
        pb.CheckpointItem(number=1),
        item(tasks[4], (1 << 63) - 1),
    ]
    receive(session, 2, checkpoint=pb.Checkpoint(items=items))
    refused = {result.index: error_pb2.ErrorReason.Name(result.reason) for result in results_of(session)}
    assert refused == {
        0: "ERROR_REASON_INVALID_FRAME",
        1: "ERROR_REASON_INVALID_JSON",
        2: "ERROR_REASON_PAYLOAD_TOO_LARGE",
        3: "ERROR_REASON_INVALID_FRAME",
    }
    assert [(report.run_id, report.index) for report in desk.reports] == [(tasks[4].run_id, 4)]


def test_a_checkpoint_on_its_way_does_not_hide_that_its_outcome_is_too_or_that_its_task_is_missed() -> None:
    desk, first, second = Desk(), leased(1), leased(2)
    session = holding(first, second, desk=desk)
    complete(session, 2, [first])
    receive(session, 3, checkpoint=pb.Checkpoint(items=[item(first), item(second)]))
    outcome, stale, saved = desk.reports
    session.give_up(stale, Internal("no"))
    desk.reports.clear()
    receive(session, 4, heartbeat=pb.Heartbeat(last_tasks_number=1))
    assert [report.run_id for report in desk.reports] == [second.run_id], "the other's outcome is still to come"
    session.settle([(outcome, OK), (saved, LEASE_LOST)], ())
    assert session.room() == 10


def test_checkpoints_that_can_not_be_committed_while_the_database_is_away_end_the_stream() -> None:
    """The worker comes back and sends them again; an answer would be a guess."""
    desk, task = Desk(), leased(1)
    session = holding(task, desk=desk)
    receive(session, 2, checkpoint=pb.Checkpoint(items=[item(task)]))
    session.give_up(desk.reports[0], DatabaseUnavailable("away"))
    assert isinstance(session.error, DatabaseUnavailable)
    assert results_of(session) == []


def fail_report(checkpoint: pb.CheckpointItem | None = None) -> Report:
    desk, task = Desk(), leased(1)
    session = holding(task, desk=desk)
    receive(session, 2, fail=pb.Fail(items=[pb.FailItem(task=ref_of(task), checkpoint=checkpoint)]))
    return desk.reports[0]


def test_the_last_checkpoint_in_a_failure_is_a_part_of_what_it_is_known_by() -> None:
    """I6: the same failure with another state is another outcome."""
    states = [None, item(leased(1), 3, "1"), item(leased(1), 4, "1"), item(leased(1), 3, "2")]
    reports = [fail_report(state) for state in states]
    assert [report.checkpoint for report in reports] == [
        None,
        Checkpoint(3, Payload(json="1")),
        Checkpoint(4, Payload(json="1")),
        Checkpoint(3, Payload(json="2")),
    ]
    assert len({report.digest for report in reports}) == 4
    assert [fail_report(state).digest for state in states] == [report.digest for report in reports]
    # Whose it is, the failure says: what the checkpoint has there is ignored.
    assert fail_report(pb.CheckpointItem(number=3, state=PayloadMessage(json="1"))).digest == reports[1].digest


def test_a_failure_whose_checkpoint_is_no_good_is_refused_and_its_lease_stays() -> None:
    desk, task = Desk(), leased(1)
    session = holding(task, desk=desk)
    receive(session, 2, fail=pb.Fail(items=[pb.FailItem(task=ref_of(task), checkpoint=item(task, 1, "{"))]))
    [result] = results_of(session)
    assert (result.outcome, result.reason) == (pb.ITEM_OUTCOME_REFUSED, error_pb2.ERROR_REASON_INVALID_JSON)
    assert [violation.path for violation in result.violations] == ["checkpoint.state.json"]
    assert desk.reports == []
    assert session.knows(key_of(task))


# Tasks


def task_message(task: LeasedTask) -> pb.Task:
    message = pb.Task()
    fill_task(message, task)
    return message


def test_a_task_says_what_was_saved_and_of_an_undo_what_it_undoes() -> None:
    task = leased(1)
    plain = task_message(task)
    assert plain.kind == pb.TASK_KIND_STEP
    assert not plain.HasField("checkpoint")
    assert not plain.HasField("undo_output")
    saved = task_message(replace(task, checkpoint=Checkpoint(4, Payload(json="[1]"))))
    assert (saved.checkpoint.number, saved.checkpoint.state.json) == (4, "[1]")
    undo = task_message(replace(task, kind=TaskKind.UNDO, undo_output=Payload(json='"done"')))
    assert (undo.kind, undo.undo_output.json, undo.unfinished) == (pb.TASK_KIND_UNDO, '"done"', False)
    assert undo.idempotency_key == f"{task.run_id}/{task.task_id}"
    unfinished = task_message(replace(task, kind=TaskKind.UNDO, unfinished=True))
    assert unfinished.unfinished
    assert not unfinished.HasField("undo_output")


def test_what_a_task_carries_counts_for_the_frame_that_it_fits_into() -> None:
    half = Payload(json="0" * (LIMIT // 2))
    tasks = [
        replace(leased(1), checkpoint=Checkpoint(1, half)),
        replace(leased(2), kind=TaskKind.UNDO, undo_output=half),
        replace(leased(3), input=half, undo_output=half),
    ]
    assert all(size_of(task) >= task_message(task).ByteSize() for task in tasks)
    session = new_session(10)
    assert session.settle((), tasks) == []
    frames = taken(session)
    assert len(frames) > 1
    assert [task.task.run_id for task in tasks_of(frames)] == [task.run_id for task in tasks]


# Cancels


def cancels(session: Session) -> list[pb.Cancel]:
    return [frame.cancel for frame in taken(session) if frame.HasField("cancel")]


def test_a_step_that_should_stop_is_told_why_and_how_long_it_has_and_its_lease_stays() -> None:
    task = leased(1)
    session = holding(task)
    session.cancel(key_of(task), "RUN_CANCELLED", 2.5)
    [cancel] = cancels(session)
    assert list(cancel.tasks) == [ref_of(task)]
    assert cancel.reason == error_pb2.ERROR_REASON_RUN_CANCELLED
    assert cancel.remaining.ToTimedelta().total_seconds() == 2.5
    assert session.knows(key_of(task))
    assert session.room() == 9


def test_a_cancel_of_what_is_not_on_the_stream_is_not_sent() -> None:
    task = leased(1)
    session = holding(task)
    session.cancel((task.run_id, task.task_id, task.token + 1), "RUN_CANCELLED", 1)
    session.cancel(key_of(leased(2)), "RUN_CANCELLED", 1)
    assert taken(session) == []
    session.close()
    session.cancel(key_of(task), "RUN_CANCELLED", 1)
    assert session.take() is None


def test_cancels_of_one_moment_travel_together_and_others_apart_all_before_tasks() -> None:
    tasks = [leased(n) for n in range(5)]
    session = holding(*tasks)
    session.settle((), [leased(9)])
    for task in tasks[:3]:
        session.cancel(key_of(task), "RUN_CANCELLED", 30)
    session.cancel(key_of(tasks[3]), "RUN_ENDED", 30)
    session.tick()
    session.cancel(key_of(tasks[4]), "RUN_ENDED", 30)
    frames = taken(session)
    assert [frame.WhichOneof("frame") for frame in frames] == ["cancel", "cancel", "ping", "cancel", "tasks"]
    assert [len(frame.cancel.tasks) for frame in frames] == [3, 1, 0, 1, 0]
    assert session.settled


def test_cancels_are_split_into_frames_that_the_worker_can_take() -> None:
    tasks = [replace(leased(n), task_id=1 << 40, token=(1 << 62) + n) for n in range(3000)]
    session = holding(*tasks)
    for task in tasks:
        session.cancel(key_of(task), "RUN_CANCELLED", 30)
    told = cancels(session)
    assert max(cancel.ByteSize() for cancel in told) < FRAME
    assert 1 < len(told) < 10
    assert [ref.run_id for cancel in told for ref in cancel.tasks] == [task.run_id for task in tasks]


def test_cancels_that_nobody_reads_end_the_session_at_the_outboxs_limit() -> None:
    """I12."""
    task = leased(1)
    config = Config(max_payload_bytes=LIMIT, max_frame_bytes=FRAME, outbox_bytes=1 << 20)
    session = holding(task, config=config)
    for _ in range(20_000):
        session.cancel(key_of(task), "RUN_CANCELLED", 1)
        if session.error is not None:
            break
    assert isinstance(session.error, SessionTimedOut)


# Heartbeats


def test_a_heartbeat_is_told_which_steps_should_stop() -> None:
    desk, tasks = Desk(), [leased(1), leased(2)]
    session = holding(*tasks, desk=desk)
    receive(session, 2, heartbeat=pb.Heartbeat(tasks=[ref_of(task) for task in tasks]))
    [renewal] = desk.renewals
    renewal.answered({key_of(tasks[0]): Lease(12.5, cancel_wanted=True), key_of(tasks[1]): Lease(60.0)})
    results = results_of(session)
    assert [(r.outcome, r.cancel_wanted) for r in results] == [
        (pb.ITEM_OUTCOME_OK, True),
        (pb.ITEM_OUTCOME_OK, False),
    ]
    assert [r.lease_duration.ToTimedelta().total_seconds() for r in results] == [12.5, 60.0]
    assert session.room() == 8


def told(task: LeasedTask, **payload: Any) -> pb.Progress:
    return pb.Progress(task=ref_of(task), progress=PayloadMessage(**payload))


def test_what_a_heartbeat_tells_of_steps_is_passed_on_the_last_of_each() -> None:
    desk, tasks = Desk(), [leased(1), leased(2), leased(3)]
    session = holding(*tasks, desk=desk)
    progress = [
        told(tasks[0], json="1"),
        told(tasks[1], binary=b"\0\xff", metadata={"codec": "x"}),
        told(tasks[0], json="2"),
        told(leased(4), json="3"),
    ]
    receive(session, 2, heartbeat=pb.Heartbeat(tasks=[ref_of(task) for task in tasks], progress=progress))
    [renewal] = desk.renewals
    assert {ref: payload_of_text(text) for ref, text in renewal.progress.items()} == {
        key_of(tasks[0]): Payload(json="2"),
        key_of(tasks[1]): Payload(binary=b"\0\xff", metadata='{"codec": "x"}'),
    }


@pytest.mark.parametrize("json", ['"' + "x" * 4096 + '"', "{", '"\\ud800"'])
def test_what_can_not_be_kept_of_progress_costs_no_lease(json: str) -> None:
    desk, task = Desk(), leased(1)
    session = holding(task, desk=desk)
    receive(session, 2, heartbeat=pb.Heartbeat(tasks=[ref_of(task)], progress=[told(task, json=json)]))
    [renewal] = desk.renewals
    assert renewal.progress == {}
    renewal.answered({key_of(task): Lease(60.0)})
    [result] = results_of(session)
    assert result.outcome == pb.ITEM_OUTCOME_OK
    assert "progress" in result.message


def test_a_heartbeat_that_tells_of_too_many_steps_is_refused_as_a_whole() -> None:
    """I12."""
    desk = Desk()
    session = holding(leased(1), desk=desk)
    many = [told(leased(n), json="1") for n in range(CONFIG.max_frame_items + 1)]
    receive(session, 2, heartbeat=pb.Heartbeat(tasks=[ref_of(leased(1))], progress=many))
    [frame] = taken(session)
    assert frame.ack.error.reason == error_pb2.ERROR_REASON_FRAME_TOO_LARGE
    assert desk.renewals == []


def test_a_frame_of_checkpoints_without_any_is_answered() -> None:
    session = new_session()
    receive(session, 2, checkpoint=pb.Checkpoint())
    [frame] = taken(session)
    assert frame.ack == pb.Ack(frame_id=2)
    receive(session, 3, checkpoint=pb.Checkpoint(items=[item(leased(n)) for n in range(51)]))
    [frame] = taken(session)
    assert frame.ack.error.reason == error_pb2.ERROR_REASON_FRAME_TOO_LARGE
