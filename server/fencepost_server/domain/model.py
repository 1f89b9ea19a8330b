"""The nouns of the engine: states, events, failures, payloads, and the rows that decisions change.

Numbers are those that the database stores. Rows are mutable on purpose: the fold of a batch works on its own
copies of them and then writes what became of them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any


class RunState(IntEnum):
    """Where a run is in its life. The numbers are the contract's."""

    PENDING = 1
    RUNNING = 2
    COMPLETED = 3
    FAILED = 4
    BLOCKED = 5
    WAITING = 6
    PAUSED = 7
    ENDING = 8
    UNDOING = 9
    CANCELLED = 10
    TERMINATED = 11
    CONTINUED = 12

    @property
    def final(self) -> bool:
        """Nothing but a retry of a FAILED one changes a run in a final state (I4)."""
        return self in FINAL_STATES


FINAL_STATES = frozenset(
    (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.TERMINATED, RunState.CONTINUED)
)


class EventType(IntEnum):
    """What an entry of a history says."""

    RUN_STARTED = 1
    STEP_SCHEDULED = 2
    STEP_RETRYING = 3
    STEP_COMPLETED = 4
    STEP_FAILED = 5
    RUN_COMPLETED = 6
    RUN_FAILED = 7
    RUN_BLOCKED = 8
    TIMER_STARTED = 9
    TIMER_FIRED = 10
    SIGNAL_AWAITED = 11
    SIGNAL_RECEIVED = 12
    SIGNAL_TAKEN = 13
    SCOPE_OPENED = 14
    ITEM_OPENED = 15
    SCOPE_CLOSED = 16
    CHOICE_MADE = 17
    INPUT_BUILT = 18
    CHILD_SCHEDULED = 19
    CHILD_ENDED = 20
    NODE_FAILED = 21
    RUN_ENDING = 22
    STEP_CANCELLED = 23
    UNDO_SCHEDULED = 24
    UNDO_RETRYING = 25
    UNDO_COMPLETED = 26
    UNDO_FAILED = 27
    UNDO_SKIPPED = 28
    RUN_CANCELLED = 29
    RUN_TERMINATED = 30
    RUN_PAUSED = 31
    RUN_RESUMED = 32
    RUN_RETRIED = 33
    LOCAL_STEP_ENDED = 34
    PATCH_MARKED = 35
    ATTRIBUTES_SET = 36
    OP_CANCELLED = 37
    RUN_CONTINUED = 38


class TaskKind(IntEnum):
    """What is to be done with a task. The numbers are the contract's."""

    STEP = 1
    UNDO = 2
    DECIDE = 3


class TimerKind(IntEnum):
    """What a timer is for. The numbers are the contract's."""

    SLEEP = 1
    SIGNAL_TIMEOUT = 2
    QUEUE_TIMEOUT = 3
    TOTAL_TIMEOUT = 4
    RUN_TIMEOUT = 5
    START_DELAY = 6
    GRACE = 8  # of a code run that is to end: its clean-up has to be over
    PUT_OFF = 7  # no event: what was too much for one batch goes on in the next


class FailureKind(IntEnum):
    """What a failure means for the next attempt."""

    OPERATIONAL = 1
    CORRECTIVE = 2
    PERMANENT = 3


class Outcome(IntEnum):
    """The answer to one item of a worker's frame."""

    OK = 1
    LEASE_LOST = 2
    ALREADY_DONE = 3
    REFUSED = 4


@dataclass(slots=True, unsafe_hash=True)  # not frozen, for the time that takes (as LeasedTask): nobody changes one
class Payload:
    """A value of a user, stored as sent: JSON text or bytes. ``metadata`` is JSON text of an object of strings,
    or None.
    """

    json: str | None = None
    binary: bytes | None = None
    metadata: str | None = None

    @property
    def size(self) -> int:
        """About its bytes."""
        return len(self.json or "") + len(self.binary or b"") + len(self.metadata or "")

    def digest(self) -> bytes:
        """SHA-256 of what was sent, so that a repeat can be told from another outcome (I6)."""
        body = self.json.encode() if self.json is not None else b"\0" + (self.binary or b"")
        if self.metadata is not None:
            body += b"\0\0" + self.metadata.encode()
        return hashlib.sha256(body).digest()


