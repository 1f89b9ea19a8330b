"""The session without I/O, as far as code workflows go: DECIDE leases, Advances, news, answers."""

from __future__ import annotations

import pytest

from fencepost import WorkflowContext, workflow
from fencepost.advances import Answered, Asked, Behind, Given, Lost, News, Pushed, Refused, Repeated
from fencepost.failure import Failed, Released
from fencepost.identity import Identity
from fencepost.lease import DecideLease
from fencepost.ledger import Counters
from fencepost.models import FailureKind
from fencepost.session import Session
from fencepost.v1 import worker_service_pb2 as pb
from tests.unit.sdk.building import (
    ALREADY_DONE,
    LEASE_LOST,
    OK,
    REFUSED,
    RUN,
    ack,
    frames,
    only,
    opened,
    plain,
    refusal,
    tasks,
    welcome,
)


@workflow("flow", compatibility_id="7", queue="code")
async def flow(ctx: WorkflowContext) -> None: ...


def session_of(capacity: int = 5) -> Session:
    identity = Identity(
        namespace="default",
        worker_name="test",
        process_nonce="0123456789abcdef",
        sdk_version="0",
        steps={plain.name: plain},
        labels={},
        max_frame_bytes=3 << 20,
        workflows={("flow", "7"): flow},
    )
    return Session(identity, Counters(), capacity=10, workflow_capacity=capacity)


def ref(run: int = 1, token: int = 1) -> pb.TaskRef:
    return pb.TaskRef(run_id=f"{RUN}{run}", task_id=1, fencing_token=token)


def decide(run: int = 1, token: int = 1, compatibility_id: str = "7") -> pb.Task:
    made = pb.Task(task=ref(run, token), kind=pb.TASK_KIND_DECIDE, workflow_id="flow", attempt=1)
    made.lease_duration.seconds = 60
    made.decide.compatibility_id = compatibility_id
    made.decide.last_seq = 1
    made.decide.events.add(seq=1).run_started.workflow_id = "flow"
    return made


def given(session: Session, *made: pb.Task, number: int = 1) -> list[DecideLease]:
    news = session.receive(tasks(*made, number=number), 0).news
    leases = []
    for heard in news:
        assert isinstance(heard, Given), heard
        leases.append(heard.lease)
    return leases


def advance(session: Session, lease: DecideLease, number: int = 1, text: str = "") -> None:
    item = pb.AdvanceItem(advance_no=number, seen_seq=1, outcome=pb.ADVANCE_OUTCOME_WAIT)
    item.task.CopyFrom(pb.TaskRef(run_id=lease.run_id, task_id=lease.task_id, fencing_token=lease.token))
    item.output.json = text
    session.decided(lease, item)


def answer(frame_id: int, *, kept: bool, index: int = 0) -> pb.SessionResponse:
    frame = ack(frame_id, {index: OK})
    frame.ack.results[0].advance.kept = kept
    frame.ack.results[0].advance.last_seq = 1
    return frame


def news_of(session: Session, frame: pb.SessionResponse, now: float = 0.0) -> list[News]:
    return session.receive(frame, now).news


def test_hello_offers_the_workflows_and_their_own_capacity() -> None:
    session = session_of(capacity=5)
    session.begin(0)
    hello = only(session).hello
    assert [(each.workflow_id, each.compatibility_id, each.queue) for each in hello.workflows] == [
        ("flow", "7", "code")
    ]
    assert (hello.capacity, hello.workflow_capacity) == (10, 5)
    session.receive(welcome(), 0)
    session.workflow_capacity = 3
    capacity = only(session).capacity
    assert (capacity.capacity, capacity.workflow_capacity) == (10, 3)


def test_a_decide_task_is_news_and_counted_apart_from_steps() -> None:
    session = opened(session_of())
    (lease,) = given(session, decide())
    assert [event.seq for event in lease.events] == [1]
    assert (lease.last_seq, lease.advance_no, lease.seen_seq) == (1, 0, 0)
    assert (session.held_count, session.ledger.decide_count) == (1, 1)
    assert session.counters.started == 0, "no step was begun"


def test_a_decide_task_of_code_that_was_not_offered_is_given_back() -> None:
    session = opened(session_of())
    assert given(session, decide(compatibility_id="8")) == []
    assert only(session).release.items[0].task == ref()


def test_the_advances_of_many_runs_go_out_in_one_frame() -> None:
    session = opened(session_of())
    leases = given(session, *(decide(run) for run in range(1, 5)))
    for lease in leases:
        advance(session, lease)
    items = only(session).advance.items
    assert [item.task for item in items] == [ref(run) for run in range(1, 5)]


def test_a_frame_has_no_more_advances_than_fit() -> None:
    session = opened(session_of(), max_items=3, max_bytes=20_000)
    leases = given(session, *(decide(run) for run in range(1, 10)))
    for lease, size in zip(leases, (1, 1, 1, 1, 9_000, 9_000, 9_000, 90_000, 1), strict=True):
        advance(session, lease, text="x" * size)
    assert [len(frame.advance.items) for frame in frames(session)] == [3, 3, 1, 1, 1]


def test_an_advance_is_sent_until_it_was_answered() -> None:
    session = opened(session_of())
    (lease,) = given(session, decide())
    advance(session, lease)
    first = only(session)
    session.end()
    session.begin(1)
    hello = only(session, 1).hello
    assert list(hello.held) == [ref()]
    session.receive(welcome([pb.HeldResult(task=ref(), kept=True)]), 1)
    again = only(session, 1)
    assert again.advance == first.advance
    (heard,) = news_of(session, answer(again.frame_id, kept=True), 1)
    assert isinstance(heard, Answered)
    assert heard.lease is lease
    assert session.counters.advanced == 1
    assert frames(session, 1) == []
    assert session.held_count == 1


