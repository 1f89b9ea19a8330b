"""How often and how quickly a failed step is tried again: the values of a manifest's `retry`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retries of one step. Delays are in seconds.

    `max_attempts` counts the first attempt too. `jitter` is the share of a delay that is random (0 to 1).
    Corrective retries, which carry feedback, are counted apart, by `max_corrective_attempts`.
    """

    max_attempts: int = 5
    initial_delay_seconds: float = 1.0
    multiplier: float = 2.0
    max_delay_seconds: float = 60.0
    jitter: float = 0.2
    max_corrective_attempts: int = 3
