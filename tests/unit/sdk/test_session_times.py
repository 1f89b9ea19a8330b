"""The session without I/O: times, refusals, and how it leaves."""

from __future__ import annotations

import pytest

from fencepost import CancelReason, FailureKind
from fencepost.codec import Value
from fencepost.failure import Failed, Released
from fencepost.v1 import worker_service_pb2 as pb
from tests.unit.sdk.building import (
    DONE,
    OK,
    REFUSED,
    ack,
    frames,
    given,
    only,
    opened,
    ref,
    refusal,
    session_of,
    task,
)


def test_an_attempt_whose_time_is_up_fails_and_is_cancelled() -> None:
    session = opened()
    (lease, _) = given(session, task(1, timeout=3), task(2, timeout=100))
    assert session.next_due() == 3
    effects = session.tick(3)
    assert effects.cancel == [lease]
    assert lease.cancel_reason is CancelReason.ATTEMPT_TIMEOUT
    (item,) = only(session, 3).fail.items
    assert (item.failure.kind, item.failure.code) == (1, "ATTEMPT_TIMEOUT")
    assert session.counters.zombies == 1
    session.finish(lease, DONE)
    assert session.counters.zombies == 0
    assert frames(session, 3) == [], "what the code returned after that does not count"


def test_an_attempt_that_ended_in_time_does_not_time_out() -> None:
    session = opened()
    (lease,) = given(session, task(1, timeout=3))
    session.finish(lease, DONE)
    assert not session.tick(4).cancel
    assert only(session, 4).WhichOneof("frame") == "complete"


def test_timeouts_of_ended_attempts_do_not_pile_up() -> None:
    session = opened()
    for number in range(2000):
        (lease,) = given(session, task(1, token=number + 1, timeout=1000), number=number + 1)
        session.finish(lease, DONE)
        session.receive(ack(only(session).frame_id, {0: OK}), 0)
    assert len(session.ledger._timeouts) < 100


def test_silence_for_three_pings_gives_the_stream_up() -> None:
    session = opened(now=0)
    assert session.next_due() == 15
    session.receive(pb.SessionResponse(ping=pb.Ping(number=1)), 4)
    assert not session.tick(18).rebuild
    assert session.tick(19).rebuild
    assert session.next_due() > 19, "it is said once"


def test_a_welcome_that_does_not_come_gives_the_stream_up() -> None:
    session = session_of()
    session.begin(0)
    frames(session)
    assert not session.tick(9).rebuild
    assert session.tick(10).rebuild


def test_a_step_goes_on_when_its_lease_runs_out_unheard() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.end()
    for now in range(0, 600, 10):
        assert not session.tick(now).cancel
    assert session.ledger.holds(lease)


def test_a_step_is_cancelled_after_its_lease_where_that_is_wanted() -> None:
    session = opened(session_of(cancel_after_lease=5))
    (lease,) = given(session, task(1, lease=60))
    session.end()
    assert not session.tick(64).cancel
    assert session.tick(65).cancel == [lease]


# Refusals.


@pytest.mark.parametrize("reason", ["INVALID_JSON", "PAYLOAD_TOO_LARGE", "INVALID_FRAME"])
def test_an_output_that_the_server_refuses_is_a_failure_instead(reason: str) -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, DONE)
    answer = ack(only(session).frame_id, {0: REFUSED}, reason=reason, message="duplicate key")
    session.receive(answer, 0)
    (item,) = only(session).fail.items
    assert item.task == ref(1)
    assert (item.failure.kind, item.failure.code) == (3, "OUTPUT_NOT_RECORDABLE")
    assert "duplicate key" in item.failure.message


def test_a_failure_that_the_server_refuses_is_sent_bare_and_then_given_up() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, Failed(FailureKind.CORRECTIVE, "C", "m", feedback=Value(json="1")))
    session.receive(ack(only(session).frame_id, {0: REFUSED}, reason="INVALID_JSON"), 0)
    bare = only(session)
    (item,) = bare.fail.items
    assert item.failure.kind == 2
    assert not item.failure.HasField("feedback")
    session.receive(ack(bare.frame_id, {0: REFUSED}, reason="INVALID_FRAME"), 0)
    last = only(session)
    session.receive(ack(last.frame_id, {0: REFUSED}, reason="INVALID_FRAME"), 0)
    assert frames(session) == []
    assert session.held_count == 0


@pytest.mark.parametrize("reason", ["DATABASE_UNAVAILABLE", "OVERLOADED", "INTERNAL"])
@pytest.mark.parametrize("whole", [True, False])
def test_what_the_server_could_not_record_is_sent_again_a_moment_later(reason: str, whole: bool) -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, DONE)
    frame_id = only(session).frame_id
    session.receive(refusal(frame_id, reason) if whole else ack(frame_id, {0: REFUSED}, reason=reason), 5)
    assert frames(session, 5) == []
    assert session.next_due() == 6
    session.tick(6)
    assert only(session, 6).complete.items[0].output.json == "1"


