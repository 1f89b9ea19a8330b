"""What a step raises to choose what its failure means; any other exception counts as operational.

    StepError
    ├── OperationalError              transient: tried again with backoff
    ├── CorrectiveError               the result or request was wrong: tried again at once with the feedback
    ├── PermanentError                never tried again
    └── StepCancelled                 it stopped because it was asked to; raised by `StepContext.raise_if_cancelled`

`failure` says how they are found in chains and groups of exceptions.
"""

from __future__ import annotations

import math

MAX_RETRY_AFTER = 30 * 24 * 3600.0


class StepError(Exception):
    """The base of what a step raises to choose what its failure means.

    ``code`` is a short name for programs; by default it is the name of the class, so that a subclass such as
    ``class CardDeclined(PermanentError)`` brings its own.
    """

    # Defaults of the class, because a subclass may forget to call this __init__ and must fail as what it is.
    message: str = ""
    code: str = ""

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code or type(self).__name__


class OperationalError(StepError):
    """Transient: the step is tried again with backoff, up to the node's max_attempts.

    ``retry_after`` overrides the backoff, in seconds; it is brought into 0 … 30 days, and no number counts as
    none.
    """

    retry_after: float | None = None

    def __init__(self, message: str = "", *, code: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = bounded_delay(retry_after)


class CorrectiveError(StepError):
    """The result or the request was wrong: the step is tried again at once, and receives ``feedback``.

    ``feedback`` is anything that has JSON; the next attempt finds it in ``ctx.feedback``.
    """

    feedback: object = None

    def __init__(self, message: str = "", *, feedback: object = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.feedback = feedback


class PermanentError(StepError):
    """Never tried again: the run fails."""


class StepCancelled(StepError):
    """The step stops because it was asked to."""


def bounded_delay(seconds: float | None) -> float | None:
    """Bring a retry delay into what the contract allows, 0 … 30 days; None for none and for NaN."""
    if seconds is None or math.isnan(seconds):
        return None
    return min(max(float(seconds), 0.0), MAX_RETRY_AFTER)
