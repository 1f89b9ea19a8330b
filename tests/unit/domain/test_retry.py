"""Retries: how many, and after how long, for any policy and any number of failures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_server.domain.model import FailureKind
from fencepost_server.domain.policy import RetryPolicy
from fencepost_server.domain.retry import Retry, backoff, decide

DELAYS = st.one_of(st.just(0.0), st.floats(0.001, 7 * 86_400))  # as manifests allow: none, or a millisecond at least
CHANCE = st.floats(0, 1, exclude_max=True)
POLICIES = st.builds(
    lambda attempts, delays, multiplier, jitter, corrective: RetryPolicy(
        attempts, min(delays), multiplier, max(delays), jitter, corrective
    ),
    st.integers(1, 1_000_000),
    st.tuples(DELAYS, DELAYS),
    st.floats(1, 1_000),
    st.floats(0, 1),
    st.integers(0, 1_000),
)


@given(policy=POLICIES, failures=st.integers(1, 1_000_000), chance=CHANCE)
def test_a_backoff_is_exponential_up_to_its_cap_give_or_take_its_jitter(
    policy: RetryPolicy, failures: int, chance: float
) -> None:
    """Row 25 of the field's failures: also at the millionth attempt, nothing overflows."""
    delay = backoff(policy, failures, chance)
    assert math.isfinite(delay)
    growth = (failures - 1) * math.log(policy.multiplier)
    plain = policy.max_delay_seconds
    if growth < 700:
        plain = min(plain, policy.initial_delay_seconds * math.exp(growth))
    if policy.initial_delay_seconds == 0:
        plain = 0
    slack = 1e-6 + 1e-9 * plain
    assert plain * (1 - policy.jitter) - slack <= delay <= plain * (1 + policy.jitter) + slack
    assert delay >= 0


def test_delays_double_by_default_from_a_second_to_a_minute() -> None:
    policy = RetryPolicy(jitter=0)
    delays = [backoff(policy, n, 0.3) for n in range(1, 10)]
    assert delays == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60])


def test_jitter_spreads_a_delay_evenly_around_itself() -> None:
    policy = RetryPolicy(initial_delay_seconds=10, jitter=0.5)
    assert [backoff(policy, 1, chance) for chance in (0.0, 0.25, 0.5, 0.75)] == pytest.approx([5, 7.5, 10, 12.5])


@given(policy=POLICIES, operational=st.integers(0, 10), corrective=st.integers(0, 10), chance=CHANCE)
def test_a_permanent_failure_is_never_retried(
    policy: RetryPolicy, operational: int, corrective: int, chance: float
) -> None:
    assert decide(policy, FailureKind.PERMANENT, operational, corrective, 0.0, chance) is None


@given(attempts=st.integers(1, 20), failures=st.integers(1, 20), corrective=st.integers(0, 20), chance=CHANCE)
def test_operational_attempts_are_counted_alone(attempts: int, failures: int, corrective: int, chance: float) -> None:
    retry = decide(RetryPolicy(max_attempts=attempts), FailureKind.OPERATIONAL, failures, corrective, None, chance)
    assert (retry is not None) == (failures < attempts)


@given(most=st.integers(0, 20), failures=st.integers(1, 20), operational=st.integers(0, 20), chance=CHANCE)
def test_corrective_attempts_are_counted_alone_and_retried_at_once(
    most: int, failures: int, operational: int, chance: float
) -> None:
    policy = RetryPolicy(max_corrective_attempts=most)
    retry = decide(policy, FailureKind.CORRECTIVE, operational, failures, 99.0, chance)
    assert retry == (Retry(0.0) if failures < most else None)


@given(policy=POLICIES, retry_after=st.floats(0, 30 * 86_400), chance=CHANCE)
def test_what_a_worker_says_overrides_the_backoff_but_not_the_number_of_attempts(
    policy: RetryPolicy, retry_after: float, chance: float
) -> None:
    retry = decide(policy, FailureKind.OPERATIONAL, 1, 0, retry_after, chance)
    assert retry == (Retry(retry_after) if policy.max_attempts > 1 else None)
