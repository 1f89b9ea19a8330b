"""What a code workflow meets: what its ops end with, and what stops it.

::

    StepError
    └── OpFailed                          an op that was awaited did not complete; kind, code and message are its own
        ├── StepFailed                    a step, local or remote, after all its attempts
        ├── ChildFailed                   a child run that did not complete: has `state`
        └── SignalTimeout (TimeoutError)  no signal came in time
    FencepostError
    └── NondeterminismError               NONDETERMINISM: the code does not do what the history says
    LookupError
    └── UnknownQuery                      the workflow answers no query of that name
    BaseException
    └── ContinueAsNew                     how `continue_as_new` leaves the function; nobody is meant to catch it

An `OpFailed` that the function does not catch makes its run fail with the same kind and code: kinds survive, through
child runs too.
"""

from __future__ import annotations

from typing import Any

from fencepost.codec import Value
from fencepost.errors import FencepostError
from fencepost.models import FailureKind, RunState
from fencepost.step_errors import StepError


class OpFailed(StepError):
    """An op that a workflow awaited did not complete. ``feedback`` is what a corrective failure says, as plain JSON.
    ``seq`` is the event of the run's history that tells of it, 0 if that is not known.
    """

    seq: int = 0

    def __init__(self, what: str, kind: FailureKind, code: str, message: str, feedback: Any = None) -> None:
        super().__init__(f"{what}: {code}: {message}", code=code)
        self.what = what
        self.kind = kind
        self.detail = message
        self.feedback = feedback


class StepFailed(OpFailed):
    """A step failed for good. ``attempts`` is how many there were, 0 if that is not known."""

    def __init__(
        self, what: str, kind: FailureKind, code: str, message: str, feedback: Any = None, attempts: int = 0
    ) -> None:
        super().__init__(what, kind, code, message, feedback)
        self.attempts = attempts


class ChildFailed(OpFailed):
    """A child run did not complete. ``state`` is how it ended."""

    def __init__(
        self, what: str, kind: FailureKind, code: str, message: str, state: RunState, run_id: str, feedback: Any = None
    ) -> None:
        super().__init__(what, kind, code, message, feedback)
        self.state = state
        self.run_id = run_id


class SignalTimeout(OpFailed, TimeoutError):
    """No signal of that name came in time."""


class NondeterminismError(FencepostError):
    """The code does not do what the history of its run says; ``message`` has the first difference."""

    default_reason = "NONDETERMINISM"


class UnknownQuery(LookupError):
    """The workflow answers no query of that name."""


class ContinueAsNew(BaseException):
    """The run ends here, and goes on as a new one with ``input``."""

    def __init__(self, input: Value) -> None:
        super().__init__("the run continues as new")
        self.input = input
