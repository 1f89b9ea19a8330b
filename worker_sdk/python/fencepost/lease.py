"""One task on lease: what the server said of it, and how far the worker is with it.

A lease is touched by two sides. The session (one thread) creates it, renews it, drops it and sends its
outcome; the executor (other threads) begins it and reports how it ended. The fields of each side are written
by that side only, but for `begun` and `withdrawn`, which both set under the executor's lock: a task is either
begun or taken back.

Not a dataclass and not frozen: one of these is made for every task, on the hot path.
"""

from __future__ import annotations

import enum
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    from fencepost.codec import Value
    from fencepost.failure import Outcome
    from fencepost.models import Failure
    from fencepost.steps import Step

# A lease must not seem to last longer because the machine slept. Where this clock is missing the monotonic
# one does for servers, which do not sleep.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) if hasattr(time, "CLOCK_MONOTONIC") else None


def clock() -> float:
    """Seconds on a clock that only goes forward and runs while the machine sleeps; only differences mean
    much.
    """
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


cancellations = threading.Condition()
"""Notified after contexts were cancelled:

one for all, because waiting for it is rare and making one is not free.
"""


class CancelReason(enum.StrEnum):
    """Why a step's context was cancelled."""

    LEASE_LOST = "LEASE_LOST"
    ATTEMPT_TIMEOUT = "ATTEMPT_TIMEOUT"
    WORKER_SHUTDOWN = "WORKER_SHUTDOWN"


class Owner(Protocol):
    """What holds a lease: a session."""

    def finish(self, lease: Lease, outcome: Outcome) -> None:
        """The executor is done with the lease."""


class Lease:
    """A task on lease.

    Times are readings of `clock`; ``deadline`` is when the attempt times out, 0.0 for never.
    """

    __slots__ = (
        "attempt",
        "begun",
        "cancel_reason",
        "deadline",
        "definition_hash",
        "expires_at",
        "failure_before",
        "idempotency_key",
        "input",
        "key",
        "lease_seconds",
        "max_payload_bytes",
        "node_id",
        "outcome",
        "owner",
        "refusals",
        "resends",
        "run_id",
        "runner",
        "sent",
        "step",
        "task_id",
        "token",
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
    ) -> None:
        self.owner = owner
        self.step = step
        self.key = (run_id, task_id)
        self.run_id = run_id
        self.task_id = task_id
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
        # Of the session: what is to be sent or was sent, whether it is on its way, how often it was refused for what
        # it is, and how often by a fault of the server.
        self.outcome: Outcome | None = None
        self.sent = False
        self.refusals = 0
        self.resends = 0
        # Of both, under the executor's lock.
        self.begun = False
        self.withdrawn = False
        # Set once by the session, read by the step.
        self.cancel_reason: CancelReason | None = None
        # Of the executor.
        self.runner: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Lease {self.run_id}/{self.task_id} token={self.token} {self.step.name} attempt={self.attempt}>"
