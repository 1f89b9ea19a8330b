"""What the client returns: runs and definitions, as plain frozen values (`events` and `schedules` have the rest).

Times are aware datetimes in UTC, by the database's clock. Conversions from the contract's messages are
functions of this module; nothing else of the SDK's public surface shows a message.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost.codec import NULL, Value, json_value, utf8_length
from fencepost.errors import Violation
from fencepost.v1 import definition_service_pb2, payload_pb2, run_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencepost.policies import Seconds
    from fencepost.v1 import run_service_pb2
    from fencepost.workflow import Workflow

E = TypeVar("E", bound=enum.StrEnum)


class RunState(enum.StrEnum):
    """Where a run is in its life. A state that this SDK does not know yet is UNSPECIFIED."""

    UNSPECIFIED = "UNSPECIFIED"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    BLOCKED = "BLOCKED"
    WAITING = "WAITING"
    PAUSED = "PAUSED"
    ENDING = "ENDING"
    UNDOING = "UNDOING"
    CANCELLED = "CANCELLED"
    TERMINATED = "TERMINATED"
    CONTINUED = "CONTINUED"

    @property
    def is_final(self) -> bool:
        """Whether nothing changes the run any more, but a retry of a FAILED one."""
        return self in {
            RunState.COMPLETED,
            RunState.FAILED,
            RunState.CANCELLED,
            RunState.TERMINATED,
            RunState.CONTINUED,
        }


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
    REMOVED = "REMOVED"


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

    ``lease_expire_time`` and ``worker_name`` are set while it is LEASED; ``undo`` tells that it undoes a step;
    ``scope_id`` and ``item`` say in which branch or item of a parallel or map node it is (0 for none);
    ``checkpoint_number`` is that of its newest checkpoint, ``progress`` what its worker last said of it; ``decide``
    tells that it is no step, but the turn of a code workflow's function; ``waiting_reason`` is why nothing happens, if
    that is known, such as NO_WORKER.
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
    undo: bool = False
    scope_id: int = 0
    item: int = 0
    checkpoint_number: int = 0
    progress: Value | None = None
    decide: bool = False
    waiting_reason: str = ""


@dataclass(frozen=True, slots=True)
class OpenWait:
    """Something other than a step that a run waits for: a time, a signal or the end of a child run, one of the three.

    ``seq`` is the number of the event that began the wait.
    """

    seq: int
    node_id: str
    fire_time: dt.datetime | None = None
    signal_name: str = ""
    child_run_id: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was when the server answered.

    Lists leave out ``input``, ``output``, ``open_steps``, ``open_waits`` and ``pending_signals``. ``ending`` is what a
    run that is about to end will end as, None for others. ``next_run_id`` goes on with the work of one that is
    CONTINUED, as this one does with that of ``previous_run_id``; ``waiting_reason`` is why nothing happens, if that is
    known, such as NO_WORKER. ``pending_signals`` are those that it holds and no wait has taken: how many of each name,
    of 100 names at most.
    """

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
    attributes: Mapping[str, str] = field(default_factory=dict)
    ending: RunState | None = None
    parent_run_id: str = ""
    open_waits: tuple[OpenWait, ...] = ()
    next_run_id: str = ""
    previous_run_id: str = ""
    waiting_reason: str = ""
    pending_signals: Mapping[str, int] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state.is_final


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

    workflow_id: str | Workflow[..., Any]
    input: object = None
    request_key: str = ""
    user_id: str = ""
    priority: int = 0
    definition_hash: str = ""
    dedupe_key: str = ""
    on_active_duplicate: DuplicatePolicy = "conflict"
    attributes: Mapping[str, str] = field(default_factory=dict)
    start_delay: Seconds = 0.0
    run_timeout: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal that a run was given: the state of the run then, and the number of the signal's event."""

    state: RunState
    seq: int


@dataclass(frozen=True, slots=True)
class Activation:
    """A definition that new runs take now; ``previous_hash`` is that of the one before, '' if there was none."""

    definition: Definition
    previous_hash: str


@dataclass(frozen=True, slots=True)
class Removal:
    """A definition that was removed. ``remaining_runs`` of its runs have not ended: repeat it until none remains."""

    definition: Definition
    remaining_runs: int


