"""The session without I/O: which frames it says, and what it makes of the server's."""

from __future__ import annotations

import pytest

from fencepost import CancelReason, FailureKind
from fencepost.checkpoints import Saving
from fencepost.codec import Value
from fencepost.failure import Completed, Failed
from fencepost.v1 import worker_service_pb2 as pb
from tests.unit.sdk.building import (
    ALREADY_DONE,
    DONE,
    LEASE_LOST,
    OK,
    ack,
    frames,
    given,
    kept,
    lost,
    only,
    opened,
    plain,
    ref,
    refusal,
    session_of,
    task,
    tasks,
    welcome,
)


def test_hello_tells_who_the_worker_is_and_comes_first() -> None:
    session = session_of(capacity=7)
    assert session.next_frame(0) is None, "there is no stream"
    session.begin(0)
    hello = only(session)
    assert hello.frame_id == 1
    assert hello.hello.protocol_version == 1
    assert hello.hello.capacity == 7
    assert [(handler.name, handler.queue) for handler in hello.hello.handlers] == [("s", "default"), ("u", "default")]
    assert hello.hello.process_nonce == "0123456789abcdef"
    assert dict(hello.hello.labels) == {"zone": "a"}
    assert not hello.hello.held
    assert not hello.hello.previous_session_ids
    assert session.next_frame(0) is None, "nothing is said before Welcome"


def test_frames_are_numbered_one_by_one() -> None:
    session = opened()
    leases = given(session, task(1), task(2))
    session.receive(pb.SessionResponse(ping=pb.Ping(number=4)), 0)
    for lease in leases:
        session.finish(lease, DONE)
    said = frames(session)
    assert [frame.frame_id for frame in said] == [2, 3]
    assert [frame.WhichOneof("frame") for frame in said] == ["pong", "complete"]
    assert said[0].pong.number == 4


def test_an_output_is_sent_until_an_ack_has_answered_it() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    assert lease.input.json == '{"x":1}'
    session.finish(lease, DONE)
    frame = only(session)
    assert frame.complete.items[0].task == ref(1)
    assert frame.complete.items[0].output.json == "1"
    assert session.held_count == 1
    session.receive(ack(frame.frame_id, {0: OK}), 0)
    assert session.held_count == 0
    assert session.counters.completed == 1


def test_what_has_gathered_goes_out_in_one_frame_for_each_kind() -> None:
    session = opened()
    leases = given(session, *(task(run) for run in range(1, 7)))
    for lease in leases[:3]:
        session.finish(lease, DONE)
    session.finish(leases[3], Failed(FailureKind.CORRECTIVE, "C", "m", feedback=Value(json="[1]")))
    session.finish(leases[4], Failed(FailureKind.OPERATIONAL, "C", "m", retry_after=1.5))
    session.release(leases[5])
    by_kind = {frame.WhichOneof("frame"): frame for frame in frames(session)}
    assert len(by_kind["complete"].complete.items) == 3
    corrective, operational = by_kind["fail"].fail.items
    assert corrective.failure.kind == 2
    assert corrective.failure.feedback.json == "[1]"
    assert not corrective.HasField("retry_after")
    assert operational.retry_after.ToNanoseconds() == 1_500_000_000
    assert [item.task for item in by_kind["release"].release.items] == [ref(6)]


def test_frames_keep_to_the_servers_limits() -> None:
    session = opened(max_items=3, max_bytes=8192)
    leases = given(session, *(task(run) for run in range(1, 9)))
    for lease in leases[:4]:
        session.finish(lease, DONE)
    assert [len(frame.complete.items) for frame in frames(session)] == [3, 1]
    for lease in leases[4:]:
        session.finish(lease, Completed(Value(json='"' + "x" * 5000 + '"'), 5002))
    said = frames(session)
    assert [len(frame.complete.items) for frame in said] == [1, 1, 1, 1]
    assert all(frame.ByteSize() <= 8192 for frame in said)


def test_no_kind_of_outcome_starves_another() -> None:
    session = opened(max_items=1)
    leases = given(session, *(task(run) for run in range(1, 7)))
    for lease in leases[:3]:
        session.finish(lease, Failed(FailureKind.PERMANENT, "C", "m"))
    for lease in leases[3:]:
        session.finish(lease, DONE)
    assert sorted(frame.WhichOneof("frame") or "" for frame in frames(session)[:2]) == ["complete", "fail"]


def test_an_ack_may_come_in_parts_and_answers_each_item_once() -> None:
    session = opened()
    leases = given(session, task(1), task(2))
    for lease in leases:
        session.finish(lease, DONE)
    frame = only(session)
    session.receive(ack(frame.frame_id, {1: OK}), 0)
    session.receive(ack(frame.frame_id, {1: LEASE_LOST}), 0)
    assert list(session.ledger.held.values()) == [leases[0]]
    session.receive(ack(frame.frame_id, {0: ALREADY_DONE, 7: OK}), 0)
    assert session.held_count == 0
    assert (session.counters.completed, session.counters.lost) == (2, 0)


