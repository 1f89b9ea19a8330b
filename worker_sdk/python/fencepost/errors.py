"""Every error that the SDK raises.

What the client and the worker raise (`FencepostError`), by the ErrorReason that the server gave::

    FencepostError
    ├── InvalidRequest                INVALID_REQUEST: correct the request; `violations` has every fault
    │   ├── InvalidJson               INVALID_JSON
    │   ├── InputSchemaMismatch       INPUT_SCHEMA_MISMATCH
    │   ├── PayloadTooLarge           PAYLOAD_TOO_LARGE
    │   ├── InvalidManifest           INVALID_MANIFEST
    │   └── InvalidPageToken          INVALID_PAGE_TOKEN
    ├── NotFound
    │   ├── UnknownWorkflow           UNKNOWN_WORKFLOW
    │   ├── UnknownDefinition         UNKNOWN_DEFINITION
    │   ├── RunNotFound               RUN_NOT_FOUND
    │   └── ScheduleNotFound          SCHEDULE_NOT_FOUND
    ├── Conflict                      it exists, and is another one
    │   ├── RequestKeyConflict        REQUEST_KEY_CONFLICT: has `existing_run_id`
    │   ├── RequestIdConflict         REQUEST_ID_CONFLICT
    │   ├── DedupeKeyConflict         DEDUPE_KEY_CONFLICT: has `existing_run_id`
    │   ├── DefinitionDrift           DEFINITION_DRIFT
    │   ├── ScheduleExists            SCHEDULE_EXISTS
    │   └── StaleEtag                 STALE_ETAG
    ├── InvalidState                  the state of what it is about forbids it
    │   ├── IllegalTransition         ILLEGAL_TRANSITION: has `state` and `event`
    │   ├── AlreadyUndone             ALREADY_UNDONE
    │   ├── KeyTaken                  KEY_TAKEN: has `existing_run_id`
    │   ├── ParentDecided             PARENT_DECIDED
    │   ├── DefinitionRemoved         DEFINITION_REMOVED
    │   ├── TooManySignals            TOO_MANY_SIGNALS
    │   └── QueryFailed               QUERY_FAILED
    ├── LeaseLost                     LEASE_LOST
    ├── AccessDenied                  who you are is not known, or not enough
    ├── SessionRefused                a worker and the server do not speak the same protocol: HELLO_REQUIRED,
    │                                 DUPLICATE_HELLO, INVALID_HELLO, UNSUPPORTED_PROTOCOL, INVALID_FRAME,
    │                                 FRAME_TOO_LARGE, FRAME_OUT_OF_ORDER
    ├── Unavailable                   try later; the SDK has tried again by itself until its time was up
    │   ├── Overloaded                OVERLOADED, TOO_MANY_SESSIONS
    │   ├── DatabaseUnavailable       DATABASE_UNAVAILABLE
    │   ├── ServerDraining            SERVER_DRAINING
    │   ├── SessionTimedOut           SESSION_TIMED_OUT
    │   ├── NoWorker                  NO_WORKER
    │   └── Unreachable               no server answered; made by the SDK
    ├── ClientClosed                  the client was closed while it asked; made by the SDK
    ├── ServerFault                   INTERNAL, and whatever this SDK does not know
    ├── RunNotCompleted               the run that was waited for ended without an output; made by the SDK
    │   ├── RunFailed
    │   ├── RunCancelled
    │   └── RunTerminated
    ├── NotEncodable (ValueError)     a Python value is not JSON; made by the SDK
    └── NotDecodable (ValueError)     JSON does not fit the Python type; made by the SDK

What a step raises to choose what its failure means is in `step_errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from fencepost.models import Failure, Run, RunState


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault:

    ``path`` is a field's path or a JSON Pointer ('' for the whole), ``message`` is for people.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path or '(whole)'}: {self.message}"


class FencepostError(Exception):
    """The base of all that the SDK raises.

    ``reason`` is the name of the ErrorReason without its prefix, or a name of the SDK's own for what no
    server said; ``violations`` lists every fault of the request; ``metadata`` has details for programs;
    ``retry_after`` is the delay in seconds that the server asked for, if any.
    """

    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: Sequence[Violation] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after

    def __str__(self) -> str:
        lines = [f"{self.reason}: {self.message}", *(f"  {violation}" for violation in self.violations)]
        return "\n".join(lines)


class InvalidRequest(FencepostError):
    """The request is wrong whatever the state of the server: correct it."""

    default_reason = "INVALID_REQUEST"


class InvalidJson(InvalidRequest):
    """A payload is not JSON as the contract demands."""

    default_reason = "INVALID_JSON"


class InputSchemaMismatch(InvalidRequest):
    """A run's input breaks the workflow's input schema."""

    default_reason = "INPUT_SCHEMA_MISMATCH"


class PayloadTooLarge(InvalidRequest):
    """A payload is over the server's limit."""

    default_reason = "PAYLOAD_TOO_LARGE"


