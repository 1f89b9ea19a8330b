"""Whether and when a step that failed is tried again (semantics: failure kinds)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fencepost_server.domain.model import FailureKind
from fencepost_server.domain.policy import RetryPolicy


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after so many seconds."""

    delay: float


def backoff(policy: RetryPolicy, failures: int, random: float) -> float:
    """Seconds before the attempt that follows the ``failures``-th OPERATIONAL failure; ``random`` is from [0, 1).

    Exponential with a cap, then jitter of ± policy.jitter. Any number of failures is fine: the power is
    compared by logarithm before it is computed.
    """
    growth = (failures - 1) * math.log(policy.multiplier)
    if policy.initial_delay_seconds <= 0:
        delay = 0.0
    elif growth >= math.log(policy.max_delay_seconds / policy.initial_delay_seconds):
        delay = policy.max_delay_seconds
    else:
        delay = policy.initial_delay_seconds * math.exp(growth)
    return max(0.0, delay * (1 + policy.jitter * (2 * random - 1)))


def decide(
    policy: RetryPolicy,
    kind: FailureKind,
    operational_failures: int,
    corrective_failures: int,
    retry_after: float | None,
    random: float,
) -> Retry | None:
    """The next attempt, or None if the step has failed for good. The counters include the failure that is
    decided on.
    """
    if kind is FailureKind.PERMANENT:
        return None
    if kind is FailureKind.CORRECTIVE:
        return Retry(0.0) if corrective_failures < policy.max_corrective_attempts else None
    if operational_failures >= policy.max_attempts:
        return None
    return Retry(backoff(policy, operational_failures, random) if retry_after is None else retry_after)
