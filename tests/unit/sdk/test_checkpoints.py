"""Checkpoints without I/O: what is sent of them, who is answered when, and what goes along with a failure."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from fencepost import CancelReason, FailureKind, InvalidJson, LeaseLost, ServerFault, Value
from fencepost.checkpoints import Saving
from fencepost.failure import Completed, Failed
from fencepost.lease import Lease
from fencepost.session import Session
from fencepost.v1 import worker_service_pb2 as pb
from tests.unit.sdk.building import (
    ALREADY_DONE,
    DONE,
    LEASE_LOST,
    OK,
    REFUSED,
    ack,
    frames,
    given,
    kept,
    lost,
    only,
    opened,
    ref,
    refusal,
    task,
    welcome,
)

FAILED = Failed(FailureKind.OPERATIONAL, "C", "m")


def save(session: Session, lease: Lease, number: int, json: str | None = None) -> Future[None]:
    """Save a state as a step does; the future of who waits for it."""
    saving = Saving(number, Value(json=json or str(number)))
    waiter = saving.wait()
    session.save(lease, saving)
    return waiter


def items(frame: pb.SessionRequest) -> list[tuple[pb.TaskRef, int, str]]:
    return [(item.task, item.number, item.state.json) for item in frame.checkpoint.items]


@pytest.mark.parametrize("answer", [OK, ALREADY_DONE])
def test_a_state_is_sent_under_the_lease_and_who_waits_is_told_when_it_is_saved(
    answer: pb.ItemOutcome.ValueType,
) -> None:
    session = opened()
    (lease,) = given(session, task(1, token=7))
    waiter = save(session, lease, 1)
    frame = only(session)
    assert items(frame) == [(ref(1, 7), 1, "1")]
    assert not waiter.done()
    session.receive(ack(frame.frame_id, {0: answer}), 0)
    assert waiter.result(0) is None
    assert session.held_count == 1, "the lease stays"
    assert frames(session) == []


def test_a_newer_state_takes_the_place_of_one_that_is_not_on_its_way() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    first = save(session, lease, 1)
    frame = only(session)
    older, newer = save(session, lease, 2), save(session, lease, 3)
    assert frames(session) == [], "one at a time for each step"
    session.receive(ack(frame.frame_id, {0: OK}), 0)
    assert (first.done(), older.done()) == (True, False)
    frame = only(session)
    assert items(frame) == [(ref(1), 3, "3")]
    session.receive(ack(frame.frame_id, {0: OK}), 0)
    assert older.result(0) is newer.result(0) is None


def test_states_of_many_steps_go_in_frames_that_keep_to_the_servers_limits() -> None:
    session = opened(max_items=3, max_bytes=8192)
    leases = given(session, *(task(run) for run in range(1, 8)))
    for lease in leases[:4]:
        save(session, lease, 1)
    for lease in leases[4:]:
        save(session, lease, 1, '"' + "x" * 5000 + '"')
    said = frames(session)
    assert [len(frame.checkpoint.items) for frame in said] == [3, 2, 1, 1]
    assert all(frame.ByteSize() <= 8192 for frame in said)


def test_four_states_and_a_failure_in_a_moment_bring_the_fourth() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    waiters = [save(session, lease, 1)]
    only(session)
    waiters += [save(session, lease, number) for number in (2, 3, 4)]
    session.finish(lease, FAILED)
    (item,) = only(session).fail.items
    assert (item.checkpoint.number, item.checkpoint.state.json) == (4, "4")
    for waiter in waiters:
        with pytest.raises(LeaseLost):
            waiter.result(0)


def test_a_state_on_its_way_goes_along_with_the_failure_and_its_late_answer_is_no_harm() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    save(session, lease, 1)
    checkpoint = only(session)
    session.finish(lease, FAILED)
    fail = only(session)
    assert fail.fail.items[0].checkpoint.number == 1
    session.receive(ack(checkpoint.frame_id, {0: OK}), 0)
    session.receive(ack(fail.frame_id, {0: OK}), 0)
    assert session.counters.failed == 1


def test_what_was_acknowledged_does_not_go_along_with_the_failure() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    save(session, lease, 1)
    session.receive(ack(only(session).frame_id, {0: OK}), 0)
    session.finish(lease, FAILED)
    assert not only(session).fail.items[0].HasField("checkpoint")


def test_a_step_that_completes_needs_its_states_no_more() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    waiter = save(session, lease, 1)
    session.finish(lease, DONE)
    assert only(session).WhichOneof("frame") == "complete"
    with pytest.raises(LeaseLost, match="the attempt has ended"):
        waiter.result(0)


def test_an_attempt_that_times_out_leaves_its_newest_state() -> None:
    session = opened()
    (lease,) = given(session, task(1, timeout=2))
    waiter = save(session, lease, 5)
    session.tick(2)
    (item,) = only(session).fail.items
    assert (item.failure.code, item.checkpoint.number) == ("ATTEMPT_TIMEOUT", 5)
    with pytest.raises(LeaseLost):
        waiter.result(0)


def test_a_failure_that_is_refused_as_it_was_goes_without_the_state() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    save(session, lease, 1)
    session.finish(lease, FAILED)
    session.receive(ack(only(session).frame_id, {0: REFUSED}, reason="INVALID_JSON"), 0)
    assert not only(session).fail.items[0].HasField("checkpoint")


def test_a_failure_with_a_large_state_has_a_frame_of_its_own() -> None:
    session = opened(max_bytes=8192)
    leases = given(session, task(1), task(2))
    for lease in leases:
        save(session, lease, 1, '"' + "x" * 5000 + '"')
        session.finish(lease, FAILED)
    assert [len(frame.fail.items) for frame in frames(session)] == [1, 1]


def test_after_a_break_a_state_is_sent_again_the_newest_for_all_who_wait() -> None:
    session = opened()
    first, second = given(session, task(1), task(2))
    waiters = [save(session, first, 1), save(session, second, 1)]
    assert len(only(session).checkpoint.items) == 2
    waiters.append(save(session, second, 2))
    session.end()
    waiters.append(save(session, second, 3))
    session.begin(0)
    frames(session)
    session.receive(welcome([kept(1), kept(2)], session="b"), 0)
    frame = only(session)
    assert sorted((item.task.run_id, item.number) for item in frame.checkpoint.items) == [
        (first.run_id, 1),
        (second.run_id, 3),
    ]
    session.receive(ack(frame.frame_id, {0: ALREADY_DONE, 1: OK}), 0)
    assert [waiter.result(0) for waiter in waiters] == [None] * 4


def test_a_lease_that_is_lost_over_a_break_ends_its_states() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    waiter = save(session, lease, 1)
    only(session)
    session.end()
    session.begin(0)
    frames(session)
    session.receive(welcome([lost(1)]), 0)
    with pytest.raises(LeaseLost, match="the lease is lost"):
        waiter.result(0)
    assert frames(session) == []


def test_a_state_that_finds_the_lease_lost_stops_the_step() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    waiters = [save(session, lease, 1)]
    frame = only(session)
    waiters.append(save(session, lease, 2))
    effects = session.receive(ack(frame.frame_id, {0: LEASE_LOST}), 0)
    assert effects.cancel == [lease]
    assert lease.cancel_reason is CancelReason.LEASE_LOST
    for waiter in waiters:
        with pytest.raises(LeaseLost):
            waiter.result(0)
    assert session.held_count == 0
    assert frames(session) == []


@pytest.mark.parametrize("how", ["revoke", "newer token"])
def test_states_end_with_their_lease(how: str) -> None:
    session = opened()
    (lease,) = given(session, task(1))
    waiter = save(session, lease, 1)
    if how == "revoke":
        session.receive(pb.SessionResponse(revoke=pb.Revoke(tasks=[ref(1)])), 0)
    else:
        given(session, task(1, token=2))
    with pytest.raises(LeaseLost):
        waiter.result(0)
    assert frames(session) == []


def test_a_state_of_an_attempt_that_has_ended_is_not_sent() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.finish(lease, DONE)
    only(session)
    with pytest.raises(LeaseLost):
        save(session, lease, 1).result(0)
    assert frames(session) == []


def test_a_state_that_the_server_refuses_is_its_savers_error_and_the_step_goes_on() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    bad = save(session, lease, 1)
    frame = only(session)
    good = save(session, lease, 2)
    session.receive(ack(frame.frame_id, {0: REFUSED}, reason="INVALID_JSON", message="too deep"), 0)
    with pytest.raises(InvalidJson, match="too deep"):
        bad.result(0)
    frame = only(session)
    assert items(frame) == [(ref(1), 2, "2")]
    session.receive(ack(frame.frame_id, {0: OK}), 0)
    assert good.result(0) is None


def test_a_frame_that_the_server_could_not_take_now_is_sent_again_with_the_newest_state() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    waiters = [save(session, lease, 1)]
    session.receive(refusal(only(session).frame_id, "DATABASE_UNAVAILABLE"), 10)
    waiters.append(save(session, lease, 2))
    assert frames(session, 10) == []
    assert session.next_due() == 11
    session.tick(11)
    frame = only(session, 11)
    assert items(frame) == [(ref(1), 2, "2")]
    session.receive(ack(frame.frame_id, {0: OK}), 11)
    assert [waiter.result(0) for waiter in waiters] == [None, None]


def test_a_fault_of_the_server_is_not_met_for_ever() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    waiter = save(session, lease, 1)
    now = 0.0
    for _ in range(6):
        assert not waiter.done()
        session.receive(refusal(only(session, now).frame_id, "INTERNAL"), now)
        now += 1
        session.tick(now)
    with pytest.raises(ServerFault):
        waiter.result(0)
    assert frames(session, now) == []


def test_states_and_outcomes_take_turns() -> None:
    session = opened(max_items=1)
    leases = given(session, *(task(run) for run in range(1, 7)))
    for lease in leases[:3]:
        save(session, lease, 1)
    for lease in leases[3:]:
        session.finish(lease, Completed(Value(json="1"), 1))
    assert sorted(frame.WhichOneof("frame") or "" for frame in frames(session)[:2]) == ["checkpoint", "complete"]


def test_null_is_a_state_too() -> None:
    session = opened()
    (lease,) = given(session, task(1))
    session.save(lease, Saving(1, Value()))
    assert only(session).checkpoint.items[0].HasField("state")


def test_the_newest_state_of_an_earlier_attempt_comes_with_the_task() -> None:
    session = opened()
    state = pb.CheckpointItem(number=4)
    state.state.json = '{"done":3}'
    with_state, without = given(session, task(1, checkpoint=state), task(2))
    assert with_state.checkpoint == (4, Value(json='{"done":3}'))
    assert without.checkpoint == (0, None)
