"""The side of a session that decides: DECIDE leases apart from steps, Advances and what they are answered with, events
and histories that fit into frames, and questions.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload as PayloadMessage
from fencepost_server.domain.errors import FencepostError, Internal, NoWorker, Overloaded, QueryFailed
from fencepost_server.domain.model import NULL, EventType, LeasedTask, Outcome, Payload, TaskKind
from fencepost_server.domain.ops import AdvanceAnswer, AdvanceOutcome, Decide, HistoryEvent
from fencepost_server.engine.operations import ALREADY_DONE, LEASE_LOST, OK, Answer, Report, ReportKind
from fencepost_server.session.decider import Decider
from fencepost_server.session.hello import Greeting
from fencepost_server.session.questions import MAX_QUESTIONS
from fencepost_server.session.session import Session
from tests.unit.session.test_session import CONFIG, FRAME, LIMIT, Desk, leased, taken, tasks_of
from tests.unit.session.test_steps_that_go_on import receive

AT = datetime(2026, 11, 29, 12, tzinfo=UTC)
WORKFLOWS = frozenset({("default", "w@1"), ("default", "w@1#nonce")})


def deciding(desk: Desk | None = None, *, capacity: int = 10, workflow_capacity: int = 10) -> tuple[Session, Decider]:
    """A session and its other side."""
    handlers = frozenset({("default", "s")})
    greeting = Greeting(
        "default", "w", "nonce", "sdk", FRAME, capacity, handlers, (), (), "", WORKFLOWS, workflow_capacity
    )
    session = Session(str(uuid.uuid4()), greeting, CONFIG, desk or Desk())
    assert session.decider is not None
    return session, session.decider


def decide_task(n: int, events: tuple[HistoryEvent, ...] = (), token: int = 1) -> LeasedTask:
    """A code run to be decided."""
    last = events[-1].seq if events else 1
    return LeasedTask(
        str(uuid.UUID(int=n)), 1, token, "default", "wf", b"\1" * 32, "w@1", "default", 3, "", 1, 60.0, None, NULL,
        None, "", 0, 1, TaskKind.DECIDE, decide=Decide(events, 0, last, 0, 0, "1"),
    )  # fmt: skip


def ended_step(seq: int, size: int = 2) -> HistoryEvent:
    detail = f'{{"op": {seq}, "node": "s", "attempts": 1}}'
    return HistoryEvent(seq, EventType.LOCAL_STEP_ENDED, AT, None, 9, None, Payload(f'"{"x" * size}"'), detail)


def ref_of(task: LeasedTask) -> tuple[str, int, int]:
    return task.run_id, task.task_id, task.token


def advance(session: Session, frame_id: int, *tasks: LeasedTask, outcome: Any = pb.ADVANCE_OUTCOME_CONTINUE) -> None:
    refs = [pb.TaskRef(run_id=t.run_id, task_id=1, fencing_token=t.token) for t in tasks]
    items = [pb.AdvanceItem(task=ref, advance_no=1, seen_seq=1, outcome=outcome) for ref in refs]
    receive(session, frame_id, advance=pb.Advance(items=items))


def accepted(*, kept: bool, events: tuple[HistoryEvent, ...] = (), seqs: tuple[int, ...] = ()) -> Answer:
    return Answer(Outcome.OK, advance=AdvanceAnswer(seqs, AT, events, 40, kept))


# Leases


def test_code_runs_and_steps_have_capacities_of_their_own() -> None:
    """I12: neither takes the other's room."""
    session, decider = deciding(capacity=2, workflow_capacity=3)
    session.settle((), [leased(1), decide_task(2), decide_task(3)])
    assert (session.room(), decider.room()) == (1, 1)
    decider.reserve(1)
    session.reserve(1)
    assert (session.room(), decider.room()) == (0, 0)
    decider.reserve(-1)
    session.adopt(ref_of(decide_task(4)))
    assert decider.room() == 0
    receive(session, 2, capacity=pb.Capacity(capacity=5, workflow_capacity=7))
    assert (session.room(), decider.room()) == (3, 4)


def test_a_workflow_capacity_out_of_range_changes_nothing() -> None:
    session, decider = deciding()
    for capacity in (-1, CONFIG.max_capacity + 1):
        receive(session, 2 if capacity < 0 else 3, capacity=pb.Capacity(capacity=1, workflow_capacity=capacity))
    assert [frame.ack.error.message.split()[0] for frame in taken(session)] == ["workflow_capacity"] * 2
    assert (session.room(), decider.room()) == (10, 10)


