"""The leases that a session holds, and the outcomes that no Ack has answered yet. No I/O, no frames.

Every lease is in ``held`` from its Tasks frame until it is settled (its outcome was answered), dropped (it
was found lost while its step ran) or superseded (the same task came again with a newer token). One that is
held has either no outcome, while its step is queued or runs, or an outcome that waits, is on its way
(`Lease.sent`), or is put off for a moment. A step that runs on although its lease is gone, or its attempt has
timed out, is a zombie: it takes up a slot until its code ends. One that is only asked to stop (its run ends) is held
as before: what it reports in its grace counts.

Leases of DECIDE tasks are held, renewed and ended with them. Nothing of these runs on its own: the decider is told when
one is gone, so there are no zombies among them.

Used by one thread, that of the session's loop.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fencepost.advances import Advances, Answered, Lost, News, Refused, Repeated
from fencepost.checkpoints import AT_FAULT, RESEND_DELAY, TRANSIENT, Checkpoints, Saving
from fencepost.errors import LeaseLost
from fencepost.failure import ATTEMPT_TIMEOUT, Completed, Failed, Outcome, Released, clean, not_recordable
from fencepost.lease import CancelReason, DecideLease, Lease
from fencepost.models import FailureKind
from fencepost.sdk_log import SdkLog
from fencepost.v1 import error_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb

logger = SdkLog("fencepost.worker")

_MAX_REFUSALS = 2
_MAX_RESENDS = 5
_LEASE_CHECK_INTERVAL = 1.0
_ENDED = "the attempt has ended: no checkpoint of it will count"


@dataclass(slots=True)
class Counters:
    """What a worker has done since it was made, and how many zombies it has now, over all its sessions.

    Written by the session's thread only.
    """

    started: int = 0
    completed: int = 0
    failed: int = 0
    lost: int = 0
    released: int = 0
    connects: int = 0
    zombies: int = 0
    advanced: int = 0


@dataclass(slots=True)
class Effects:
    """What is to be done after a frame or a tick.

    ``start`` are new leases to run, ``cancel`` leases whose step should stop (their `cancel_reason` is set),
    ``news`` is for the decider, ``drain`` tells that the server wants the session to be replaced, ``rebuild`` why its
    stream must be given up.
    """

    start: list[Lease] = field(default_factory=list)
    cancel: list[Lease] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    drain: bool = False
    rebuild: str = ""


class Ledger:
    """The leases of one session; see the module."""

    def __init__(self, counters: Counters, cancel_after_lease: float | None = None) -> None:
        self.counters = counters
        self.held: dict[tuple[str, int], Lease] = {}
        # By class of outcome, because each class has a frame of its own.
        self.outbox: dict[type[Outcome], deque[Lease]] = {
            Failed: deque(),
            Completed: deque(),
            Released: deque(),
        }
        self.checkpoints = Checkpoints()
        self.advances = Advances()
        self.decide_count = 0
        self._later: deque[tuple[float, Lease]] = deque()
        self._timeouts: list[tuple[float, int, Lease]] = []
        self._tie = itertools.count()
        self._cancel_after_lease = cancel_after_lease
        self._lease_check_due = math.inf

    def holds(self, lease: Lease) -> bool:
        """Whether this very lease is held."""
        return self.held.get(lease.key) is lease

    def find(self, ref: pb.TaskRef) -> Lease | None:
        """The held lease that a TaskRef names, token included."""
        lease = self.held.get((ref.run_id, ref.task_id))
        return lease if lease is not None and lease.token == ref.fencing_token else None

    def add(self, lease: Lease, now: float) -> None:
        """Hold a new lease and watch its times."""
        self.held[lease.key] = lease
        if isinstance(lease, DecideLease):
            self.decide_count += 1
        if lease.deadline:
            if len(self._timeouts) > 2 * len(self.held) + 64:
                # Most attempts end long before their time; their entries must not pile up until then.
                self._timeouts = [entry for entry in self._timeouts if self.holds(entry[2])]
                heapq.heapify(self._timeouts)
            heapq.heappush(self._timeouts, (lease.deadline, next(self._tie), lease))
        if self._cancel_after_lease is not None and self._lease_check_due == math.inf:
            self._lease_check_due = now + _LEASE_CHECK_INTERVAL

    def forget(self, lease: Lease) -> None:
        """Hold a lease no longer."""
        del self.held[lease.key]
        if isinstance(lease, DecideLease):
            self.decide_count -= 1

    # What the executor reports.

    def finish(self, lease: Lease, outcome: Outcome) -> None:
        """A step has ended with ``outcome``; it counts if the lease is still held and waits for one."""
        if not self.holds(lease) or lease.outcome is not None:
            self.counters.zombies -= 1
            return
        self.give(lease, outcome)

    def save(self, lease: Lease, saving: Saving) -> None:
        """A step has a new state; it counts if the lease is still held and its attempt has not ended."""
        if self.holds(lease) and lease.outcome is None:
            self.checkpoints.save(lease, saving)
        else:
            saving.fail(LeaseLost(_ENDED))

    def give(self, lease: Lease, outcome: Outcome) -> None:
        """Set the outcome of a lease that has none, or another one in its place, and send it.

        A failure takes the state along that no Ack has answered: it might not arrive by itself any more.
        """
        unsaved = self.checkpoints.end(lease, _ENDED)
        if unsaved is not None and isinstance(outcome, Failed):
            outcome = replace(outcome, checkpoint=unsaved)
        lease.outcome = outcome
        self.enqueue(lease)

    def cut_off(self, lease: Lease, outcome: Outcome, reason: CancelReason, effects: Effects) -> None:
        """End an attempt from here, though its code may run on."""
        lease.cancel_reason = reason
        self.counters.zombies += 1
        self.give(lease, outcome)
        effects.cancel.append(lease)

    def enqueue(self, lease: Lease) -> None:
        """Let the outcome of a lease wait for its frame."""
        assert lease.outcome is not None
        lease.sent = False
        self.outbox[type(lease.outcome)].append(lease)

    # What the server says.

    def lost(self, lease: Lease, effects: Effects) -> None:
        """A heartbeat or a reconnect found the lease gone. With an outcome, that one's Ack decides."""
        if self.holds(lease) and not lease.unanswered:
            self._drop(lease, effects)

    def revoked(self, lease: Lease, reason: CancelReason, effects: Effects) -> None:
        """No outcome of this lease will count, the server says; one on its way is answered all the same."""
        if not lease.unanswered:
            self._drop(lease, effects, reason)
        elif not lease.sent:
            self.abandon(lease, effects)

    def superseded(self, lease: Lease, effects: Effects) -> None:
        """The same task came with a newer token, so this lease is stale, whatever became of its step."""
        if not lease.unanswered:
            self._drop(lease, effects)
        else:
            self.abandon(lease, effects)

    def wanted_to_stop(self, lease: Lease, reason: CancelReason, until: float, effects: Effects) -> None:
        """The run of a step ends: it should stop, and may still report up to ``until``. Told again, nothing changes but
        that the time may become shorter.
        """
        if not self.holds(lease) or lease.outcome is not None or isinstance(lease, DecideLease):
            # A code run learns it from its history, in its turn.
            return
        if lease.cancel_reason is None:
            lease.cancel_deadline = until
            lease.cancel_reason = reason
            effects.cancel.append(lease)
        else:
            lease.cancel_deadline = min(lease.cancel_deadline, until)

    def abandon(self, lease: Lease, effects: Effects) -> None:
        """Forget a lease with what was to be said of it; what is on its way is not sent again."""
        if not lease.sent:
            lease.outcome = None
        lease.advance = None
        self.forget(lease)
        self.counters.lost += 1
        if isinstance(lease, DecideLease):
            effects.news.append(Lost(lease))

    def _drop(self, lease: Lease, effects: Effects, reason: CancelReason = CancelReason.LEASE_LOST) -> None:
        if isinstance(lease, DecideLease):
            self.abandon(lease, effects)
            return
        self.forget(lease)
        self.checkpoints.end(lease, "the lease is lost: no checkpoint of it will count")
        lease.cancel_reason = reason
        self.counters.zombies += 1
        self.counters.lost += 1
        effects.cancel.append(lease)

    def answered(self, lease: Lease, result: pb.ItemResult, now: float) -> None:
        """The Ack of an outcome."""
        if not self.holds(lease):
            return
        outcome = result.outcome
        if outcome in {pb.ITEM_OUTCOME_OK, pb.ITEM_OUTCOME_ALREADY_DONE}:
            self._settled(lease)
        elif outcome == pb.ITEM_OUTCOME_LEASE_LOST:
            self.forget(lease)
            self.counters.lost += 1
        elif result.reason == error_pb2.ERROR_REASON_OUTPUT_SCHEMA_MISMATCH:
            self.forget(lease)
            self.counters.failed += 1
        else:
            self.refused(lease, result.reason, result.message, result.violations, now)

    def refused(
        self,
        lease: Lease,
        reason: error_pb2.ErrorReason.ValueType,
        message: str,
        violations: Iterable[run_service_pb2.Violation],
        now: float,
    ) -> None:
        """An outcome was not recorded:

        send another one if it is at fault, the same one again if the server is.
        """
        if not self.holds(lease):
            return
        if reason not in AT_FAULT:  # which leave the lease here, so that another outcome must go in its place
            # A fault of the server that this item brings about each time must not be met for ever.
            lease.resends += reason not in TRANSIENT
            if lease.resends <= _MAX_RESENDS:
                lease.sent = False
                self._later.append((now + RESEND_DELAY, lease))
                return
            lease.resends = 0
        lease.refusals += 1
        text = _refusal(message, violations)
        outcome = lease.outcome
        if lease.refusals > _MAX_REFUSALS or isinstance(outcome, Released) or outcome is None:
            logger.error("%r: its outcome was refused for good, its lease will run out: %s", lease, text)
            self.forget(lease)
            return
        if isinstance(outcome, Completed):
            self.give(lease, not_recordable(f"the server refused the output: {text}"))
            return
        bare = Failed(
            outcome.kind,
            clean(outcome.code, 100),
            clean(f"{outcome.message[:1000]} (the failure was refused as it was: {text[:1000]})"),
        )
        self.give(lease, bare)

    def advance_answered(self, lease: DecideLease, result: pb.ItemResult, now: float, effects: Effects) -> None:
        """The answer to an Advance; to one of a lease that is gone it says nothing new."""
        if not self.holds(lease) or lease.advance is None:
            return
        outcome = result.outcome
        if outcome == pb.ITEM_OUTCOME_OK:
            lease.advance = None
            self.counters.advanced += 1
            advance = result.advance
            if not advance.kept:
                self.forget(lease)
            effects.news.append(Answered(lease, advance))
        elif outcome == pb.ITEM_OUTCOME_LEASE_LOST:
            self.abandon(lease, effects)
        elif outcome == pb.ITEM_OUTCOME_ALREADY_DONE:
            lease.advance = None
            self.counters.advanced += 1
            effects.news.append(Repeated(lease))
        else:
            self.advance_refused(lease, result, now, effects)

    def advance_refused(
        self, lease: DecideLease, why: pb.ItemResult | run_service_pb2.ItemError, now: float, effects: Effects
    ) -> None:
        """Nothing was recorded, or by another Advance of this number: only what the server could not do now is sent
        again.
        """
        if not self.holds(lease) or lease.advance is None:
            return
        if why.reason in TRANSIENT:
            self.advances.put_off(lease, now)
            return
        lease.advance = None
        known = why.reason in error_pb2.ErrorReason.values()
        code = error_pb2.ErrorReason.Name(why.reason).removeprefix("ERROR_REASON_") if known else str(why.reason)
        text = _refusal(why.message, why.violations)
        effects.news.append(Refused(lease, code, text, at_fault=why.reason in AT_FAULT))

    def _settled(self, lease: Lease) -> None:
        self.forget(lease)
        if isinstance(lease.outcome, Completed):
            self.counters.completed += 1
        elif isinstance(lease.outcome, Failed):
            self.counters.failed += 1
        else:
            self.counters.released += 1

    # What time brings.

    @property
    def due(self) -> float:
        """When `tick` has something to do."""
        due = self._lease_check_due
        if self._timeouts:
            due = min(due, self._timeouts[0][0])
        if self._later:
            due = min(due, self._later[0][0])
        if (checkpoints := self.checkpoints.due) is not None:
            due = min(due, checkpoints)
        return min(due, self.advances.due)

    def tick(self, now: float, effects: Effects) -> None:
        """End attempts whose time is up, send again what was put off, and look for leases that ran out."""
        while self._timeouts and self._timeouts[0][0] <= now:
            lease = heapq.heappop(self._timeouts)[2]
            if self.holds(lease) and lease.outcome is None:
                text = "the attempt ran longer than the node's timeout"
                failure = Failed(FailureKind.OPERATIONAL, ATTEMPT_TIMEOUT, text)
                logger.warning(
                    "step %s failed: node %s, run %s, attempt %d: %s %s: %s",
                    lease.step.name,
                    lease.node_id,
                    lease.run_id,
                    lease.attempt,
                    failure.kind.value,
                    failure.code,
                    text,
                )
                self.cut_off(lease, failure, CancelReason.ATTEMPT_TIMEOUT, effects)
        while self._later and self._later[0][0] <= now:
            lease = self._later.popleft()[1]
            if self.holds(lease):
                self.enqueue(lease)
        self.checkpoints.tick(now)
        self.advances.tick(now)
        if self._cancel_after_lease is not None and self._lease_check_due <= now:
            for lease in list(self.held.values()):
                if not lease.unanswered and lease.expires_at + self._cancel_after_lease <= now:
                    self._drop(lease, effects)
            self._lease_check_due = now + _LEASE_CHECK_INTERVAL if self.held else math.inf


def _refusal(message: str, violations: Iterable[run_service_pb2.Violation]) -> str:
    """What the server has said, with each fault once: most messages have the first of them already."""
    told = [f"{fault.path or '(whole)'}: {fault.message}" for fault in violations]
    more = "; ".join(fault for fault in told if fault not in message)
    return f"{message} ({more})" if more else message
