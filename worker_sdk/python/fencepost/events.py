"""The events of a run's history, as plain frozen values, and how they are made of the contract's messages."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fencepost.codec import NULL, Value
from fencepost.models import RUN_STATES, Failure, RunState, enum_of, failure_of, time_of, value_of
from fencepost.v1 import run_pb2


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
    TIMER_STARTED = "timer_started"
    TIMER_FIRED = "timer_fired"
    SIGNAL_AWAITED = "signal_awaited"
    SIGNAL_RECEIVED = "signal_received"
    SIGNAL_TAKEN = "signal_taken"
    SCOPE_OPENED = "scope_opened"
    ITEM_OPENED = "item_opened"
    SCOPE_CLOSED = "scope_closed"
    CHOICE_MADE = "choice_made"
    INPUT_BUILT = "input_built"
    CHILD_SCHEDULED = "child_scheduled"
    CHILD_ENDED = "child_ended"
    NODE_FAILED = "node_failed"
    RUN_ENDING = "run_ending"
    STEP_CANCELLED = "step_cancelled"
    UNDO_SCHEDULED = "undo_scheduled"
    UNDO_RETRYING = "undo_retrying"
    UNDO_COMPLETED = "undo_completed"
    UNDO_FAILED = "undo_failed"
    UNDO_SKIPPED = "undo_skipped"
    RUN_CANCELLED = "run_cancelled"
    RUN_TERMINATED = "run_terminated"
    RUN_PAUSED = "run_paused"
    RUN_RESUMED = "run_resumed"
    RUN_RETRIED = "run_retried"
    LOCAL_STEP_ENDED = "local_step_ended"
    PATCH_MARKED = "patch_marked"
    ATTRIBUTES_SET = "attributes_set"
    OP_CANCELLED = "op_cancelled"
    RUN_CONTINUED = "run_continued"

    @property
    def is_final(self) -> bool:
        """Whether the run ends with it. Nothing follows, but RUN_RETRIED after RUN_FAILED."""
        return self in {
            EventKind.RUN_COMPLETED,
            EventKind.RUN_FAILED,
            EventKind.RUN_CANCELLED,
            EventKind.RUN_TERMINATED,
            EventKind.RUN_CONTINUED,
        }


class TimerKind(enum.StrEnum):
    """What a timer is for. One that this SDK does not know yet is UNSPECIFIED."""

    UNSPECIFIED = "UNSPECIFIED"
    SLEEP = "SLEEP"
    SIGNAL_TIMEOUT = "SIGNAL_TIMEOUT"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    TOTAL_TIMEOUT = "TOTAL_TIMEOUT"
    RUN_TIMEOUT = "RUN_TIMEOUT"
    START_DELAY = "START_DELAY"
    GRACE = "GRACE"


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a run's history. Fields that its kind does not have keep their defaults.

    ``payload`` is what it carries: the input of the run (run_started), of a node (input_built) or of an item
    (item_opened); the output of a step, an undo handler, a scope or a child (step_completed, undo_completed,
    scope_closed, child_ended); a signal's payload (signal_received). ``input_seq`` and ``output_seq`` are the numbers
    of the events that hold an input and the run's output; the other fields named ``…_seq`` are numbers of events, too.
    ``ready_time`` is when the next attempt may be taken (step_retrying, undo_retrying). ``state`` is what a run is
    about to end as (run_ending), or what a child ended as (child_ended); ``grace`` is in seconds (run_ending).
    ``scope_id`` and ``item`` say in which branch or item of a parallel or map node it happened, and ``items`` how many
    there are (scope_opened).

    Of a code run: ``op`` is the number of the durable call, ``node_id`` its name, ``input_hash`` what its input is told
    by at a replay; a step or child carries its input itself (step_scheduled, child_scheduled), and local_step_ended the
    step's output, ``attempt`` being the last one. ``delay`` is in seconds (timer_started). An empty value in
    ``attributes`` took that label away (attributes_set). A run that goes on for another one names it in
    ``continued_from_run_id`` (run_started), the one that is gone on with has ``next_run_id`` (run_continued). A failure
    that a replay passes by, because its step is tried again, is event ``ignored_seq`` (run_retried). What is undone is
    event ``of_seq``, of an earlier run of the chain if ``of_run_id`` names one (undo_scheduled, undo_skipped).
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
    scope_id: int = 0
    item: int = 0
    items: int = 0
    fire_time: dt.datetime | None = None
    timeout_time: dt.datetime | None = None
    timer_seq: int = 0
    timer_kind: TimerKind | None = None
    signal_name: str = ""
    request_id: str = ""
    wait_seq: int = 0
    signal_seq: int = 0
    case_index: int = 0
    child_run_id: str = ""
    child_seq: int = 0
    state: RunState | None = None
    grace: float | None = None
    of_seq: int = 0
    of_run_id: str = ""
    reason: str = ""
    op: int = 0
    input_hash: bytes = b""
    delay: float | None = None
    patch_id: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    continued_from_run_id: str = ""
    next_run_id: str = ""
    ignored_seq: int = 0
    deadline_time: dt.datetime | None = None

    def __str__(self) -> str:
        """What people want to read of it, in one line; the payload is left out."""
        op = f"op {self.op}" if self.op else ""
        named = "" if self.signal_name == self.node_id else self.signal_name
        parts = [str(self.seq), self.kind.value, op, self.node_id, named, self.patch_id, self.next_run_id]
        if self.attempt:
            parts.append(f"attempt {self.attempt}")
        if self.delay is not None:
            parts.append(f"{self.delay:g} s")
        parts += [f"{key}={value}" for key, value in sorted(self.attributes.items())]
        if self.state is not None:
            parts.append(self.state.value)
        if self.failure is not None:
            parts.append(f"{self.failure.kind.value} {self.failure.code}: {self.failure.message}".partition("\n")[0])
        elif self.reason:
            parts.append(self.reason.partition("\n")[0])
        return " ".join(part for part in parts if part)


_TIMER_KINDS = enum_of(TimerKind, run_pb2.TimerKind, "TIMER_KIND_", 0)
_PAYLOADS = frozenset({"input", "output", "payload"})
_TIMES = frozenset({"ready_time", "fire_time", "timeout_time", "deadline_time"})
_SECONDS = frozenset({"grace", "delay"})
_OTHER_NAMES = {"name": "node_id", "attempts": "attempt"}
# Their payload is always there: one that is JSON null travels as none.
_CARRIERS = frozenset(
    {
        EventKind.RUN_STARTED,
        EventKind.STEP_COMPLETED,
        EventKind.UNDO_COMPLETED,
        EventKind.SIGNAL_RECEIVED,
        EventKind.ITEM_OPENED,
        EventKind.INPUT_BUILT,
        EventKind.SCOPE_CLOSED,
    }
)
_SOMETIMES = frozenset(
    {EventKind.CHILD_ENDED, EventKind.LOCAL_STEP_ENDED, EventKind.STEP_SCHEDULED, EventKind.CHILD_SCHEDULED}
)


def event_of(event: run_pb2.Event) -> Event:
    """An Event message as a value."""
    name = event.WhichOneof("kind")
    kind = EventKind(name) if name is not None and name in set(EventKind) else EventKind.UNKNOWN
    found = _details_of(getattr(event, name)) if name is not None else {}
    if kind in _CARRIERS or (kind in _SOMETIMES and _carries(kind, found)):
        found.setdefault("payload", NULL)
    return Event(seq=event.seq, time=time_of(event.event_time), kind=kind, **found)


def _carries(kind: EventKind, found: dict[str, Any]) -> bool:
    """Whether an event that may have a payload has one."""
    if kind is EventKind.CHILD_ENDED:
        return found.get("state") is RunState.COMPLETED
    if kind is EventKind.LOCAL_STEP_ENDED:
        return "failure" not in found
    return "op" in found


def _details_of(details: Any) -> dict[str, Any]:
    """The fields of an event's kind under the names that `Event` has."""
    found: dict[str, Any] = {}
    for descriptor, value in details.ListFields():
        if descriptor.name in _PAYLOADS:
            found["payload"] = value_of(value)
        elif descriptor.name == "failure":
            found["failure"] = failure_of(value)
        elif descriptor.name in _TIMES:
            found[descriptor.name] = time_of(value)
        elif descriptor.name == "state":
            found["state"] = RUN_STATES.get(value, RunState.UNSPECIFIED)
        elif descriptor.name == "kind":
            found["timer_kind"] = _TIMER_KINDS.get(value, TimerKind.UNSPECIFIED)
        elif descriptor.name in _SECONDS:
            found[descriptor.name] = value.seconds + value.nanos / 1e9
        elif descriptor.name == "attributes":
            found["attributes"] = dict(value)
        elif descriptor.name in _OTHER_NAMES:
            found[_OTHER_NAMES[descriptor.name]] = value
        elif descriptor.name in Event.__slots__:
            found[descriptor.name] = value
    return found