# Reconnects.


def test_after_a_break_hello_names_what_is_held_and_the_sessions_before() -> None:
    session = opened()
    queued, finished, sent, acked = given(session, task(1), task(2), task(3), task(4))
    session.finish(acked, DONE)
    session.receive(ack(only(session).frame_id, {0: OK}), 0)
    session.finish(sent, DONE)
    only(session)
    session.end()
    session.finish(finished, DONE)
    session.begin(100)
    hello = only(session, 100).hello
    assert sorted(held.run_id for held in hello.held) == sorted([queued.run_id, finished.run_id, sent.run_id])
    assert list(hello.previous_session_ids) == ["a"]
    session.receive(welcome([kept(1), kept(2), kept(3)], session="b"), 100)
    complete = only(session, 100)
    assert sorted(item.task.run_id for item in complete.complete.items) == [finished.run_id, sent.run_id]
    assert complete.frame_id == 2
    assert queued.expires_at == 160
    session.end()
    session.begin(200)
    assert list(only(session, 200).hello.previous_session_ids) == ["b"]


def test_sessions_that_were_never_welcomed_do_not_hide_the_one_before() -> None:
    session = opened()
    given(session, task(1))
    unwelcomed: list[str] = []
    for _ in range(20):
        session.end()
        session.begin(0)
        hello = only(session).hello
        # Each may own leases that its lost Welcome was followed by; the protocol takes 16.
        assert list(hello.previous_session_ids) == [*unwelcomed[:15], "a"]
        unwelcomed.insert(0, hello.session_id)
    assert len(set(unwelcomed)) == 20


def test_a_lease_that_was_lost_over_a_break_stops_its_step() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.end()
    session.begin(0)
    frames(session)
    effects = session.receive(welcome([lost(1)]), 0)
    assert effects.cancel == [lease]
    assert lease.cancel_reason is CancelReason.LEASE_LOST
    assert (session.held_count, session.counters.zombies, session.counters.lost) == (0, 1, 1)
    session.finish(lease, DONE)
    assert frames(session) == [], "a late outcome is dropped"
    assert session.counters.zombies == 0


@pytest.mark.parametrize("answer", [OK, ALREADY_DONE, LEASE_LOST])
def test_an_outcome_whose_lease_was_lost_over_a_break_is_sent_and_its_ack_decides(
    answer: pb.ItemOutcome.ValueType,
) -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, DONE)
    only(session)
    session.end()
    session.begin(0)
    frames(session)
    assert not session.receive(welcome([lost(1)]), 0).cancel
    frame = only(session)
    assert frame.complete.items[0].task == ref(1)
    session.receive(ack(frame.frame_id, {0: answer}), 0)
    assert session.held_count == 0
    assert session.counters.completed == (0 if answer == LEASE_LOST else 1)


def test_acks_of_a_stream_before_answer_nothing() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, DONE)
    old = only(session)
    session.end()
    session.begin(0)
    frames(session)
    session.receive(welcome([kept(1)]), 0)
    session.receive(ack(old.frame_id, {0: OK}), 0)
    assert session.held_count == 1, "the frame has that number on another stream"


def test_the_first_frame_must_be_welcome() -> None:
    session = session_of()
    session.begin(0)
    frames(session)
    assert "not welcome" in session.receive(tasks(task(1)), 0).rebuild


# Leases and heartbeats.


def test_a_lease_counts_from_the_send_of_the_frame_that_tasks_names() -> None:
    session = opened(now=10)
    session.receive(pb.SessionResponse(ping=pb.Ping(number=1)), 20)
    only(session, 20)
    (first,) = given(session, task(1), now=100, last_frame_id=1)
    (second,) = given(session, task(2), now=100, last_frame_id=2)
    (third,) = given(session, task(3), now=100, last_frame_id=1)
    assert (first.expires_at, second.expires_at) == (70, 80)
    assert third.expires_at == 80, "the server goes only forward"


def test_an_attempt_timeout_counts_from_the_arrival() -> None:
    session = opened(now=0)
    (lease,) = given(session, task(1, timeout=2), now=100)
    assert lease.deadline == 102


def test_one_heartbeat_names_all_leases_before_a_third_of_the_shortest_is_over() -> None:
    session = opened()
    given(session, task(1, lease=60), task(2, lease=9), now=0, number=5)
    assert session.next_due() == 3
    assert not frames(session, 2)
    session.tick(3)
    frame = only(session, 3)
    assert [held.run_id for held in frame.heartbeat.tasks] == [ref(1).run_id, ref(2).run_id]
    assert frame.heartbeat.last_tasks_number == 5
    assert not frame.heartbeat.more
    assert session.next_due() == 6


def test_the_servers_interval_is_kept_if_it_is_shorter() -> None:
    session = opened()
    given(session, task(1, lease=600))
    session.receive(pb.SessionResponse(ping=pb.Ping(number=1)), 19)
    assert session.next_due() == 20


