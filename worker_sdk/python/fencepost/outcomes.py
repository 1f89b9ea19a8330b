"""What ops and functions end with: failures of the history as exceptions, and exceptions of a function as failures.

Kinds survive both ways. What a function raises and nobody gave a kind is permanent: replay would raise it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, TypeVar

from fencepost.errors import NotDecodable
from fencepost.failure import MAX_CODE, Failed, clean, failed
from fencepost.models import RUN_STATES, Failure, FailureKind, RunState, failure_of
from fencepost.ops import Op
from fencepost.step_errors import PermanentError
from fencepost.v1 import run_pb2
from fencepost.workflow_errors import ChildFailed, ContinueAsNew, SignalTimeout, StepFailed

E = TypeVar("E", bound=BaseException)

_ANY_LIMIT = 1 << 20
_MAX_ERRORS = 1_000


class CancelIgnored(PermanentError):
    """The function awaits and awaits, whatever cancels it."""

    code = "CANCEL_IGNORED"


def step_failed(op: Op, failure: Failure | Failed, attempts: int) -> StepFailed:
    """What the await of a step raises."""
    return StepFailed(op.text, _kind(failure), failure.code, failure.message, _feedback(failure), attempts)


def step_cancelled(op: Op) -> StepFailed:
    """What the await of a step raises that was stopped because its run ends."""
    message = "the step was stopped because its run ends"
    return StepFailed(op.text, FailureKind.OPERATIONAL, "StepCancelled", message)


def child_failed(op: Op, ended: run_pb2.ChildEnded) -> ChildFailed:
    """What the await of a child raises."""
    state = RUN_STATES.get(ended.state, RunState.UNSPECIFIED)
    if ended.HasField("failure"):
        failure = failure_of(ended.failure)
    else:
        failure = Failure(FailureKind.PERMANENT, "CHILD_FAILED", f"the run ended as {state}")
    kind, feedback = _kind(failure), _feedback(failure)
    return ChildFailed(op.text, kind, failure.code, failure.message, state, ended.child_run_id, feedback)


def signal_timeout(op: Op) -> SignalTimeout:
    """What the await of a signal raises that did not come in time."""
    message = f"no signal {op.name!r} came in {op.seconds or 0.0:g} s"
    return SignalTimeout(op.text, FailureKind.PERMANENT, "SIGNAL_TIMEOUT", message)


def failure_of_function(error: BaseException, ending: Failure | None) -> Failed:
    """The failure of a run whose function raised ``error``. ``ending`` is why the run is about to end, if it is."""
    if isinstance(error, asyncio.CancelledError):
        if ending is not None:
            return Failed(FailureKind.PERMANENT, clean(ending.code, MAX_CODE), clean(ending.message))
        return Failed(FailureKind.PERMANENT, "CancelledError", "the function cancelled itself")
    made = failed(error, _ANY_LIMIT)
    kind = FailureKind.PERMANENT if made.unexpected else made.kind
    return dataclasses.replace(made, kind=kind, retry_after=None)


def failed_seq_of(error: BaseException) -> int:
    """The event of the step or child whose failure a function let through, by itself, as the cause of something else or
    in a group: the first that is found. 0 if there is none.
    """
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MAX_ERRORS:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, StepFailed | ChildFailed):
            return current.seq
        if current.__cause__ is not None:
            waiting.append(current.__cause__)
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(reversed(current.exceptions))
    return 0


def of_class(error: BaseException, wanted: type[E]) -> E | None:
    """``error``, or the first one of an exception group, if it is of that class."""
    if isinstance(error, BaseExceptionGroup):
        found = (of_class(inner, wanted) for inner in error.exceptions)
        return next((inner for inner in found if inner is not None), None)
    return error if isinstance(error, wanted) else None


def continue_as_new_of(error: BaseException) -> ContinueAsNew | None:
    """What a function raised to continue as new, if it did."""
    return of_class(error, ContinueAsNew)


def _kind(failure: Failure | Failed) -> FailureKind:
    return FailureKind.OPERATIONAL if failure.kind is FailureKind.UNSPECIFIED else failure.kind


def _feedback(failure: Failure | Failed) -> Any:
    if failure.feedback is None:
        return None
    try:
        return failure.feedback.decode()
    except NotDecodable:
        # Numbers that Python has not; the error says enough without.
        return None
