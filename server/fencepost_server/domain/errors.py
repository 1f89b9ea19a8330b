"""What a caller can be told: one class for each ErrorReason of the contract.

    FencepostError
    ├── InvalidArgument     wrong whatever the state
    ├── NotFound
    ├── AlreadyExists       a key is taken
    ├── FailedPrecondition  the state forbids it
    ├── Aborted             lost a race
    ├── ResourceExhausted   a limit; with a delay to retry after
    ├── Unavailable         the only errors to retry blindly; with a delay
    ├── DeadlineExceeded
    └── Internal

The reason of a class is its name in upper case with underscores; tests compare the two lists. The api layer
turns them into google.rpc.Status; no other layer knows gRPC codes. Reasons that are only ever found in the
failures of steps and runs or in frames, such as LEASE_EXPIRED, have a class all the same, so that there is one
list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from fencepost_server.domain.violation import Violation


class FencepostError(Exception):
    """Base. ``violations`` has every fault with its place; ``metadata`` is for programs; ``retry_after`` is in
    seconds.
    """

    reason: ClassVar[str] = ""
    retry_after: float | None = None

    def __init__(
        self, message: str, *, violations: Sequence[Violation] = (), metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})

    def __init_subclass__(cls) -> None:
        cls.reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()


class InvalidArgument(FencepostError):
    """The request is wrong whatever the state."""


class InvalidRequest(InvalidArgument):
    """Fields are missing or out of range."""


class InvalidJson(InvalidArgument):
    """A payload is not JSON within the limits."""


class InputSchemaMismatch(InvalidArgument):
    """A run's input breaks the workflow's schema."""


class PayloadTooLarge(InvalidArgument):
    """A payload is over max_payload_bytes."""


class InvalidManifest(InvalidArgument):
    """A manifest has faults."""


class InvalidPageToken(InvalidArgument):
    """A page token is not ours."""


class InvalidHello(InvalidArgument):
    """A worker introduced itself wrongly."""


class FrameTooLarge(InvalidArgument):
    """A frame is over max_frame_bytes or max_frame_items."""


class FrameOutOfOrder(InvalidArgument):
    """A frame's id is not the previous one + 1."""


class InvalidFrame(InvalidArgument):
    """A frame or an item of it is malformed."""


class NotFound(FencepostError):
    """What the request names does not exist in its namespace."""


class UnknownWorkflow(NotFound):
    """No definition was registered for the workflow."""


class UnknownDefinition(NotFound):
    """The workflow has no definition with that hash."""


class RunNotFound(NotFound):
    """No such run."""


class AlreadyExists(FencepostError):
    """A key was used for something else (I7)."""


class ScheduleNotFound(NotFound):
    """No such schedule."""


class ScheduleExists(AlreadyExists):
    """A schedule with that id has another content."""


class RequestKeyConflict(AlreadyExists):
    """The request key names a run with another input."""


class RequestIdConflict(AlreadyExists):
    """The request id was used for another request."""


class DedupeKeyConflict(AlreadyExists):
    """The dedupe key is held by a run with another input that has not ended."""


class FailedPrecondition(FencepostError):
    """The state forbids it."""


class DefinitionDrift(FailedPrecondition):
    """The compatibility id is registered with another manifest."""


class IllegalTransition(FailedPrecondition):
    """The state of the run forbids what was asked; metadata has ``state`` and ``event``."""


class AlreadyUndone(FailedPrecondition):
    """Completed steps of the run were undone: it can't go on."""


class KeyTaken(FailedPrecondition):
    """Another run holds the dedupe key of the run that is to go on."""


class ParentDecided(FailedPrecondition):
    """The parent of the run has gone on with its failure."""


class DefinitionRemoved(FailedPrecondition):
    """The definition was removed. Also the code of the failure of its runs."""


class UndoFailed(FailedPrecondition):
    """A step could not be undone; the code of the failure of a BLOCKED run."""


class ChildFailed(FailedPrecondition):
    """A child run did not complete; the code of a node's failure."""


class InvalidNodeInput(FailedPrecondition):
    """The input of a node can't be built; the code of a node's failure."""


class Nondeterminism(FailedPrecondition):
    """A worker's code does not do what the history says; the code of the failure of a BLOCKED run."""


class DeciderFailing(FailedPrecondition):
    """Workers failed too often to decide; the code of the failure of a BLOCKED run."""


class HistoryTooLong(FailedPrecondition):
    """A history is at its limit; the code of the failure of a BLOCKED run."""


class QueryFailed(FailedPrecondition):
    """The code of a run has no such query, or the query raised an error."""


class HelloRequired(FailedPrecondition):
    """The first frame was not Hello."""


class DuplicateHello(FailedPrecondition):
    """A second Hello on one stream."""


class UnsupportedProtocol(FailedPrecondition):
    """The protocol version is not spoken here."""


class SchemaVersionMismatch(FailedPrecondition):
    """The database's schema is older or newer than this release."""


class Aborted(FencepostError):
    """The caller lost a race."""


class LeaseLost(Aborted):
    """The fencing token is not the current one (I2)."""


class AdvanceOutOfOrder(Aborted):
    """The number of an Advance is not the run's last one + 1."""


class OutputSchemaMismatch(InvalidArgument):
    """A step's output breaks the node's schema; recorded as a CORRECTIVE failure."""


class LeaseExpired(Aborted):
    """A lease ran out without a heartbeat; recorded as an OPERATIONAL failure."""


class AttemptTimeout(Aborted):
    """An attempt ran longer than the node's timeout; recorded as an OPERATIONAL failure."""


class NotDelivered(Aborted):
    """A task came back too often; recorded as an OPERATIONAL failure."""


class QueueTimeout(Aborted):
    """No worker took a step in its queue_timeout; recorded as a PERMANENT failure."""


class TotalTimeout(Aborted):
    """A step took longer than its total_timeout; recorded as a PERMANENT failure."""


class RunTimeout(Aborted):
    """A run took longer than its run_timeout; the code of its failure."""


class SignalTimeout(Aborted):
    """No signal came in time; the code of a node's failure."""


class RunCancelled(Aborted):
    """The run was cancelled; the code of its failure, and why a lease was revoked."""


class RunTerminated(Aborted):
    """The run was terminated: why a lease was revoked."""


class RunEnded(Aborted):
    """The run has failed or lost its definition: why a lease was revoked."""


class StaleEtag(Aborted):
    """What was to be changed has been changed since it was read."""


class ResourceExhausted(FencepostError):
    """A limit was reached; retry after the delay."""

    retry_after = 1.0


class TooManySessions(ResourceExhausted):
    """max_sessions is reached."""


class TooManySignals(ResourceExhausted):
    """A run holds max_pending_signals signals that no wait has taken."""


class Overloaded(ResourceExhausted):
    """A queue is full."""


class Unavailable(FencepostError):
    """Retry, with the same request id, after the delay."""

    retry_after = 0.5


class DatabaseUnavailable(Unavailable):
    """The database can't be reached or did not answer in time."""


class ServerDraining(Unavailable):
    """This server is shutting down."""


class NoWorker(Unavailable):
    """No connected worker has the code of a run."""


class DeadlineExceeded(FencepostError):
    """The other side took too long."""


class SessionTimedOut(DeadlineExceeded):
    """A worker has not read or not answered for too long."""


class Internal(FencepostError):
    """A fault of ours; the message has the incident id that the log has."""