def enum_of(kind: type[E], wrapper: Any, prefix: str, number: int) -> dict[int, E]:
    """Map the numbers of a contract's enum to the values of ours; what we lack becomes ``number``'s."""
    values: dict[int, E] = {}
    for name, value in wrapper.items():
        short = name.removeprefix(prefix)
        values[value] = kind(short) if short in kind.__members__ else values[number]
    return values


RUN_STATES = enum_of(RunState, run_pb2.RunState, "RUN_STATE_", 0)
_STEP_STATES = enum_of(StepState, run_pb2.StepState, "STEP_STATE_", 0)
_FAILURE_KINDS = enum_of(FailureKind, run_pb2.FailureKind, "FAILURE_KIND_", 0)
_DEFINITION_STATES = enum_of(DefinitionState, definition_service_pb2.DefinitionState, "DEFINITION_STATE_", 0)
# Each of ours has a number of the contract's; UNSPECIFIED has 0, whatever else was mapped to it.
RUN_STATE_NUMBERS: dict[RunState, run_pb2.RunState.ValueType] = {
    state: cast("run_pb2.RunState.ValueType", number) for number, state in reversed(RUN_STATES.items())
}
FAILURE_KIND_NUMBERS = {kind: run_pb2.FailureKind.Value(f"FAILURE_KIND_{kind.name}") for kind in FailureKind}


_NO_METADATA: Mapping[str, str] = {}


def time_of(stamp: Timestamp) -> dt.datetime:
    """A Timestamp as an aware datetime in UTC."""
    return stamp.ToDatetime(tzinfo=dt.UTC)


def stamp_of(when: dt.datetime) -> Timestamp:
    """An aware datetime as a Timestamp. Raises ValueError for a naive one, which no server could know the zone of."""
    if when.tzinfo is None:
        raise ValueError(f"{when!r} has no time zone: give it one, such as datetime.UTC")
    stamp = Timestamp()
    stamp.FromDatetime(when)
    return stamp


_LONGEST_DURATION = 315_576_000_000
"""Seconds, as google.protobuf.Duration says."""


def duration_of(seconds: float) -> Duration:
    """Seconds as a Duration. Raises ValueError for what is longer than one can be."""
    if not abs(seconds) <= _LONGEST_DURATION:
        raise ValueError(f"{seconds} s is no length of time that can be told")
    nanos = round(seconds * 1e9)
    sign = -1 if nanos < 0 else 1
    whole, rest = divmod(abs(nanos), 1_000_000_000)
    return Duration(seconds=sign * whole, nanos=sign * rest)


def value_of(payload: payload_pb2.Payload) -> Value:
    """A Payload as a Value."""
    metadata = dict(payload.metadata) if payload.metadata else _NO_METADATA
    if payload.HasField("json"):
        return Value(payload.json, None, metadata) if metadata else json_value(payload.json)
    if payload.HasField("binary"):
        return Value(None, payload.binary, metadata)
    return Value(metadata=metadata) if metadata else NULL


def payload_size(value: Value) -> int:
    """How many bytes a payload has, its metadata included."""
    return value.size + sum(utf8_length(key) + utf8_length(text) for key, text in value.metadata.items())


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
        state=RUN_STATES.get(run.state, RunState.UNSPECIFIED),
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
        attributes=dict(run.attributes),
        ending=RUN_STATES.get(run.ending, RunState.UNSPECIFIED) if run.ending else None,
        parent_run_id=run.parent_run_id,
        open_waits=tuple(_open_wait_of(wait) for wait in run.open_waits),
        next_run_id=run.next_run_id,
        previous_run_id=run.previous_run_id,
        waiting_reason=run.waiting_reason,
        pending_signals={signal.signal_name: signal.count for signal in run.pending_signals},
    )


def _open_wait_of(wait: run_pb2.OpenWait) -> OpenWait:
    return OpenWait(
        seq=wait.seq,
        node_id=wait.node_id,
        fire_time=time_of(wait.fire_time) if wait.HasField("fire_time") else None,
        signal_name=wait.signal_name,
        child_run_id=wait.child_run_id,
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
        undo=step.undo,
        scope_id=step.scope_id,
        item=step.item,
        checkpoint_number=step.checkpoint_number,
        progress=value_of(step.progress) if step.HasField("progress") else None,
        decide=step.decide,
        waiting_reason=step.waiting_reason,
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