class InvalidManifest(InvalidRequest):
    """A manifest has faults; ``violations`` has each with its path in the manifest."""

    default_reason = "INVALID_MANIFEST"


class InvalidPageToken(InvalidRequest):
    """The page token is of another query or release: begin with the first page."""

    default_reason = "INVALID_PAGE_TOKEN"


class NotFound(FencepostError):
    """What was asked for is not in the namespace."""


class UnknownWorkflow(NotFound):
    """No definition was registered for the workflow."""

    default_reason = "UNKNOWN_WORKFLOW"


class UnknownDefinition(NotFound):
    """The workflow has no definition with that hash."""

    default_reason = "UNKNOWN_DEFINITION"


class RunNotFound(NotFound):
    """No run has that id or key."""

    default_reason = "RUN_NOT_FOUND"


class ScheduleNotFound(NotFound):
    """No schedule has that id."""

    default_reason = "SCHEDULE_NOT_FOUND"


class Conflict(FencepostError):
    """What was to be made exists, and differs."""


class RequestKeyConflict(Conflict):
    """The request key names a run that was started with another input."""

    default_reason = "REQUEST_KEY_CONFLICT"

    @property
    def existing_run_id(self) -> str:
        """The run that has the key."""
        return self.metadata.get("existing_run_id", "")


class RequestIdConflict(Conflict):
    """The request id was used for another request."""

    default_reason = "REQUEST_ID_CONFLICT"


class DedupeKeyConflict(Conflict):
    """The dedupe key is held by a run that was started with another input and has not ended."""

    default_reason = "DEDUPE_KEY_CONFLICT"

    @property
    def existing_run_id(self) -> str:
        """The run that holds the key."""
        return self.metadata.get("existing_run_id", "")


class DefinitionDrift(Conflict):
    """The compatibility id is registered with another manifest: choose a new one."""

    default_reason = "DEFINITION_DRIFT"


class ScheduleExists(Conflict):
    """A schedule with that id does something else: update it, or choose another id."""

    default_reason = "SCHEDULE_EXISTS"


class StaleEtag(Conflict):
    """The schedule was changed since it was read: read it again."""

    default_reason = "STALE_ETAG"


class InvalidState(FencepostError):
    """The state of what it is about forbids it."""

    default_reason = "FAILED_PRECONDITION"


class IllegalTransition(InvalidState):
    """The state of the run forbids it."""

    default_reason = "ILLEGAL_TRANSITION"

    @property
    def state(self) -> str:
        """The state of the run."""
        return self.metadata.get("state", "")

    @property
    def event(self) -> str:
        """What can't happen in it."""
        return self.metadata.get("event", "")


class AlreadyUndone(InvalidState):
    """Steps of the run were undone, so it can't go on: start a new one."""

    default_reason = "ALREADY_UNDONE"


class KeyTaken(InvalidState):
    """Another run holds the run's dedupe key now."""

    default_reason = "KEY_TAKEN"

    @property
    def existing_run_id(self) -> str:
        """The run that holds the key."""
        return self.metadata.get("existing_run_id", "")


class ParentDecided(InvalidState):
    """The run is a child whose parent has gone on with its failure: retry the parent."""

    default_reason = "PARENT_DECIDED"


class DefinitionRemoved(InvalidState):
    """The definition was removed: activate or register another one."""

    default_reason = "DEFINITION_REMOVED"


class TooManySignals(InvalidState):
    """The run holds as many signals that nobody has taken as it may. Not tried again by itself: it may last."""

    default_reason = "TOO_MANY_SIGNALS"


class QueryFailed(InvalidState):
    """The run's code has no such query, or the query raised an error: the message says which."""

    default_reason = "QUERY_FAILED"


class LeaseLost(FencepostError):
    """Somebody else has the step, or it has ended."""

    default_reason = "LEASE_LOST"


class AccessDenied(FencepostError):
    """The server does not know who asks, or that one may not do it."""

    default_reason = "PERMISSION_DENIED"


class SessionRefused(FencepostError):
    """Worker and server do not understand each other: one of them must be updated or set up otherwise."""

    default_reason = "INVALID_HELLO"