def test_an_outcome_that_is_the_servers_fault_each_time_becomes_a_failure_at_last() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, DONE)
    now = 0.0
    while (frame := only(session, now)).WhichOneof("frame") == "complete":
        session.receive(ack(frame.frame_id, {0: REFUSED}, reason="INTERNAL"), now)
        now += 1
        session.tick(now)
    assert now == 6
    assert frame.fail.items[0].failure.code == "OUTPUT_NOT_RECORDABLE"


def test_an_output_against_its_schema_was_recorded_as_a_failure() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, DONE)
    session.receive(ack(only(session).frame_id, {0: REFUSED}, reason="OUTPUT_SCHEMA_MISMATCH"), 0)
    assert session.held_count == 0
    assert session.counters.failed == 1
    assert frames(session) == []


# Leaving.


def test_a_session_that_leaves_pauses_finishes_and_says_goodbye() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.leave()
    pause = only(session)
    assert pause.WhichOneof("frame") == "capacity"
    assert pause.capacity.capacity == 0
    assert not session.is_over()
    session.finish(lease, DONE)
    session.receive(ack(only(session).frame_id, {0: OK}), 0)
    goodbye = only(session)
    assert goodbye.WhichOneof("frame") == "goodbye"
    assert not session.is_over()
    session.receive(ack(goodbye.frame_id), 0)
    assert session.is_over()


def test_a_task_that_crossed_the_goodbye_is_run_before_the_end() -> None:
    session = opened()
    session.leave()
    goodbye = frames(session)[-1]
    (lease,) = given(session, task(1))
    session.receive(ack(goodbye.frame_id), 0)
    assert not session.is_over()
    session.finish(lease, DONE)
    session.receive(ack(only(session).frame_id, {0: OK}), 0)
    assert session.is_over()


def test_a_session_without_a_stream_and_leases_is_over_at_once() -> None:
    session = opened()
    session.end()
    assert not session.is_over()
    session.leave()
    assert session.is_over()


def test_a_session_that_leaves_comes_back_for_its_leases_with_capacity_0() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.leave()
    session.end()
    session.begin(0)
    hello = only(session).hello
    assert hello.capacity == 0
    assert [held.run_id for held in hello.held] == [lease.run_id]


def test_a_new_capacity_is_told() -> None:
    session = opened()
    session.capacity = 3
    assert only(session).capacity.capacity == 3
    assert frames(session) == []


def test_steps_that_are_cut_off_fail_and_are_cancelled() -> None:
    session = opened()
    running, finished = given(session, task(1), task(2))
    session.finish(finished, DONE)
    assert session.cut_off().cancel == [running]
    by_kind = {frame.WhichOneof("frame"): frame for frame in frames(session)}
    assert by_kind["fail"].fail.items[0].failure.code == "WORKER_SHUTDOWN"
    assert len(by_kind["complete"].complete.items) == 1


def test_a_lease_that_was_not_begun_is_released() -> None:
    session = opened()
    begun, queued = given(session, task(1), task(2))
    session.finish(begun, DONE)
    session.release(begun)
    session.release(queued)
    by_kind = {frame.WhichOneof("frame"): frame for frame in frames(session)}
    assert [item.task for item in by_kind["release"].release.items] == [ref(2)]
    session.receive(ack(by_kind["release"].frame_id, {0: OK}), 0)
    assert session.counters.released == 1


def test_a_drain_is_told_and_a_frame_of_a_newer_server_is_passed_over() -> None:
    session = opened()
    assert session.receive(pb.SessionResponse(drain=pb.Drain()), 0).drain
    effects = session.receive(pb.SessionResponse(), 0)
    assert not effects.rebuild


def test_a_withdrawn_zombie_is_none() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.receive(pb.SessionResponse(revoke=pb.Revoke(tasks=[ref(1)])), 0)
    assert session.counters.zombies == 1
    session.finish(lease, Released())
    assert session.counters.zombies == 0
    assert frames(session) == []


def test_an_idle_session_keeps_a_bounded_number_of_times_and_never_one_too_late() -> None:
    session = opened(now=0)
    for number in range(1, 6001):
        session.receive(pb.SessionResponse(ping=pb.Ping(number=number)), number)
        only(session, number)
    assert session._flights.known_times < 5000
    (early,) = given(session, task(1, lease=60), last_frame_id=2, now=6000)
    assert early.expires_at <= 1 + 60
    (exact,) = given(session, task(2, lease=60), last_frame_id=5001, now=6000)
    assert exact.expires_at == 5000 + 60
    assert session._flights.known_times == 1001