def test_a_lease_that_an_answer_does_not_keep_is_held_no_longer() -> None:
    session = opened(session_of())
    (lease,) = given(session, decide())
    advance(session, lease)
    (heard,) = news_of(session, answer(only(session).frame_id, kept=False))
    assert isinstance(heard, Answered)
    assert (session.held_count, session.ledger.decide_count) == (0, 0)
    advance(session, lease, 2)
    assert frames(session) == [], "what comes for it later is not said"


def test_what_becomes_of_an_advance_is_told_to_the_decider() -> None:
    session = opened(session_of())
    leases = given(session, *(decide(run) for run in range(1, 4)))
    for lease in leases:
        advance(session, lease)
    frame_id = only(session).frame_id
    (lost,) = news_of(session, ack(frame_id, {0: LEASE_LOST}))
    assert isinstance(lost, Lost)
    (repeated,) = news_of(session, ack(frame_id, {1: ALREADY_DONE}))
    assert isinstance(repeated, Repeated)
    (refused,) = news_of(session, ack(frame_id, {2: REFUSED}, reason="PAYLOAD_TOO_LARGE", message="so large"))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.message, refused.at_fault) == ("PAYLOAD_TOO_LARGE", "so large", True)
    assert session.held_count == 2, "the last two still have their leases, to be given back"
    session.decided(leases[1], Released())
    session.decided(leases[2], Failed(FailureKind.OPERATIONAL, "C", "m"))
    said = {frame.WhichOneof("frame"): frame for frame in frames(session)}
    assert said["release"].release.items[0].task == ref(2)
    assert said["fail"].fail.items[0].task == ref(3)


@pytest.mark.parametrize("whole", [False, True])
def test_what_the_server_could_not_do_just_then_is_sent_again(whole: bool) -> None:
    session = opened(session_of())
    (lease,) = given(session, decide())
    advance(session, lease)
    frame_id = only(session).frame_id
    no = "DATABASE_UNAVAILABLE"
    assert news_of(session, refusal(frame_id, no) if whole else ack(frame_id, {0: REFUSED}, reason=no)) == []
    assert frames(session) == []
    session.tick(session.next_due())
    assert only(session).advance.items[0].advance_no == 1


def test_a_heartbeat_that_finds_a_lease_gone_leaves_it_to_the_answer_of_its_advance() -> None:
    session = opened(session_of())
    idle, sent = given(session, decide(1), decide(2))
    advance(session, sent)
    advanced = only(session)
    session.tick(20.0)
    heartbeat = next(frame for frame in frames(session) if frame.WhichOneof("frame") == "heartbeat")
    (heard,) = news_of(session, ack(heartbeat.frame_id, {0: LEASE_LOST, 1: LEASE_LOST}))
    assert isinstance(heard, Lost)
    assert heard.lease is idle
    (heard,) = news_of(session, answer(advanced.frame_id, kept=False))
    assert isinstance(heard, Answered)


def test_a_heartbeats_answer_tells_how_far_a_run_is() -> None:
    session = opened(session_of())
    given(session, decide())
    session.tick(20.0)
    frame = ack(only(session).frame_id, {0: OK}, lease=60)
    frame.ack.results[0].last_seq = 9
    (heard,) = news_of(session, frame)
    assert isinstance(heard, Behind)
    assert heard.last_seq == 9


def test_events_and_queries_are_news() -> None:
    session = opened(session_of())
    (lease,) = given(session, decide())
    pushed = pb.SessionResponse()
    pushed.events.runs.add(task=ref(), after_seq=1, last_seq=2).events.add(seq=2)
    pushed.events.runs.add(task=ref(token=9), after_seq=1, last_seq=2)
    (heard,) = news_of(session, pushed)
    assert isinstance(heard, Pushed)
    assert heard.lease is lease
    (asked,) = news_of(session, pb.SessionResponse(query=pb.Query(query_id="q", run_id="r")))
    assert isinstance(asked, Asked)
    session.answer(pb.QueryResultItem(query_id=asked.query.query_id))
    assert only(session).query_result.items[0].query_id == "q"


def test_a_revoked_lease_is_gone_with_what_was_not_sent() -> None:
    session = opened(session_of())
    (lease,) = given(session, decide())
    advance(session, lease)
    (heard,) = news_of(session, pb.SessionResponse(revoke=pb.Revoke(tasks=[ref()])))
    assert isinstance(heard, Lost)
    assert frames(session) == []
    assert session.held_count == 0


def test_the_same_task_under_a_newer_token_takes_the_place_of_the_older() -> None:
    session = opened(session_of())
    (old,) = given(session, decide())
    advance(session, old)
    late = only(session)
    heard = news_of(session, tasks(decide(token=2), number=2))
    assert [type(each) for each in heard] == [Lost, Given]
    assert news_of(session, answer(late.frame_id, kept=True)) == [], "it is of a lease that is gone"
    assert session.ledger.decide_count == 1


def test_a_worker_that_must_end_gives_its_runs_back() -> None:
    session = opened(session_of())
    (lease,) = given(session, decide())
    advance(session, lease)
    effects = session.cut_off()
    assert not effects.cancel
    assert [type(each) for each in effects.news] == [Lost]
    assert [frame.WhichOneof("frame") for frame in frames(session)] == ["release"]
