"""What a schedule decides at a fire time, for every policy, and that it always comes to rest."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_server.domain.firing import MOST_TIMES, Decision, Patience, State, decide, paused, resumed
from fencepost_server.domain.schedule import Overlap, Spec

MINUTE = timedelta(minutes=1)
T = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
PATIENCE = Patience(timedelta(seconds=5), timedelta(seconds=30))
SKIP, QUEUE_ONE, ALLOW, CANCEL = Overlap


def minutely(overlap: Overlap = SKIP, **fields: object) -> Spec:
    return Spec(cron="* * * * *", workflow_id="wf", overlap=overlap, **fields)  # type: ignore[arg-type]  # by name


def at(spec: Spec, state: State, now: datetime, *, running: bool = False) -> Decision:
    return decide(spec, "key", state, now, running=running, patience=PATIENCE)


@pytest.mark.parametrize("overlap", Overlap)
def test_a_fire_time_with_nothing_under_way_is_started(overlap: Overlap) -> None:
    decision = at(minutely(overlap), State(T), T)
    assert decision.start
    assert decision.state == State(T + MINUTE, starting_at=T, last_fire_at=T, due_at=T + PATIENCE.retry)


def test_before_its_time_nothing_happens() -> None:
    early = T - timedelta(microseconds=1)
    assert at(minutely(), State(T), early) == Decision(State(T, due_at=T))


def test_a_start_that_was_decided_is_tried_again_before_anything_else_is_decided() -> None:
    """Whoever decided it may be dead; the key makes it one run."""
    state = State(T + MINUTE, starting_at=T)
    decision = at(minutely(), state, T + 5 * MINUTE, running=True)
    assert decision.start
    assert decision.state == replace(state, due_at=T + 5 * MINUTE + PATIENCE.retry)


@pytest.mark.parametrize(
    ("overlap", "starting", "pending", "skipped", "cancel"),
    [
        (SKIP, None, None, 1, False),
        (QUEUE_ONE, None, T, 0, False),
        (ALLOW, T, None, 0, False),
        (CANCEL, None, T, 0, True),
    ],
)
def test_a_fire_time_while_a_run_is_under_way_goes_as_its_policy_says(
    overlap: Overlap, starting: datetime | None, pending: datetime | None, skipped: int, cancel: bool
) -> None:
    decision = at(minutely(overlap), State(T), T, running=True)
    state = decision.state
    assert (state.starting_at, state.pending_at, state.skipped_overlap) == (starting, pending, skipped)
    assert (decision.start, decision.cancel) == (starting is not None, cancel)
    assert (state.next_fire_at, state.last_fire_at) == (T + MINUTE, T)


@pytest.mark.parametrize("overlap", [QUEUE_ONE, CANCEL])
def test_one_fire_time_waits_and_the_others_until_then_are_left_out(overlap: Overlap) -> None:
    spec = minutely(overlap)
    waiting = at(spec, State(T), T, running=True).state
    later = at(spec, waiting, T + MINUTE, running=True)
    assert (later.state.pending_at, later.state.skipped_overlap) == (T, 1)
    assert later.cancel is (overlap is CANCEL), "asked again with each look: the first may have been lost"
    ended = at(spec, later.state, T + MINUTE + timedelta(seconds=3))
    assert ended.start
    assert (ended.state.starting_at, ended.state.pending_at) == (T, None)


def test_looks_for_the_end_of_a_run_get_rarer_but_never_stop() -> None:
    spec = Spec(cron="0 0 1 1 *", workflow_id="wf", overlap=QUEUE_ONE)
    for waited, look in ((0, 1), (5, 1), (100, 10), (10_000, 30)):
        now = T + timedelta(seconds=waited)
        state = at(spec, State(T + 365 * 24 * 60 * MINUTE, pending_at=T), now, running=True).state
        assert state.due_at == now + timedelta(seconds=look)


def test_times_missed_by_more_than_the_window_are_left_out_and_the_others_made_up_for() -> None:
    spec = minutely(catch_up=timedelta(minutes=3))
    now = T + 10 * MINUTE
    decision = at(spec, State(T), now)
    assert decision.start
    assert decision.state.starting_at == now - timedelta(minutes=3), "missed by no more than the window"
    assert decision.state.skipped_missed == 7


def test_two_years_of_minutes_are_left_out_in_one_decision() -> None:
    now = T + timedelta(days=730, seconds=30)
    decision = at(minutely(), State(T), now)
    assert decision.state.skipped_missed == 730 * 1440
    assert decision.state.starting_at == now - timedelta(seconds=30)


def test_a_decision_looks_at_a_bounded_number_of_times() -> None:
    """It goes on behind those that are due already."""
    spec, now = minutely(catch_up=timedelta(days=365)), T + timedelta(days=300)
    decision = at(spec, State(T), now, running=True)
    assert decision.state.skipped_overlap == MOST_TIMES
    assert decision.state.next_fire_at == T + MOST_TIMES * MINUTE
    assert decision.state.due_at == now


def test_jitter_delays_the_start_and_not_the_fire_time() -> None:
    spec = minutely(jitter=timedelta(hours=5))
    waiting = at(spec, State(T), T)
    assert not waiting.start
    due = waiting.state.due_at
    assert due is not None
    assert T < due < T + timedelta(hours=5)
    fired = at(spec, waiting.state, due)
    assert fired.state.starting_at == T


@given(
    st.sampled_from(list(Overlap)),
    st.timedeltas(timedelta(0), timedelta(days=3)),
    st.timedeltas(timedelta(seconds=1), timedelta(days=1)),
    st.timedeltas(timedelta(0), timedelta(hours=2)),
    st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_every_fire_time_is_started_waits_or_is_counted_once(
    overlap: Overlap, late: timedelta, window: timedelta, jitter: timedelta, runs: list[bool]
) -> None:
    """Driven until nothing is due, with runs that end or not: no time is lost, none handled twice."""
    spec = Spec(interval=timedelta(minutes=7), workflow_id="wf", overlap=overlap, catch_up=window, jitter=jitter)
    begin = datetime(2026, 6, 1, 12, 4, tzinfo=UTC)
    state = resumed(spec, "key", State(None), begin)
    first = state.next_fire_at
    assert first is not None
    now = begin + late
    started: list[datetime] = []
    for n in range(5000):
        decision = at(spec, state, now, running=bool(started) and runs[n % len(runs)])
        state = decision.state
        if decision.start:
            assert state.starting_at is not None
            started.append(state.starting_at)
            state = replace(state, starting_at=None)
        elif state.due_at is None or state.due_at > now:
            break
    assert state.next_fire_at is not None
    total = (state.next_fire_at - first) // timedelta(minutes=7)
    handled = len(started) + (state.pending_at is not None) + state.skipped_overlap + state.skipped_missed
    assert handled == total
    assert len(set(started)) == len(started)


def test_pausing_drops_what_waits_and_keeps_what_was_decided() -> None:
    state = paused(State(T + MINUTE, starting_at=T, pending_at=T, skipped_overlap=1), T)
    assert state == State(None, starting_at=T, skipped_overlap=2, due_at=T)
    assert paused(State(T), T) == State(None)


def test_resuming_makes_up_for_nothing() -> None:
    now = T + timedelta(hours=3, seconds=1)
    assert resumed(minutely(), "key", State(None), now).next_fire_at == T + timedelta(hours=3) + MINUTE


def test_a_new_spec_without_a_queue_drops_what_waits() -> None:
    state = State(T + MINUTE, pending_at=T)
    assert resumed(minutely(QUEUE_ONE), "key", state, T).pending_at == T
    dropped = resumed(minutely(SKIP), "key", state, T)
    assert (dropped.pending_at, dropped.skipped_overlap, dropped.due_at) == (None, 1, T + MINUTE)
