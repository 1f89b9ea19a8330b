"""What a handler can know of the attempt that it runs, and what it can say before it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from fencepost.checkpoints import Saved, Saving
from fencepost.codec import NULL, Value, encode
from fencepost.errors import LeaseLost, NotEncodable
from fencepost.failure import stopped
from fencepost.lease import CancelReason, Lease, TaskKind, cancellations, clock, numbering
from fencepost.models import payload_size
from fencepost.step_errors import StepCancelled

if TYPE_CHECKING:
    from fencepost.models import Failure

MAX_PROGRESS_BYTES = 4096
_step_logger = logging.getLogger("fencepost.step")


class StepContext:
    """What a handler can know of the attempt that it runs.

    Made for one attempt; safe to use from any thread.
    """

    __slots__ = ("_lease",)

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @classmethod
    def for_test(
        cls,
        *,
        run_id: str = "00000000-0000-0000-0000-000000000000",
        task_id: int = 2,
        node_id: str = "node",
        workflow_id: str = "workflow",
        attempt: int = 1,
        fencing_token: int = 1,
        idempotency_key: str = "test",
        user_id: str = "",
        failure_before: Failure | None = None,
        last_checkpoint: object = None,
        kind: TaskKind = TaskKind.STEP,
        unfinished: bool = False,
        step_idempotency_key: str = "",
    ) -> StepContext:
        """A context of no worker, to call a handler with in a test.

        What the handler saves is saved at once, and is the ``last_checkpoint`` of the context from then on.
        """
        from fencepost.steps import Step

        lease = Lease(
            owner=None,
            step=Step(_nothing, "test"),
            run_id=run_id,
            task_id=task_id,
            token=fencing_token,
            workflow_id=workflow_id,
            definition_hash="",
            node_id=node_id,
            attempt=attempt,
            expires_at=clock() + 60.0,
            lease_seconds=60.0,
            deadline=0.0,
            input=NULL,
            failure_before=failure_before,
            idempotency_key=idempotency_key,
            user_id=user_id,
            max_payload_bytes=1 << 20,
            kind=kind,
            unfinished=unfinished,
            step_idempotency_key=step_idempotency_key,
            checkpoint=(0, None) if last_checkpoint is None else (1, encode(last_checkpoint)),
        )
        return cls(lease)

    @property
    def kind(self) -> TaskKind:
        """Whether a step is run (STEP) or undone (UNDO)."""
        return self._lease.kind

    @property
    def unfinished(self) -> bool:
        """For an undo handler: the step that it undoes did not complete, but may have acted. There is no output."""
        return self._lease.unfinished

    @property
    def step_idempotency_key(self) -> str:
        """For an undo handler: the ``idempotency_key`` of the step that it undoes; empty for what a child run did. A
        system that compares tokens under that key fences late attempts of the step off with this context's token.
        """
        return self._lease.step_idempotency_key

    @property
    def run_id(self) -> str:
        """The run."""
        return self._lease.run_id

    @property
    def task_id(self) -> int:
        """The task: the number of the event of the run that scheduled this step."""
        return self._lease.task_id

    @property
    def node_id(self) -> str:
        """The node in the definition."""
        return self._lease.node_id

    @property
    def workflow_id(self) -> str:
        """The run's workflow."""
        return self._lease.workflow_id

    @property
    def definition_hash(self) -> str:
        """The definition that the run is pinned to: SHA-256 in hex."""
        return self._lease.definition_hash

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._lease.attempt

    @property
    def fencing_token(self) -> int:
        """Grows with every lease of this step, over attempts and workers.

        Another system that keeps the highest token it has seen for ``idempotency_key`` and refuses lower ones
        can't be written to by an attempt that has lost its lease. Tokens of different steps can't be
        compared.
        """
        return self._lease.token

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this step and for no other step:

        for deduplicating effects elsewhere.
        """
        return self._lease.idempotency_key

    @property
    def user_id(self) -> str:
        """On whose behalf the run runs; may be empty."""
        return self._lease.user_id

    @property
    def failure_before(self) -> Failure | None:
        """The attempt before, if it failed as corrective."""
        return self._lease.failure_before

    @property
    def feedback(self) -> Any:
        """What the attempt before was told to do better, as plain JSON: `CorrectiveError.feedback`, or the
        output schema's violations from the server. None if it was not corrective, or said nothing.
        """
        before = self._lease.failure_before
        return None if before is None or before.feedback is None else before.feedback.decode()

    @property
    def deadline(self) -> float | None:
        """Seconds until the attempt times out, 0.0 at the least; None if it has no timeout."""
        deadline = self._lease.deadline
        return max(0.0, deadline - clock()) if deadline else None

    @property
    def lease_remaining(self) -> float:
        """How many seconds the lease lasts for certain, negative when it may have run out.

        The session renews it on its own. Below zero (a server or a network that is away) another worker may
        have the step; its result may still count, which the fencing token decides. A step can look here
        before an effect that no fencing token protects.
        """
        return self._lease.expires_at - clock()

    # What the step says of itself.

    def checkpoint(self, value: object, *, wait: bool = True) -> Any:
        """Save a state for the next attempt of this step, which finds it in ``last_checkpoint``.

        In a thread it returns when the state was saved, or at once if not ``wait``. On an event loop it returns at
        once something to await; not awaited, the state is saved all the same. Either way the state was handed over:
        if the step fails before the answer comes, the newest state goes along with its failure. A newer one takes
        the place of older ones that are not on their way yet.

        ``value`` is anything that has JSON. Raises NotEncodable for what can't be recorded; when waited for,
        LeaseLost if the attempt ends before the state was saved, or the error that the server refused it with.
        """
        lease = self._lease
        state = _encoded(value, lease.max_payload_bytes, "the checkpoint")
        reason = lease.cancel_reason
        if reason is not None and not reason.has_grace:
            raise LeaseLost(f"no checkpoint of this attempt will count: {reason.value}")
        on_loop = _is_on_loop()
        with numbering:
            number = lease.checkpoint[0] + 1
            saving = Saving(number, state)
            future = saving.wait() if wait or on_loop else None
            lease.checkpoint = (number, state)
            if lease.reporter is not None:
                lease.reporter.report(lease, saving)
            else:
                saving.succeed()
        if future is None:
            return None
        return Saved(future) if on_loop else future.result()

    @property
    def last_checkpoint(self) -> Any:
        """The newest state, as plain JSON: of an earlier attempt until this one saves its own. None without any."""
        return self.load_checkpoint()

    def load_checkpoint(self, type: Any = Any) -> Any:
        """``last_checkpoint`` as ``type``; None without any. Raises NotDecodable."""
        state = self._lease.checkpoint[1]
        return None if state is None else state.decode(type)

    def progress(self, value: object) -> None:
        """Tell people how far the step is; it is shown with the run's open steps.

        Goes with the next heartbeat; only the last value counts, and none is promised to arrive. ``value`` is anything
        that has JSON, up to 4 KiB of it. Raises NotEncodable.
        """
        self._lease.progress = _encoded(value, MAX_PROGRESS_BYTES, "the progress")

    # Whether it should stop.

    @property
    def cancelled(self) -> bool:
        """Whether the step should stop. Async handlers are cancelled as well.

        If its run ends, what it reports within ``grace_remaining`` still counts; otherwise no outcome of it will.
        """
        return self._lease.cancel_reason is not None

    @property
    def cancel_reason(self) -> CancelReason | None:
        """Why it is cancelled, if it is. RUN_CANCELLED and RUN_ENDED leave a grace; LEASE_LOST may follow them."""
        return self._lease.cancel_reason

    @property
    def grace_remaining(self) -> float | None:
        """For how many seconds what the step reports still counts; 0.0 if it does not, None if it is not cancelled."""
        lease = self._lease
        reason = lease.cancel_reason
        if reason is None:
            return None
        return max(0.0, lease.cancel_deadline - clock()) if reason.has_grace else 0.0

    def raise_if_cancelled(self) -> None:
        """For sync handlers, at places where they can stop: raises StepCancelled if the step should."""
        reason = self._lease.cancel_reason
        if reason is not None:
            raise StepCancelled(stopped(reason).message)

    def wait_cancelled(self, timeout: float) -> bool:
        """Wait in a thread until the step is cancelled, or ``timeout`` seconds have passed; tell if it is
        cancelled.

        For sync handlers in place of `time.sleep`. In an async handler it would block the loop.
        """
        end = clock() + timeout
        while not self.cancelled:
            left = end - clock()
            if left <= 0:
                return False
            with cancellations:
                if not self.cancelled:
                    cancellations.wait(left)
        return True

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that puts run, node and attempt in each record (``extra``) and before each message."""
        return _StepLogger(
            _step_logger,
            {
                "run_id": self.run_id,
                "workflow_id": self.workflow_id,
                "node_id": self.node_id,
                "attempt": self.attempt,
            },
        )


class _StepLogger(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add what the adapter knows to the record, under what the call itself gave."""
        known = dict(self.extra or {})
        kwargs["extra"] = {**known, **(kwargs.get("extra") or {})}
        return f"[{known['run_id']} {known['node_id']} #{known['attempt']}] {msg}", kwargs


def _encoded(value: object, limit: int, what: str) -> Value:
    """A payload of at most ``limit`` bytes. Raises NotEncodable."""
    state = encode(value)
    size = payload_size(state)
    if size > limit:
        raise NotEncodable(f"{what} has {size} bytes, over the limit of {limit}")
    return state


def _is_on_loop() -> bool:
    """Whether the caller runs on an event loop, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _nothing() -> None:
    """The handler of a context that belongs to none."""
