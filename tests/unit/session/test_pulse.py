"""Whether a worker is there, by pings and pongs."""

from __future__ import annotations

from fencepost_server.session.pulse import Pulse


def test_a_worker_far_away_is_trusted_again_although_each_answer_comes_after_the_next_ping() -> None:
    pulse = Pulse()
    first = pulse.beat()
    assert pulse.doubt() is None, "a ping is on its way"
    pulse.beat()
    assert pulse.weak
    assert pulse.answered(first)
    assert not pulse.weak


def test_an_answer_to_a_ping_from_before_the_doubt_shows_nothing() -> None:
    pulse = Pulse()
    before = pulse.beat()
    pulse.answered(before)
    asked = pulse.doubt()
    assert asked is not None
    assert not pulse.answered(before)
    assert pulse.weak
    assert pulse.answered(asked)


def test_it_is_told_when_a_worker_that_was_late_may_get_tasks_again() -> None:
    pulse = Pulse()
    pings = [pulse.beat() for _ in range(2)]
    assert pulse.weak
    assert pulse.answered(pings[0])
    assert not pulse.answered(pings[1])


def test_what_is_not_read_is_no_answer_of_one_that_is_doubted() -> None:
    pulse = Pulse()
    before = pulse.beat()
    pulse.beat()
    pulse.doubt()
    pulse.excuse()
    assert not pulse.answered(before)
    assert pulse.weak
    assert pulse.answered(pulse.beat())
