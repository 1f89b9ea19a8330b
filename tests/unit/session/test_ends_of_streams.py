"""What an end of a stream, or of a worker's side of it, does to the tasks that were on their way."""

from __future__ import annotations

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from fencepost_server.config import Config
from fencepost_server.domain.errors import Internal, SessionTimedOut
from fencepost_server.engine.operations import LEASE_LOST, OK, Report, ReportKind
from tests.unit.session.test_session import CONFIG, LIMIT, Desk, complete, leased, new_session, taken, tasks_of
from tests.unit.session.test_steps_that_go_on import receive


def undelivered(desk: Desk) -> list[str]:
    assert all(report.kind is ReportKind.UNDELIVERED for report in desk.reports)
    return [report.run_id for report in desk.reports]


def test_tasks_that_were_not_written_when_the_stream_ended_go_back_and_those_that_were_do_not() -> None:
    """Row 48: they would run out a grace later and cost an attempt that no worker ever saw."""
    desk = Desk()
    session = new_session(10, desk)
    held = leased(1)
    session.adopt((held.run_id, held.task_id, held.token))
    session.settle((), [leased(2, LIMIT), leased(3, LIMIT), leased(4, LIMIT)])
    assert session.take() is not None
    session.close()
    assert undelivered(desk) == [leased(3).run_id, leased(4).run_id]
    session.close()
    assert len(desk.reports) == 2


def test_only_tasks_that_were_not_written_go_back_whatever_else_was_still_to_be_written() -> None:
    desk = Desk()
    session = new_session(10, desk)
    session.settle((), [leased(1, LIMIT), leased(2, LIMIT)])
    assert session.take() is not None
    goodbye = pb.SessionRequest(frame_id=2, goodbye=pb.Goodbye())
    session.receive(goodbye, goodbye.ByteSize())
    session.tick()
    session.close()
    assert undelivered(desk) == [leased(2).run_id]


@pytest.mark.parametrize("drained", [False, True], ids=["by-itself", "as-it-was-asked"])
def test_the_answer_to_goodbye_comes_behind_the_tasks_that_are_on_their_way(drained: bool) -> None:
    """A worker that holds nothing closes once it has read it, and what came later would run out on it."""
    session = new_session(10)
    session.settle((), [leased(1)])
    if drained:
        session.drain("the server is shutting down", 30.0)
    goodbye = pb.SessionRequest(frame_id=2, goodbye=pb.Goodbye())
    session.receive(goodbye, goodbye.ByteSize())
    told = [message.WhichOneof("frame") for message in taken(session)]
    assert told == ["tasks"] + ["drain"] * drained + ["ack"]


def test_a_stream_that_wrote_everything_or_had_nothing_to_write_gives_nothing_back() -> None:
    desk = Desk()
    new_session(10, desk).close()
    session = new_session(10, desk)
    session.settle((), [leased(1), leased(2)])
    taken(session)
    session.close()
    assert desk.reports == []


def test_a_worker_whose_side_has_ended_is_leased_nothing_more() -> None:
    """It could not report what it gets."""
    session = new_session(10)
    session.settle((), [leased(1)])
    session.leave()
    assert session.room() == 0
    assert session.eager_depth(leased(1).run_id, leased(1).task_id) is None
    assert session.settle((), [leased(2)]) == [leased(2)]
    assert [task.task.run_id for task in tasks_of(taken(session))] == [leased(1).run_id]


def test_a_session_is_read_no_further_while_many_bytes_of_it_wait_for_their_commit() -> None:
    """I12: whether or not it has the leases that it reports on."""
    desk = Desk()
    config = Config(max_payload_bytes=LIMIT, max_frame_bytes=CONFIG.max_frame_bytes, max_client_bytes=1 << 20)
    session = new_session(10, desk, config)
    frames = 0
    task = leased(1)
    ref = pb.TaskRef(run_id=task.run_id, task_id=task.task_id, fencing_token=task.token)
    item = pb.CompleteItem(task=ref, output=Payload(json=f'"{"x" * (LIMIT - 2)}"'))
    while not session.crowded:
        frames += 1
        assert frames <= (1 << 20) // LIMIT
        receive(session, 1 + frames, complete=pb.Complete(items=[item]))
    first, *others = desk.reports
    session.settle([(first, LEASE_LOST)], ())
    assert session.thinned.is_set()
    for report in others:
        session.give_up(report, Internal("told to"))
    assert len(taken(session)) == frames
    assert session.settled


def test_pongs_that_wait_behind_reports_that_wait_for_the_database_are_not_held_against_the_worker() -> None:
    """While a session is crowded its stream is not read: what it owes can't arrive."""
    desk = Desk()
    config = Config(max_payload_bytes=LIMIT, max_frame_bytes=CONFIG.max_frame_bytes, max_client_ops=1)
    session = new_session(10, desk, config)
    session.settle((), [leased(1)])
    complete(session, 2, [leased(1)])
    assert session.crowded
    for _ in range(10):
        session.tick()
    assert session.error is None
    assert len([frame for frame in taken(session) if frame.HasField("ping")]) == 10
    reported: list[Report] = desk.reports
    session.settle([(reported[0], OK)], ())
    for _ in range(3):
        session.tick()
    assert isinstance(session.error, SessionTimedOut)


@pytest.mark.parametrize("pongs", [3, 7])
def test_a_pong_that_comes_late_counts_once_the_stream_is_read_again(pongs: int) -> None:
    desk = Desk()
    config = Config(max_payload_bytes=LIMIT, max_frame_bytes=CONFIG.max_frame_bytes, max_client_ops=1)
    session = new_session(10, desk, config)
    session.settle((), [leased(1)])
    complete(session, 2, [leased(1)])
    for _ in range(pongs):
        session.tick()
    session.settle([(desk.reports[0], OK)], ())
    for number in range(1, pongs + 1):
        frame = pb.SessionRequest(frame_id=2 + number, pong=pb.Pong(number=number))
        session.receive(frame, frame.ByteSize())
    for _ in range(3):
        session.tick()
    assert session.error is None
