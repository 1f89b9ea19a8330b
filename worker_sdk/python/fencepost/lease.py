"""One task on lease: what the server said of it, and how far the worker is with it.

A lease is touched by two sides. The session (one thread) creates it, renews it, drops it and sends its
outcome; the executor (other threads) begins it and reports how it ended. The fields of each side are written
by that side only, but for `begun` and `withdrawn`, which both set under the executor's lock: a task is either
begun or taken back.

What the step says while it runs: checkpoints are numbered and handed over under `numbering`, so that they reach
the session in the order of their numbers; progress is one attribute, which the step sets and the session reads.

Not a dataclass and not frozen: one of these is made for every task, on the hot path.
"""

from __future__ import annotations

import enum
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    from fencepost.checkpoints import Saving
    from fencepost.codec import Value
    from fencepost.failure import Outcome
    from fencepost.models import Failure
    from fencepost.steps import Step
    from fencepost.v1 import run_pb2
    from fencepost.v1 import worker_service_pb2 as pb

# A lease must not seem to last longer because the machine slept. Where this clock is missing the monotonic
# one does for servers, which do not sleep.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) if hasattr(time, "CLOCK_MONOTONIC") else None

MAX_ADVANCE_BYTES = (3 << 20) - 1024
"""Until a server has said how large its frames are."""


def clock() -> float:
    """Seconds on a clock that only goes forward and runs while the machine sleeps; only differences mean
    much.
    """
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


cancellations = threading.Condition()
"""Notified after contexts were cancelled:

one for all, because waiting for it is rare and making one is not free.
"""


numbering = threading.Lock()
"""Held while a checkpoint is numbered and handed over: one for all, for a moment, for the same reason."""


class TaskKind(enum.StrEnum):
    """What is to be done with a task. One that this SDK does not know yet is UNSPECIFIED, and is not run."""

    UNSPECIFIED = "UNSPECIFIED"
    STEP = "STEP"
    UNDO = "UNDO"
    DECIDE = "DECIDE"


class CancelReason(enum.StrEnum):
    """Why a step's context was cancelled.

    After RUN_CANCELLED and RUN_ENDED a step has a grace in which its outcome still counts; after the others none
    of it will.
    """

    LEASE_LOST = "LEASE_LOST"
    ATTEMPT_TIMEOUT = "ATTEMPT_TIMEOUT"
    WORKER_SHUTDOWN = "WORKER_SHUTDOWN"
    RUN_CANCELLED = "RUN_CANCELLED"
    RUN_ENDED = "RUN_ENDED"

    @property
    def has_grace(self) -> bool:
        """Whether what the step ends with may still count."""
        return self in {CancelReason.RUN_CANCELLED, CancelReason.RUN_ENDED}


class Owner(Protocol):
    """What holds a lease: a session."""

    def finish(self, lease: Lease, outcome: Outcome) -> None:
        """The executor is done with the lease."""

    def save(self, lease: Lease, saving: Saving) -> None:
        """The step has a new state."""


class Reporter(Protocol):
    """Brings what a step says while it runs to the session's thread: the executor."""

    def report(self, lease: Lease, saving: Saving) -> None:
        """Hand over a checkpoint; from any thread."""