NULL = Payload(json="null")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed. ``feedback`` is for the next attempt of a CORRECTIVE one."""

    kind: FailureKind
    code: str
    message: str
    feedback: Payload | None = None
    node_id: str = ""
    attempt: int = 0

    def to_json(self) -> str:
        """As stored in json columns."""
        value: dict[str, Any] = {"kind": int(self.kind), "code": self.code, "message": self.message}
        if self.node_id:
            value["node_id"] = self.node_id
        if self.attempt:
            value["attempt"] = self.attempt
        if self.feedback is not None:
            binary = self.feedback.binary
            value["feedback"] = {
                "json": self.feedback.json,
                "binary": None if binary is None else binary.hex(),
                "metadata": self.feedback.metadata,
            }
        return json.dumps(value)

    @staticmethod
    def from_json(text: str) -> Failure:
        """The inverse of ``to_json``."""
        value = json.loads(text)
        feedback = value.get("feedback")
        return Failure(
            kind=FailureKind(value["kind"]),
            code=value["code"],
            message=value["message"],
            feedback=None
            if feedback is None
            else Payload(
                feedback["json"],
                None if feedback["binary"] is None else bytes.fromhex(feedback["binary"]),
                feedback["metadata"],
            ),
            node_id=value.get("node_id", ""),
            attempt=value.get("attempt", 0),
        )


@dataclass(slots=True)
class RunRow:
    """A locked run, as the fold of a batch changes it. The order of fields is that of the statement lock_runs."""

    run_id: str
    namespace: str
    workflow_id: str
    definition_hash: bytes
    user_id: str
    priority: int
    state: int
    node_index: int
    next_seq: int
    last_event_at: datetime
    dedupe_key: str = ""
    control: str | None = None
    """JSON of a domain.rows.Control, or None."""
    failure: str | None = None
    output_seq: int | None = None
    ended_at: datetime | None = None


@dataclass(slots=True)
class TaskRow:
    """A locked task, as the fold of a batch changes it. The order of fields is that of the statement lock_tasks."""

    run_id: str
    task_id: int
    queue: str
    handler: str
    priority: int
    node_index: int
    input_seq: int
    input_bytes: int
    visible_at: datetime
    attempt: int
    operational_failures: int
    corrective_failures: int
    redeliveries: int
    token: int
    lease_ms: int
    timeout_ms: int | None
    lease_session: str | None
    lease_expires_at: datetime | None
    attempt_deadline_at: datetime | None
    last_failure: str | None = None
    feedback: str | None = None
    outcomes: str | None = None
    extra: str | None = None
    """JSON of a domain.rows.TaskExtra, or None."""
    checkpoint_number: int = 0
    resume_at: datetime | None = None
    """While the run is paused: when it may be taken after that."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a task that is gone ended: from its event."""

    type: int
    token: int
    digest: bytes | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A numbered state of a step, for its next attempt."""

    number: int
    state: Payload


@dataclass(slots=True)  # not frozen: one is made for each step, and of a frozen one each field is set by a call
class LeasedTask:
    """A task on lease, with all that a worker is told of it. ``frame_id``: the worker's last frame before the lease."""

    run_id: str
    task_id: int
    token: int
    namespace: str
    workflow_id: str
    definition_hash: bytes
    handler: str
    queue: str
    priority: int
    node_id: str
    attempt: int
    lease_seconds: float
    timeout_seconds: float | None
    input: Payload
    feedback: Failure | None
    user_id: str
    eager_depth: int = 0
    frame_id: int = 0
    kind: TaskKind = TaskKind.STEP
    checkpoint: Checkpoint | None = None
    undo_output: Payload | None = None
    """Of an UNDO: what the step returned, if it completed."""
    unfinished: bool = False
    """Of an UNDO: the step did not complete, but may have acted."""
    step_key: str = ""
    """Of an UNDO: the idempotency key of the step that is undone; empty for a child."""
    decide: Any = None
    """Of a DECIDE: a domain.ops.Decide."""


DECIDE_TASK = 1
"""The task of a code run that decides. It is named by the run's first event for all its life: its token only grows."""

PARKED_UNTIL = datetime(9999, 1, 1, tzinfo=UTC)
"""When a task of a BLOCKED run may be taken: never, in a form that every column and clock takes."""

IDLE_UNTIL = datetime(9998, 1, 1, tzinfo=UTC)
"""When the DECIDE task of a run that waits for events may be taken: not before there is one."""

FIRST_TOKEN = 1


def next_token(token: int, epoch: int) -> int:
    """The token that fences off the holder of ``token``; of 0, the first one of a step. The database's epoch is in its
    high bits (I3).
    """
    return max(token + 1, (epoch << 40) + FIRST_TOKEN)
