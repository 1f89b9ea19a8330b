"""The session without I/O: room, frames that fit, an outbox with a limit, for whatever comes in whatever order."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.config import Config
from fencepost_server.domain.errors import FencepostError, SessionTimedOut
from fencepost_server.domain.model import Failure, FailureKind, LeasedTask, Outcome, Payload
from fencepost_server.domain.violation import Violation
from fencepost_server.engine.leases import Renewal
from fencepost_server.engine.operations import LEASE_LOST, OK, Answer, Report, ReportKind
from fencepost_server.session.hello import Greeting
from fencepost_server.session.session import Session
from fencepost_server.store.tasks import Lease

LIMIT = 64 << 10
FRAME = LIMIT * 5 // 4
CONFIG = Config(max_payload_bytes=LIMIT, max_frame_bytes=FRAME, outbox_bytes=1 << 20, max_frame_items=50)


class Desk:
    """Keeps what the session asks of the engine."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.renewals: list[Renewal] = []
        self.woken = 0

    def report(self, reports: Sequence[Report]) -> None:
        self.reports += reports

    def renew(self, renewal: Renewal) -> None:
        self.renewals.append(renewal)

    def wake(self) -> None:
        self.woken += 1


def new_session(capacity: int = 10, desk: Desk | None = None, config: Config = CONFIG) -> Session:
    handlers = frozenset({("default", "s")})
    greeting = Greeting("default", "w", "nonce", "sdk", FRAME, capacity, handlers, (), ())
    return Session(str(uuid.uuid4()), greeting, config, desk or Desk())


def leased(n: int, size: int = 4, feedback: int = 0, frame_id: int = 1) -> LeasedTask:
    """A task whose input has ``size`` bytes."""
    run_id = str(uuid.UUID(int=n))
    failure = Failure(FailureKind.CORRECTIVE, "C", "", Payload(json="0" * feedback)) if feedback else None
    return LeasedTask(
        run_id, 2, 1, "default", "wf", b"\0" * 32, "s", "default", 3, "n", 1, 60.0, None,
        Payload(json="0" * size), failure, "", 0, frame_id,
    )  # fmt: skip


def taken(session: Session) -> list[pb.SessionResponse]:
    """What the writer would send now; no frame is larger than the worker takes."""
    frames = []
    while (data := session.take()) is not None:
        assert len(data) <= FRAME
        frames.append(pb.SessionResponse.FromString(data))
    return frames


def tasks_of(frames: Sequence[pb.SessionResponse]) -> list[pb.Task]:
    return [task for frame in frames for task in frame.tasks.tasks]


def complete(session: Session, frame_id: int, tasks: Sequence[LeasedTask]) -> None:
    """Receive a completion of tasks."""
    refs = [pb.TaskRef(run_id=t.run_id, task_id=t.task_id, fencing_token=t.token) for t in tasks]
    frame = pb.SessionRequest(
        frame_id=frame_id, complete=pb.Complete(items=[pb.CompleteItem(task=ref) for ref in refs])
    )
    session.receive(frame, frame.ByteSize())