class Lease:
    """A task on lease.

    Times are readings of `clock`; ``deadline`` is when the attempt times out, 0.0 for never. ``checkpoint`` is the
    newest state with its number, (0, None) without any. ``undo_output`` and ``unfinished`` are of UNDO tasks.
    """

    __slots__ = (
        "advance",
        "attempt",
        "begun",
        "cancel_deadline",
        "cancel_reason",
        "checkpoint",
        "deadline",
        "definition_hash",
        "expires_at",
        "failure_before",
        "idempotency_key",
        "input",
        "key",
        "kind",
        "lease_seconds",
        "max_payload_bytes",
        "node_id",
        "outcome",
        "owner",
        "progress",
        "progress_sent",
        "refusals",
        "reporter",
        "resends",
        "run_id",
        "runner",
        "saving",
        "sent",
        "step",
        "step_idempotency_key",
        "task_id",
        "token",
        "undo_output",
        "unfinished",
        "unsaved",
        "user_id",
        "withdrawn",
        "workflow_id",
    )

    def __init__(
        self,
        *,
        owner: Owner | None,
        step: Step[..., Any],
        run_id: str,
        task_id: int,
        token: int,
        workflow_id: str,
        definition_hash: str,
        node_id: str,
        attempt: int,
        expires_at: float,
        lease_seconds: float,
        deadline: float,
        input: Value,
        failure_before: Failure | None,
        idempotency_key: str,
        user_id: str,
        max_payload_bytes: int,
        kind: TaskKind = TaskKind.STEP,
        undo_output: Value | None = None,
        unfinished: bool = False,
        step_idempotency_key: str = "",
        checkpoint: tuple[int, Value | None] = (0, None),
    ) -> None:
        self.owner = owner
        self.step = step
        self.run_id, self.task_id = self.key = (run_id, task_id)
        self.token = token
        self.workflow_id = workflow_id
        self.definition_hash = definition_hash
        self.node_id = node_id
        self.attempt = attempt
        self.expires_at = expires_at
        self.lease_seconds = lease_seconds
        self.deadline = deadline
        self.input = input
        self.failure_before = failure_before
        self.idempotency_key = idempotency_key
        self.user_id = user_id
        self.max_payload_bytes = max_payload_bytes
        self.kind = kind
        self.undo_output = undo_output
        self.unfinished = unfinished
        self.step_idempotency_key = step_idempotency_key
        # Of the session: what is to be sent or was sent (an Advance ends nothing), whether it is on its way, how often
        # it was refused for what it is, and how often by a fault of the server.
        self.outcome: Outcome | None = None
        self.advance: pb.AdvanceItem | None = None
        self.sent = False
        self.refusals = 0
        self.resends = 0
        # Of the session: the newest state that is not on its way, and the one that is; the last progress told.
        self.unsaved: Saving | None = None
        self.saving: Saving | None = None
        self.progress_sent: Value | None = None
        # Of both, under the executor's lock.
        self.begun = False
        self.withdrawn = False
        # Set by the session, read by the step; the reason may become a harder one. Up to the time an outcome counts.
        self.cancel_reason: CancelReason | None = None
        self.cancel_deadline = 0.0
        # Set by the step, read by the session.
        self.progress: Value | None = None
        # Of the step, under `numbering`.
        self.checkpoint = checkpoint
        # Of the executor.
        self.reporter: Reporter | None = None
        self.runner: asyncio.Task[None] | None = None

    @property
    def unanswered(self) -> bool:
        """Whether something was said of it that no Ack has answered yet."""
        return self.outcome is not None or self.advance is not None

    def __repr__(self) -> str:
        return f"<Lease {self.run_id}/{self.task_id} token={self.token} {self.step.name} attempt={self.attempt}>"


class DecideLease(Lease):
    """A DECIDE task on lease: a code run that is to be decided. The names are those of the contract's Decide.

    ``events`` are taken over by the decider, which leaves nothing: they would keep their whole frame in memory.
    """

    __slots__ = ("advance_no", "after_seq", "compatibility_id", "events", "last_seq", "max_advance_bytes", "seen_seq")

    def __init__(
        self,
        *,
        owner: Owner | None,
        step: Step[..., Any],
        task: pb.Task,
        expires_at: float,
        lease_seconds: float,
        max_payload_bytes: int,
        input: Value,
    ) -> None:
        ref, decide = task.task, task.decide
        super().__init__(
            owner=owner,
            step=step,
            run_id=ref.run_id,
            task_id=ref.task_id,
            token=ref.fencing_token,
            workflow_id=task.workflow_id,
            definition_hash=task.definition_hash,
            node_id=task.node_id,
            attempt=task.attempt,
            expires_at=expires_at,
            lease_seconds=lease_seconds,
            deadline=0.0,
            input=input,
            failure_before=None,
            idempotency_key=task.idempotency_key,
            user_id=task.user_id,
            max_payload_bytes=max_payload_bytes,
            kind=TaskKind.DECIDE,
        )
        self.events: list[run_pb2.Event] = list(decide.events)
        self.after_seq = decide.after_seq
        self.last_seq = decide.last_seq
        self.advance_no = decide.advance_no
        self.seen_seq = decide.seen_seq
        self.compatibility_id = decide.compatibility_id
        # Of the session: the largest Advance that has a frame to itself.
        self.max_advance_bytes = MAX_ADVANCE_BYTES