def test_the_two_sides_are_one_stream_by_two_names() -> None:
    session, decider = deciding()
    assert decider.session_id == session.session_id == session.key
    assert decider.key == f"{session.key}/decide"
    assert decider.handlers == WORKFLOWS
    assert decider.decides("w@1")
    assert not decider.decides("w@2")
    decider.settle((), [decide_task(1)])
    assert decider.knows(ref_of(decide_task(1)))
    assert session.knows(ref_of(decide_task(1)))
    decider.end(Internal("x"))
    assert session.error is not None
    assert (session.room(), decider.room()) == (0, 0)
    session.close()
    assert not decider.open


@pytest.mark.parametrize(
    ("answer", "stays"),
    [
        (accepted(kept=True), True),
        (accepted(kept=False), False),
        (ALREADY_DONE, True),
        (Answer(Outcome.REFUSED, "ADVANCE_OUT_OF_ORDER"), True),
        (LEASE_LOST, False),
        (OK, False),  # the code could not go on: the run is blocked
    ],
)
def test_the_lease_stays_if_the_answer_to_the_advance_says_so(answer: Answer, stays: bool) -> None:
    desk = Desk()
    session, decider = deciding(desk)
    task = decide_task(1)
    session.settle((), [task])
    advance(session, 2, task)
    [report] = desk.reports
    assert (report.kind, report.session) == (ReportKind.ADVANCE, session)
    assert report.advance is not None
    assert report.advance.outcome is AdvanceOutcome.CONTINUE
    session.settle([(report, answer)], ())
    assert session.knows(ref_of(task)) is stays
    assert decider.room() == (9 if stays else 10)


def test_a_run_that_is_given_back_and_comes_again_at_once_is_out_once() -> None:
    """Row 10 of the field's failures: the answer to a WAIT, and behind it the same run with a new token."""
    desk = Desk()
    session, decider = deciding(desk)
    session.settle((), [decide_task(1)])
    advance(session, 2, decide_task(1), outcome=pb.ADVANCE_OUTCOME_WAIT)
    session.settle([(desk.reports[0], accepted(kept=False))], [decide_task(1, token=2)])
    assert decider.room() == 9
    assert session.knows(ref_of(decide_task(1, token=2)))
    frames = [frame.WhichOneof("frame") for frame in taken(session)]
    assert frames.index("ack") < len(frames) - 1
    assert frames[-1] == "tasks"


def test_a_run_whose_advance_waits_for_its_commit_is_not_taken_back_by_a_heartbeat() -> None:
    """The worker has let it go with a WAIT, and rightly does not list it."""
    desk = Desk()
    session, _ = deciding(desk)
    session.settle((), [decide_task(1), decide_task(2)])
    taken(session)
    advance(session, 2, decide_task(1), outcome=pb.ADVANCE_OUTCOME_WAIT)
    receive(session, 3, heartbeat=pb.Heartbeat(last_tasks_number=1))
    lost = [report for report in desk.reports if report.kind is ReportKind.UNDELIVERED]
    assert [report.run_id for report in lost] == [decide_task(2).run_id]


def test_only_an_advance_that_continues_as_new_names_the_workflow() -> None:
    """Its definition is looked up for the next run; for others that would be in vain."""
    desk = Desk()
    session, _ = deciding(desk)
    session.settle((), [decide_task(1), decide_task(2)])
    advance(session, 2, decide_task(1))
    advance(session, 3, decide_task(2), outcome=pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW)
    assert [report.workflow_id for report in desk.reports] == ["", "wf"]


def test_hostile_advances_are_answered_each_by_itself() -> None:
    """One bad item of a frame changes nothing of the others; the lease stays with the worker."""
    desk = Desk()
    session, _ = deciding(desk)
    good, bad = decide_task(1), decide_task(2)
    session.settle((), [good, bad])
    taken(session)
    items = [
        pb.AdvanceItem(
            task=pb.TaskRef(run_id=t.run_id, task_id=1, fencing_token=1),
            advance_no=n,
            outcome=pb.ADVANCE_OUTCOME_CONTINUE,
        )
        for t, n in ((good, 1), (bad, -1))
    ]
    receive(session, 2, advance=pb.Advance(items=items))
    [frame] = taken(session)
    [result] = frame.ack.results
    assert (result.index, result.outcome) == (1, pb.ITEM_OUTCOME_REFUSED)
    assert [violation.path for violation in result.violations] == ["advance_no"]
    assert [report.run_id for report in desk.reports] == [good.run_id]
    assert session.knows(ref_of(bad))
    too_many = [items[0]] * (CONFIG.max_frame_items + 1)
    receive(session, 3, advance=pb.Advance(items=too_many))
    [refused] = taken(session)
    assert refused.ack.HasField("error")


# Histories


