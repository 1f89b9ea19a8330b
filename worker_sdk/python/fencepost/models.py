"""What the client returns: runs, their events and definitions, as plain frozen values.

Times are aware datetimes in UTC, by the database's clock. Conversions from the contract's messages are
functions of this module; nothing else of the SDK's public surface shows a message.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from fencepost.codec import NULL, Value
from fencepost.errors import Violation
from fencepost.v1 import definition_service_pb2, payload_pb2, run_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.timestamp_pb2 import Timestamp

    from fencepost.v1 import run_service_pb2

E = TypeVar("E", bound=enum.StrEnum)


class RunState(enum.StrEnum):
    """Where a run is in its life. A state that this SDK does not know yet is UNSPECIFIED."""

    UNSPECIFIED = "UNSPECIFIED"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    BLOCKED = "BLOCKED"

    @property
    def is_final(self) -> bool:
        """Whether nothing changes the run any more."""
        return self in {RunState.COMPLETED, RunState.FAILED}


class StepState(enum.StrEnum):
    """Where an open step is."""

    UNSPECIFIED = "UNSPECIFIED"
    READY = "READY"
    LEASED = "LEASED"
    RETRYING = "RETRYING"
    PARKED = "PARKED"


class FailureKind(enum.StrEnum):
    """What a failure means for the next attempt."""

    UNSPECIFIED = "UNSPECIFIED"
    OPERATIONAL = "OPERATIONAL"
    CORRECTIVE = "CORRECTIVE"
    PERMANENT = "PERMANENT"


class DefinitionState(enum.StrEnum):
    """Whether new runs take a definition."""

    UNSPECIFIED = "UNSPECIFIED"
    ACTIVE = "ACTIVE"
    PREVIOUS = "PREVIOUS"


class EventKind(enum.StrEnum):
    """What an event tells. One that this SDK does not know yet is UNKNOWN."""

    UNKNOWN = "unknown"
    RUN_STARTED = "run_started"
    STEP_SCHEDULED = "step_scheduled"
    STEP_RETRYING = "step_retrying"
    STEP_COMPLETED = "step_completed"
    STEP_FAILED = "step_failed"
    RUN_COMPLETED = "run_completed"
    RUN_FAILED = "run_failed"
    RUN_BLOCKED = "run_blocked"

    @property
    def is_final(self) -> bool:
        """Whether no event follows."""
        return self in {EventKind.RUN_COMPLETED, EventKind.RUN_FAILED}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a step or a run failed. ``node_id`` and ``attempt`` are those of the step, if it was one."""

    kind: FailureKind
    code: str
    message: str
    feedback: Value | None = None
    node_id: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step of a run that has not ended.

    ``lease_expire_time`` and ``worker_name`` are set while it is LEASED.
    """

    task_id: int
    node_id: str
    handler: str
    queue: str
    state: StepState
    attempt: int
    operational_failures: int
    corrective_failures: int
    ready_time: dt.datetime | None
    lease_expire_time: dt.datetime | None
    worker_name: str
    last_failure: Failure | None


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was when the server answered. Lists leave out ``input``, ``output`` and ``open_steps``."""

    run_id: str
    namespace: str
    workflow_id: str
    definition_hash: str
    state: RunState
    user_id: str
    request_key: str
    priority: int
    input: Value | None
    output: Value | None
    failure: Failure | None
    create_time: dt.datetime
    end_time: dt.datetime | None
    last_seq: int
    open_steps: tuple[OpenStep, ...]
    dedupe_key: str = ""

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state.is_final


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a run's history. Fields that its kind does not have keep their defaults.

    ``payload`` is the run's input (run_started) or the step's output (step_completed); ``input_seq`` and
    ``output_seq`` are the numbers of the events that hold a step's input and the run's output; ``ready_time``
    is when the next attempt may be taken (step_retrying).
    """

    seq: int
    time: dt.datetime
    kind: EventKind
    workflow_id: str = ""
    definition_hash: str = ""
    task_id: int = 0
    node_id: str = ""
    handler: str = ""
    queue: str = ""
    attempt: int = 0
    fencing_token: int = 0
    payload: Value | None = None
    failure: Failure | None = None
    input_seq: int = 0
    output_seq: int = 0
    ready_time: dt.datetime | None = None
    operational_failures: int = 0
    corrective_failures: int = 0

    def __str__(self) -> str:
        """What people want to read of it, in one line; the payload is left out."""
        parts = [str(self.seq), self.kind.value, self.node_id, f"attempt {self.attempt}" if self.attempt else ""]
        if self.failure is not None:
            parts.append(f"{self.failure.kind.value} {self.failure.code}: {self.failure.message}".partition("\n")[0])
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Definition:
    """A registered manifest. ``created`` is False if registering found it there, and True of what was only
    read.

    ``manifest_json`` is the canonical manifest; lists leave it out.
    """

    workflow_id: str
    definition_hash: str
    compatibility_id: str
    state: DefinitionState
    create_time: dt.datetime
    manifest_json: str = ""
    created: bool = True


DuplicatePolicy: TypeAlias = Literal["conflict", "bind"]
"""What becomes of a start whose dedupe key is held by a run with another input: it is refused (DedupeKeyConflict), or
answered with that run (``input_differs``).
"""


@dataclass(frozen=True, slots=True)
class StartRun:
    """One run to start, as `Client.start_runs` takes them; `Client.start_run` says what the fields mean."""

    workflow_id: str
    input: object = None
    request_key: str = ""
    user_id: str = ""
    priority: int = 0
    definition_hash: str = ""
    dedupe_key: str = ""
    on_active_duplicate: DuplicatePolicy = "conflict"


def _enum(kind: type[E], wrapper: Any, prefix: str, number: int) -> dict[int, E]:
    """Map the numbers of a contract's enum to the values of ours; what we lack becomes ``number``'s."""
    values: dict[int, E] = {}
    for name, value in wrapper.items():
        short = name.removeprefix(prefix)
        values[value] = kind(short) if short in kind.__members__ else values[number]
    return values


_RUN_STATES = _enum(RunState, run_pb2.RunState, "RUN_STATE_", 0)
_STEP_STATES = _enum(StepState, run_pb2.StepState, "STEP_STATE_", 0)
_FAILURE_KINDS = _enum(FailureKind, run_pb2.FailureKind, "FAILURE_KIND_", 0)
_DEFINITION_STATES = _enum(DefinitionState, definition_service_pb2.DefinitionState, "DEFINITION_STATE_", 0)
# Each of ours has a number of the contract's; UNSPECIFIED has 0, whatever else was mapped to it.
RUN_STATE_NUMBERS: dict[RunState, run_pb2.RunState.ValueType] = {
    state: cast("run_pb2.RunState.ValueType", number) for number, state in reversed(_RUN_STATES.items())
}
FAILURE_KIND_NUMBERS = {kind: run_pb2.FailureKind.Value(f"FAILURE_KIND_{kind.name}") for kind in FailureKind}


_NO_METADATA: Mapping[str, str] = {}


def time_of(stamp: Timestamp) -> dt.datetime:
    """A Timestamp as an aware datetime in UTC."""
    return stamp.ToDatetime(tzinfo=dt.UTC)


def value_of(payload: payload_pb2.Payload) -> Value:
    """A Payload as a Value."""
    metadata = dict(payload.metadata) if payload.metadata else _NO_METADATA
    if payload.HasField("json"):
        return Value(payload.json, None, metadata)
    if payload.HasField("binary"):
        return Value(None, payload.binary, metadata)
    return Value(metadata=metadata) if metadata else NULL


def fill_payload(payload: payload_pb2.Payload, value: Value) -> None:
    """Write a Value into an empty Payload; JSON null stays empty."""
    if value.json is not None:
        payload.json = value.json
    elif value.binary is not None:
        payload.binary = value.binary
    if value.metadata:
        payload.metadata.update(value.metadata)


def failure_of(failure: run_pb2.Failure) -> Failure:
    """A Failure message as a value."""
    return Failure(
        kind=_FAILURE_KINDS.get(failure.kind, FailureKind.UNSPECIFIED),
        code=failure.code,
        message=failure.message,
        feedback=value_of(failure.feedback) if failure.HasField("feedback") else None,
        node_id=failure.node_id,
        attempt=failure.attempt,
    )


def run_of(run: run_pb2.Run) -> Run:
    """A Run message as a value."""
    return Run(
        run_id=run.run_id,
        namespace=run.namespace,
        workflow_id=run.workflow_id,
        definition_hash=run.definition_hash,
        state=_RUN_STATES.get(run.state, RunState.UNSPECIFIED),
        user_id=run.user_id,
        request_key=run.request_key,
        priority=run.priority,
        input=value_of(run.input) if run.HasField("input") else None,
        output=value_of(run.output) if run.HasField("output") else None,
        failure=failure_of(run.failure) if run.HasField("failure") else None,
        create_time=time_of(run.create_time),
        end_time=time_of(run.end_time) if run.HasField("end_time") else None,
        last_seq=run.last_seq,
        open_steps=tuple(_open_step_of(step) for step in run.open_steps),
        dedupe_key=run.dedupe_key,
    )


def _open_step_of(step: run_pb2.OpenStep) -> OpenStep:
    return OpenStep(
        task_id=step.task_id,
        node_id=step.node_id,
        handler=step.handler,
        queue=step.queue,
        state=_STEP_STATES.get(step.state, StepState.UNSPECIFIED),
        attempt=step.attempt,
        operational_failures=step.operational_failures,
        corrective_failures=step.corrective_failures,
        ready_time=time_of(step.ready_time) if step.HasField("ready_time") else None,
        lease_expire_time=time_of(step.lease_expire_time) if step.HasField("lease_expire_time") else None,
        worker_name=step.worker_name,
        last_failure=failure_of(step.last_failure) if step.HasField("last_failure") else None,
    )


def _details_of(event: run_pb2.Event) -> dict[str, Any]:
    """The fields of an event's kind under the names that `Event` has."""
    kind = event.WhichOneof("kind")
    if kind is None:
        return {}
    details = getattr(event, kind)
    found: dict[str, Any] = {}
    for field, value in details.ListFields():
        if field.name in {"input", "output"}:
            found["payload"] = value_of(value)
        elif field.name == "failure":
            found["failure"] = failure_of(value)
        elif field.name == "ready_time":
            found["ready_time"] = time_of(value)
        elif field.name in Event.__slots__:
            found[field.name] = value
    if kind in {"run_started", "step_completed"}:
        found.setdefault("payload", NULL)
    return found


def event_of(event: run_pb2.Event) -> Event:
    """An Event message as a value."""
    kind = event.WhichOneof("kind") or "unknown"
    return Event(
        seq=event.seq,
        time=time_of(event.event_time),
        kind=EventKind(kind) if kind in set(EventKind) else EventKind.UNKNOWN,
        **_details_of(event),
    )


def definition_of(definition: definition_service_pb2.Definition, *, created: bool = True) -> Definition:
    """A Definition message as a value."""
    return Definition(
        workflow_id=definition.workflow_id,
        definition_hash=definition.definition_hash,
        compatibility_id=definition.compatibility_id,
        state=_DEFINITION_STATES.get(definition.state, DefinitionState.UNSPECIFIED),
        create_time=time_of(definition.create_time),
        manifest_json=definition.manifest_json,
        created=created,
    )


def violations_of(violations: Iterable[run_service_pb2.Violation]) -> tuple[Violation, ...]:
    """Violation messages as values."""
    return tuple(Violation(violation.path, violation.message) for violation in violations)