def test_a_heartbeat_of_many_leases_comes_in_several_frames() -> None:
    session = opened(max_items=2)
    given(session, *(task(run) for run in range(1, 6)))
    session.tick(20)
    said = frames(session, 20)
    assert [len(frame.heartbeat.tasks) for frame in said] == [2, 2, 1]
    assert [frame.heartbeat.more for frame in said] == [True, True, False]


def test_without_leases_there_is_no_heartbeat() -> None:
    session = opened()
    session.tick(14)
    assert frames(session, 14) == []


def test_a_renewed_lease_counts_from_the_send_of_the_heartbeat() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.tick(20)
    frame = only(session, 20)
    session.receive(ack(frame.frame_id, {0: OK}, lease=30), 29)
    assert lease.expires_at == 50


def test_a_heartbeat_that_finds_a_lease_gone_stops_its_step() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.tick(20)
    effects = session.receive(ack(only(session, 20).frame_id, {0: LEASE_LOST}), 20)
    assert effects.cancel == [lease]
    assert session.held_count == 0


@pytest.mark.parametrize("sent", [True, False])
def test_a_heartbeat_does_not_decide_about_an_outcome(sent: bool) -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.tick(20)
    heartbeat = only(session, 20)
    session.finish(lease, DONE)
    said = frames(session) if sent else []
    assert not session.receive(ack(heartbeat.frame_id, {0: LEASE_LOST}), 20).cancel
    complete = (said or frames(session))[0]
    session.receive(ack(complete.frame_id, {0: OK}), 20)
    assert session.counters.completed == 1


def test_a_heartbeat_that_was_refused_is_sent_again_soon() -> None:
    session = opened()
    given(session, task(1))
    session.tick(20)
    session.receive(refusal(only(session, 20).frame_id, "DATABASE_UNAVAILABLE"), 21)
    assert session.next_due() == 22


def test_heartbeats_that_nobody_answers_do_not_pile_up() -> None:
    session = opened()
    given(session, task(1))
    now = 0.0
    for _ in range(500):
        now += 20
        session.receive(pb.SessionResponse(ping=pb.Ping(number=1)), now)
        session.tick(now)
        frames(session, now)
    assert len(session._flights) <= 64


def test_a_revoked_lease_stops_its_step() -> None:
    session = opened()
    running, waiting, other = given(session, task(1), task(2), task(3, token=4))
    session.finish(waiting, DONE)
    revoke = pb.SessionResponse(revoke=pb.Revoke(tasks=[ref(1), ref(2), ref(3, token=3)]))
    assert session.receive(revoke, 0).cancel == [running]
    assert frames(session) == [], "its outcome would not count"
    assert list(session.ledger.held.values()) == [other]


def test_an_outcome_on_its_way_is_answered_even_if_its_lease_is_revoked() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, DONE)
    frame = only(session)
    session.receive(pb.SessionResponse(revoke=pb.Revoke(tasks=[ref(1)])), 0)
    session.receive(ack(frame.frame_id, {0: ALREADY_DONE}), 0)
    assert session.counters.completed == 1


def test_a_task_that_comes_again_is_taken_once() -> None:
    session = opened()
    (lease,) = given(session, task(1, token=5))
    assert given(session, task(1, token=5), task(1, token=4)) == []
    effects = session.receive(tasks(task(1, token=6)), 0)
    assert effects.cancel == [lease]
    assert [new.token for new in effects.start] == [6]
    session.finish(lease, DONE)
    assert frames(session) == [], "the stale lease's outcome is dropped"


def test_a_newer_token_forgets_an_outcome_of_the_older() -> None:
    session = opened()
    (lease,) = given(session, task(1, token=5))
    session.finish(lease, DONE)
    (newer,) = given(session, task(1, token=6))
    assert frames(session) == []
    session.finish(newer, DONE)
    assert only(session).complete.items[0].task.fencing_token == 6


def test_a_handler_that_was_not_offered_is_given_back() -> None:
    session = opened()
    assert given(session, task(1, handler="other")) == []
    assert only(session).release.items[0].task == ref(1)


@pytest.mark.parametrize("told", ["completed", "failed", "checkpoint"])
def test_metadata_counts_among_the_bytes_of_a_frame(told: str) -> None:
    """A frame that is larger than the server takes ends the stream, and would be sent again over each next one."""
    session, limit = opened(max_bytes=16_384), 16_384
    state = Value(json="1", metadata={"k": "x" * 4_000})
    for lease in given(session, *(task(run) for run in range(1, 10))):
        if told == "completed":
            session.finish(lease, plain.completed(state, 1 << 20))
        elif told == "failed":
            session.finish(lease, Failed(FailureKind.CORRECTIVE, "C", "m", state))
        else:
            session.save(lease, Saving(1, state))
    said = frames(session)
    assert max(frame.ByteSize() for frame in said) <= limit
    assert len(said) >= 3