def test_a_task_to_decide_says_where_the_run_is() -> None:
    session, _ = deciding()
    task = decide_task(1, (HistoryEvent(1, EventType.RUN_STARTED, AT, None, None, None, Payload("7"), None),))
    task.decide = Decide(task.decide.events, 0, 12, 3, 9, "1")
    session.settle((), [task])
    [told] = tasks_of(taken(session))
    assert (told.kind, told.task.task_id, told.handler) == (pb.TASK_KIND_DECIDE, 1, "w@1")
    decide = told.decide
    assert (decide.after_seq, decide.last_seq, decide.advance_no, decide.seen_seq) == (0, 12, 3, 9)
    assert decide.compatibility_id == "1"
    [started] = decide.events
    assert (started.run_started.workflow_id, started.run_started.input.json) == ("wf", "7")
    assert started.run_started.definition_hash == "01" * 32


@pytest.mark.parametrize("size", [2, 1000, 30_000])
def test_a_history_that_does_not_fit_is_cut_at_its_end_and_the_task_goes_out(size: int) -> None:
    """However long it is: the worker reads the rest."""
    session, _ = deciding(workflow_capacity=20)
    events = tuple(ended_step(seq, size) for seq in range(2, 2 + 400_000 // (size + 40)))
    tasks = [decide_task(n, events if n % 2 else events[:3]) for n in range(1, 7)]
    assert session.settle((), tasks) == []
    told = tasks_of(taken(session))
    assert len(told) == 6
    for n, task in enumerate(told, 1):
        seqs = [event.seq for event in task.decide.events]
        assert seqs == list(range(2, 2 + len(seqs)))
        whole = events if n % 2 else events[:3]
        assert task.decide.last_seq == whole[-1].seq
        if n % 2:
            assert task.ByteSize() > FRAME // 5
            assert len(seqs) < len(whole)


def test_one_event_that_fits_into_no_frame_is_left_to_be_read() -> None:
    session, _ = deciding()
    assert session.settle((), [decide_task(1, (ended_step(2), ended_step(3, 2 * FRAME)))]) == []
    [told] = tasks_of(taken(session))
    assert [event.seq for event in told.decide.events] == [2]
    assert told.decide.last_seq == 3


def test_new_events_are_pushed_to_the_session_that_holds_the_run() -> None:
    session, decider = deciding()
    task = decide_task(1)
    session.settle((), [task])
    taken(session)
    decider.push_events(ref_of(task), 4, [ended_step(5), ended_step(6)])
    [frame] = taken(session)
    [told] = frame.events.runs
    assert (told.task.run_id, told.task.fencing_token, told.after_seq, told.last_seq) == (task.run_id, 1, 4, 6)
    assert [event.seq for event in told.events] == [5, 6]
    session.push_events((task.run_id, 1, 2), 4, [ended_step(5)])
    session.push_events(ref_of(decide_task(2)), 4, [ended_step(5)])
    assert taken(session) == []


def test_pushed_events_are_as_many_as_fit_and_name_the_last() -> None:
    session, _ = deciding()
    task = decide_task(1)
    session.settle((), [task])
    taken(session)
    session.push_events(ref_of(task), 4, [ended_step(seq, LIMIT // 4) for seq in range(5, 25)])
    [frame] = taken(session)
    [told] = frame.events.runs
    assert 1 <= len(told.events) < 20
    assert told.last_seq == 24


def test_events_come_behind_the_task_that_they_are_of() -> None:
    """Else the worker is told of a run that it does not know."""
    session, _ = deciding()
    task = decide_task(1)
    session.settle((), [task])
    session.push_events(ref_of(task), 1, [ended_step(2)])
    assert [frame.WhichOneof("frame") for frame in taken(session)] == ["tasks", "events"]


def test_events_of_a_task_that_nobody_reads_are_kept_up_to_a_limit() -> None:
    """I12: the worker hears of the others with its next heartbeat."""
    session, _ = deciding()
    task = decide_task(1)
    session.settle((), [task])
    for seq in range(2, 2 + 2 * CONFIG.outbox_bytes // LIMIT):
        session.push_events(ref_of(task), seq - 1, [ended_step(seq, LIMIT)])
    assert session.error is None
    tasks, *events = taken(session)
    assert tasks.WhichOneof("frame") == "tasks"
    assert sum(frame.ByteSize() for frame in events) < CONFIG.outbox_bytes + FRAME
    session.push_events(ref_of(task), 1, [ended_step(2)])
    assert len(taken(session)) == 1


def test_the_answer_to_an_advance_brings_what_came_before_it_as_far_as_it_fits() -> None:
    desk = Desk()
    session, _ = deciding(desk)
    tasks = [decide_task(n) for n in range(1, 6)]
    session.settle((), tasks)
    taken(session)
    advance(session, 2, *tasks)
    events = tuple(ended_step(seq, LIMIT // 4) for seq in range(5, 25))
    answers = [(report, accepted(kept=True, events=events, seqs=(25, 26))) for report in desk.reports]
    session.settle(answers, ())
    results = [result for frame in taken(session) for result in frame.ack.results]
    assert sorted(result.index for result in results) == list(range(5))
    for result in results:
        told = result.advance
        assert (list(told.seqs), told.last_seq, told.kept, told.end_refused) == ([25, 26], 40, True, False)
        assert told.event_time.ToDatetime(tzinfo=UTC) == AT
        assert 1 <= len(told.events) < 20


# Questions


def ask(session: Session, n: int = 1, size: int = 1) -> tuple[str, list[Payload | FencepostError]]:
    query_id, answers = str(uuid.UUID(int=n)), list[Payload | FencepostError]()
    message = pb.Query(query_id=query_id, run_id=query_id, name="q", input=PayloadMessage(json="1" * size))
    session.ask(message, answers.append)
    return query_id, answers


def test_a_question_is_answered_once() -> None:
    session, _ = deciding()
    query_id, answers = ask(session)
    [frame] = taken(session)
    assert frame.query.query_id == query_id
    item = pb.QueryResultItem(query_id=query_id, output=PayloadMessage(json='"yes"'))
    receive(session, 2, query_result=pb.QueryResult(items=[item, item]))
    assert answers == [Payload('"yes"')]
    [frame] = taken(session)
    assert [result.outcome for result in frame.ack.results] == [pb.ITEM_OUTCOME_OK] * 2


def test_an_answer_that_is_none_says_why() -> None:
    session, _ = deciding()
    failed, bad = ask(session, 1), ask(session, 2)
    taken(session)
    items = [
        pb.QueryResultItem(query_id=failed[0], failure=run_pb2.Failure(code="UNKNOWN_QUERY", message="no query 'q'")),
        pb.QueryResultItem(query_id=bad[0], output=PayloadMessage(json="{")),
    ]
    receive(session, 2, query_result=pb.QueryResult(items=items))
    [first], [second] = failed[1], bad[1]
    assert isinstance(first, QueryFailed)
    assert first.message == "UNKNOWN_QUERY: no query 'q'"
    assert isinstance(second, QueryFailed)
    [frame] = taken(session)
    assert [result.outcome for result in frame.ack.results] == [pb.ITEM_OUTCOME_OK, pb.ITEM_OUTCOME_REFUSED]


def test_whoever_waits_for_an_answer_is_told_when_the_worker_goes() -> None:
    session, _ = deciding()
    query_id, answers = ask(session)
    _, others = ask(session, 2)
    session.forget_question(query_id)
    session.close()
    assert answers == []
    assert [type(answer) for answer in others] == [NoWorker]


def test_questions_that_nobody_answers_have_a_limit() -> None:
    """I12: by number, and by bytes."""
    session, _ = deciding()
    for n in range(MAX_QUESTIONS):
        ask(session, n + 1)
    with pytest.raises(Overloaded):
        ask(session, MAX_QUESTIONS + 1)
    session, _ = deciding()
    fit = CONFIG.outbox_bytes // 2 // (LIMIT + 200)
    for n in range(fit):
        ask(session, n + 1, LIMIT)
    with pytest.raises(Overloaded):
        ask(session, fit + 1, LIMIT)
    assert session.error is None
    assert len(taken(session)) == fit
    item = pb.QueryResultItem(query_id=str(uuid.UUID(int=1)))
    receive(session, 2, query_result=pb.QueryResult(items=[item]))
    ask(session, fit + 1, LIMIT)  # in the room of the one that was answered


def test_questions_that_nobody_waits_for_any_more_have_a_limit_as_long_as_they_are_not_written() -> None:
    """I12: a worker that reads slowly, and callers that give up and ask again."""
    session, _ = deciding()
    with pytest.raises(Overloaded):  # noqa: PT012  # which of them is refused does not matter
        for n in range(2 * CONFIG.outbox_bytes // LIMIT):
            query_id, _ = ask(session, n + 1, LIMIT)
            session.forget_question(query_id)
    assert sum(frame.ByteSize() for frame in taken(session)) < CONFIG.outbox_bytes + FRAME
    ask(session, 1, LIMIT)


def test_a_stranger_without_code_workflows_has_no_such_side() -> None:
    greeting = Greeting("default", "w", "nonce", "sdk", FRAME, 1, frozenset({("default", "s")}), (), ())
    session = Session(str(uuid.uuid4()), greeting, CONFIG, Desk())
    assert session.decider is None


def test_reports_of_steps_are_as_they_were() -> None:
    """A step and the decider of a run are told apart by the number of the task."""
    session, decider = deciding()
    session.settle((), [leased(1), decide_task(1)])
    report = Report(ReportKind.COMPLETE, leased(1).run_id, 2, 1, "default", frame_id=2)
    session.settle([(report, OK)], ())
    assert (session.room(), decider.room()) == (10, 9)