@given(sizes=st.lists(st.integers(1, LIMIT), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_tasks_are_packed_into_frames_that_the_worker_can_take(sizes: list[int]) -> None:
    """I12, and row 57 of the field's failures."""
    session = new_session(100)
    assert session.settle((), [leased(n, size) for n, size in enumerate(sizes)]) == []
    frames = taken(session)
    assert [len(task.input.json) for task in tasks_of(frames)] == sizes
    assert [frame.tasks.tasks_number for frame in frames] == list(range(1, len(frames) + 1))


def test_a_task_that_fits_into_no_frame_is_given_back_and_the_stream_lives() -> None:
    """Else the frame would kill the stream, and again after each reconnect (row 57)."""
    session = new_session(100)
    giant = leased(2, LIMIT, feedback=LIMIT)
    unsent = session.settle((), [leased(1), giant, leased(3)])
    assert list(unsent) == [giant]
    assert [task.task.run_id for task in tasks_of(taken(session))] == [leased(1).run_id, leased(3).run_id]
    assert not session.knows((giant.run_id, giant.task_id, giant.token))
    assert session.error is None


def test_answers_with_many_violations_are_split_into_frames_that_the_worker_can_take() -> None:
    """Else one frame of bad outputs would kill the stream, and its repeat the next one."""
    desk = Desk()
    session = new_session(50, desk)
    tasks = [leased(n) for n in range(50)]
    session.settle((), tasks)
    taken(session)
    complete(session, 2, tasks)
    faults = tuple(Violation(f"/{'k' * 490}{n}", "m" * 500) for n in range(20))
    answer = Answer(Outcome.REFUSED, "OUTPUT_SCHEMA_MISMATCH", "no", faults)
    session.settle([(report, answer) for report in desk.reports], ())
    acks = [frame.ack for frame in taken(session)]
    assert len(acks) > 1
    assert all(ack.frame_id == 2 for ack in acks)
    assert sorted(result.index for ack in acks for result in ack.results) == list(range(50))
    assert session.error is None


def test_a_worker_with_much_room_and_large_inputs_gets_them_all() -> None:
    """More bytes of tasks than the outbox may hold are no sign of a slow reader; more are not asked for meanwhile."""
    desk = Desk()
    session = new_session(200, desk)
    tasks = [leased(n, LIMIT - 100) for n in range(40)]
    assert session.settle((), tasks) == []
    assert session.error is None
    assert session.room() == 0
    woken = desk.woken
    assert len(tasks_of(taken(session))) == 40
    assert session.room() == 160
    assert desk.woken > woken


def test_answers_that_nobody_reads_end_the_session_at_the_outboxs_limit() -> None:
    """I12: a slow reader is cut off."""
    session = new_session()
    session.settle((), [leased(1)])
    filler = "x" * 1000
    for n in range(2000):
        session.settle([(report_of(leased(1), n), Answer(Outcome.REFUSED, "INTERNAL", filler))], ())
        if session.error is not None:
            break
    assert isinstance(session.error, SessionTimedOut)
    assert n < 1100


def report_of(task: LeasedTask, frame_id: int) -> Report:
    report = Report(ReportKind.COMPLETE, task.run_id, task.task_id, task.token, "default")
    report.frame_id = frame_id
    return report


def test_a_session_that_has_to_end_takes_no_more_tasks() -> None:
    """What it took would be lost with it, and cost an attempt."""
    session = new_session()
    session.end(SessionTimedOut("the process has a newer session"))
    assert session.room() == 0
    task = leased(1)
    assert list(session.settle((), [task])) == [task]
    assert tasks_of(taken(session)) == []


def test_answers_go_before_tasks() -> None:
    desk = Desk()
    session = new_session(desk=desk)
    session.settle((), [leased(1), leased(4)])
    taken(session)
    complete(session, 2, [leased(1)])
    session.settle([(desk.reports[0], OK)], [leased(2), leased(3)])
    session.revoke((leased(4).run_id, 2, 1), "RUN_TERMINATED")
    session.tick()
    assert [frame.WhichOneof("frame") for frame in taken(session)] == ["ack", "revoke", "ping", "tasks"]


def test_whoever_has_let_a_lease_run_out_is_pinged_once_and_gets_nothing_until_it_answers() -> None:
    session = new_session(5)
    session.settle((), [leased(1), leased(2), leased(3)])
    taken(session)
    for number in (1, 2):
        session.revoke((leased(number).run_id, 2, 1), "LEASE_EXPIRED")
    assert [frame.WhichOneof("frame") for frame in taken(session)] == ["revoke", "ping", "revoke"]
    assert session.room() == 0
    session.receive(pb.SessionRequest(frame_id=2, pong=pb.Pong(number=1)), 10)
    assert session.room() == 4


def test_what_is_said_of_a_task_comes_behind_it() -> None:
    session = new_session()
    session.settle((), [leased(2), leased(3)])
    session.revoke((leased(2).run_id, 2, 1), "RUN_TERMINATED")
    session.cancel((leased(3).run_id, 2, 1), "RUN_CANCELLED", 5.0)
    assert [frame.WhichOneof("frame") for frame in taken(session)] == ["tasks", "revoke", "cancel"]


def test_a_stream_whose_pings_are_not_answered_gets_no_more_tasks_then_ends() -> None:
    """Row 2 of the field's failures."""
    session = new_session(5)
    frame = 1
    for number in (1, 2):
        session.tick()
        frame += 1
        session.receive(pb.SessionRequest(frame_id=frame, pong=pb.Pong(number=number)), 10)
    session.tick()
    assert session.room() == 5
    session.tick()
    assert session.room() == 0
    session.receive(pb.SessionRequest(frame_id=frame + 1, pong=pb.Pong(number=99)), 10)
    assert session.room() == 5
    for wait in (1.0, 1.0, 0.5):
        assert session.tick() == wait
        assert session.error is None
    session.tick()
    assert isinstance(session.error, SessionTimedOut)
    for forged in (-5, 1 << 62):
        session.receive(pb.SessionRequest(frame_id=frame + 2, pong=pb.Pong(number=forged)), 10)
        frame += 1


GOING_ON = ("checkpoint", "cancel", "renew")
ACTIONS = st.sampled_from(
    [
        "claim",
        "claim less",
        "complete",
        "eager",
        "fail",
        "revoke",
        "capacity",
        "lost",
        "forget",
        "pong",
        "tick",
        "goodbye",
        *GOING_ON,
    ]
)


def go_on(session: Session, desk: Desk, task: LeasedTask, action: str, receive: Any, *, lost: bool) -> bool:
    """What happens to a step that goes on. Returns whether it turned out that its lease was lost."""
    key = (task.run_id, task.task_id, task.token)
    ref = pb.TaskRef(run_id=task.run_id, task_id=task.task_id, fencing_token=task.token)
    if action == "checkpoint":
        receive(checkpoint=pb.Checkpoint(items=[pb.CheckpointItem(task=ref, number=1)]))
        session.settle([(desk.reports.pop(), LEASE_LOST if lost else OK)], ())
        return lost
    if action == "cancel":
        session.cancel(key, "RUN_CANCELLED", 1.0)
    else:
        receive(heartbeat=pb.Heartbeat(tasks=[ref]))
        desk.renewals.pop().answered({key: Lease(1.0, cancel_wanted=True)})
    return False


@given(actions=st.lists(st.tuples(ACTIONS, st.integers(0, 6)), max_size=60), capacity=st.integers(0, 6))
@settings(max_examples=150, deadline=None)
def test_a_session_never_has_more_tasks_out_than_its_capacity(actions: list[tuple[Any, int]], capacity: int) -> None:
    """Whatever happens in whatever order; lowering the capacity takes nothing back, and lets nothing new out."""
    desk = Desk()
    session = new_session(capacity, desk)
    out: dict[str, LeasedTask] = {}
    made, frame, ping = 0, 1, 0

    def receive(**content: Any) -> None:
        nonlocal frame
        frame += 1
        session.receive(pb.SessionRequest(frame_id=frame, **content), 10)

    def deliver(tasks: list[LeasedTask]) -> None:
        unsent = session.settle((), tasks)
        out.update({task.run_id: task for task in tasks if task not in unsent})

    for action, n in actions:
        before = len(out)
        room = session.room()
        assert room <= max(0, capacity - len(out))
        if action in ("claim", "claim less") and room > 0:
            session.reserve(room)
            assert session.room() <= 0
            session.reserve(-room)
            got = room if action == "claim" else min(n, room)
            deliver([leased(made + i) for i in range(got)])
            made += got
        elif action in ("complete", "eager", "fail") and out:
            task = next(iter(out.values()))
            complete(session, frame + 1, [task])
            frame += 1
            report = desk.reports.pop()
            depth = session.eager_depth(task.run_id, task.task_id)
            more = [leased(made)] if action == "eager" and depth is not None else []
            made += len(more)
            unsent = session.settle([(report, OK)], more)
            del out[task.run_id]
            out.update({t.run_id: t for t in more if t not in unsent})
        elif action == "revoke" and out:
            task = out.pop(next(iter(out)))
            session.revoke((task.run_id, task.task_id, task.token), "LEASE_EXPIRED")
        elif action == "capacity":
            capacity = n
            receive(capacity=pb.Capacity(capacity=n))
        elif action == "lost" and out:
            task = out.pop(next(iter(out)))
            ref = pb.TaskRef(run_id=task.run_id, task_id=task.task_id, fencing_token=task.token)
            receive(heartbeat=pb.Heartbeat(tasks=[ref]))
            desk.renewals.pop().answered({(task.run_id, task.task_id, task.token): None})
        elif action in GOING_ON and out:
            task = next(iter(out.values()))
            if go_on(session, desk, task, action, receive, lost=n == 0):
                del out[task.run_id]
        elif action == "forget":
            receive(heartbeat=pb.Heartbeat(last_tasks_number=1 << 40))
            assert len(desk.reports) == len(out)
            assert all(report.kind is ReportKind.UNDELIVERED for report in desk.reports)
            desk.reports.clear()
            out.clear()
        elif action == "pong":
            receive(pong=pb.Pong(number=ping))
        elif action == "tick" and ping < 2:
            ping += 1
            session.tick()
        elif action == "goodbye" and n == 0:
            receive(goodbye=pb.Goodbye())
            assert session.room() == 0
        assert len(out) <= max(capacity, before), action
        assert all(session.knows((task.run_id, task.task_id, task.token)) for task in out.values())
    taken(session)


def test_a_fault_of_one_frame_does_not_count_against_the_next() -> None:
    session = new_session()
    session.receive(None, 3)
    session.receive(pb.SessionRequest(frame_id=3), 2)
    session.receive(pb.SessionRequest(frame_id=4, capacity=pb.Capacity(capacity=1)), 4)
    acks = [frame.ack for frame in taken(session)]
    assert [(ack.frame_id, ack.HasField("error")) for ack in acks] == [(2, True), (3, True), (4, False)]
    with pytest.raises(FencepostError):
        session.receive(pb.SessionRequest(frame_id=4), 2)


def test_a_heartbeat_that_never_ends_keeps_nothing_but_what_is_out() -> None:
    """I12: a worker may send part after part, each with other leases that it never had."""
    desk = Desk()
    session = new_session(desk=desk)
    mine = leased(1)
    session.settle((), [mine])
    for part in range(2, 1002):
        refs = [pb.TaskRef(run_id=str(uuid.UUID(int=part * 50 + n)), task_id=2, fencing_token=1) for n in range(49)]
        refs.append(pb.TaskRef(run_id=mine.run_id, task_id=mine.task_id, fencing_token=mine.token))
        frame = pb.SessionRequest(frame_id=part, heartbeat=pb.Heartbeat(tasks=refs, last_tasks_number=1, more=True))
        session.receive(frame, frame.ByteSize())
    assert len(session._heard) == 1
    session.receive(pb.SessionRequest(frame_id=1002, heartbeat=pb.Heartbeat(last_tasks_number=1)), 10)
    assert not session._heard
    assert desk.reports == []