class Unavailable(FencepostError):
    """It can't be done now. The SDK has tried again until its time was up; try later."""

    default_reason = "UNAVAILABLE"


class Overloaded(Unavailable):
    """The server has as many sessions or requests as it can take."""

    default_reason = "OVERLOADED"


class DatabaseUnavailable(Unavailable):
    """The server can't reach its database."""

    default_reason = "DATABASE_UNAVAILABLE"


class ServerDraining(Unavailable):
    """The server is shutting down."""

    default_reason = "SERVER_DRAINING"


class SessionTimedOut(Unavailable):
    """The server ended a worker's session because it had not read or answered for too long."""

    default_reason = "SESSION_TIMED_OUT"


class NoWorker(Unavailable):
    """No connected worker has the run's code: start one."""

    default_reason = "NO_WORKER"


class Unreachable(Unavailable):
    """No server answered at the address, or not in time."""

    default_reason = "UNREACHABLE"


class ClientClosed(FencepostError):
    """The client was closed while it asked. What it asked for may have been done, or not."""

    default_reason = "CLIENT_CLOSED"

    def __init__(self, message: str = "the client was closed while it asked, which may have been done") -> None:
        super().__init__(message)


class ServerFault(FencepostError):
    """A fault of the server, or an answer that this SDK does not know."""


class RunNotCompleted(FencepostError):
    """The run that was waited for has ended without an output.

    ``run`` is the run as it ended, ``state`` how, ``failure`` why. Raised as one of its subclasses, or as itself for an
    end that this SDK does not know.
    """

    default_reason = "RUN_NOT_COMPLETED"

    def __init__(self, run: Run, failure: Failure) -> None:
        where = f" at node {failure.node_id}" if failure.node_id else ""
        where += f", attempt {failure.attempt}" if failure.attempt else ""  # a node that is no step has none
        how = run.state.value.lower()
        what = f"run {run.run_id} {how}" if how == "failed" else f"run {run.run_id} was {how}"
        super().__init__(f"{what}{where}: {failure.kind.value} {failure.code}: {failure.message}")
        self.run = run
        self.failure = failure

    def __reduce__(self) -> tuple[type[RunNotCompleted], tuple[Run, Failure]]:
        return type(self), (self.run, self.failure)

    @property
    def state(self) -> RunState:
        """What the run ended as."""
        return self.run.state


class RunFailed(RunNotCompleted):
    """The run failed."""

    default_reason = "RUN_FAILED"


class RunCancelled(RunNotCompleted):
    """The run was cancelled, and what could be undone of it was undone."""

    default_reason = "RUN_CANCELLED"


class RunTerminated(RunNotCompleted):
    """The run was terminated; nothing was undone."""

    default_reason = "RUN_TERMINATED"


class NotEncodable(FencepostError, ValueError):
    """A Python value has no JSON:

    NaN, an undeclared set or bytes, a cycle, a lone surrogate, an unknown class.
    """

    default_reason = "NOT_ENCODABLE"


class NotDecodable(FencepostError, ValueError):
    """A payload does not fit the Python type that it was to become."""

    default_reason = "NOT_DECODABLE"


BY_REASON: Mapping[str, type[FencepostError]] = {
    kind.default_reason: kind
    for kind in (
        InvalidRequest,
        InvalidJson,
        InputSchemaMismatch,
        PayloadTooLarge,
        InvalidManifest,
        InvalidPageToken,
        UnknownWorkflow,
        UnknownDefinition,
        RunNotFound,
        ScheduleNotFound,
        RequestKeyConflict,
        RequestIdConflict,
        DedupeKeyConflict,
        DefinitionDrift,
        ScheduleExists,
        StaleEtag,
        IllegalTransition,
        AlreadyUndone,
        KeyTaken,
        ParentDecided,
        DefinitionRemoved,
        TooManySignals,
        QueryFailed,
        LeaseLost,
        Overloaded,
        DatabaseUnavailable,
        ServerDraining,
        SessionTimedOut,
        NoWorker,
    )
} | {
    "TOO_MANY_SESSIONS": Overloaded,
    "HELLO_REQUIRED": SessionRefused,
    "DUPLICATE_HELLO": SessionRefused,
    "INVALID_HELLO": SessionRefused,
    "UNSUPPORTED_PROTOCOL": SessionRefused,
    "INVALID_FRAME": SessionRefused,
    "FRAME_TOO_LARGE": SessionRefused,
    "FRAME_OUT_OF_ORDER": SessionRefused,
    "INTERNAL": ServerFault,
}
"""The class of each reason that a caller can meet. One that is not here is classed by its gRPC code."""
