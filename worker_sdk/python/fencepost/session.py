"""One worker's session with a server, without I/O: frames and the time come in, frames and effects come out.

A `Session` lives over reconnects: each stream begins with `begin`, then `next_frame` gives what to write and
`receive` takes what was read; `tick` does what time brings. What it holds is in its `Ledger`. Invariants:

- When a stream breaks, every outcome that was on its way waits again: it is sent until an Ack has answered
  it.
- A heartbeat that finds a lease gone does not decide about an outcome that exists: its own Ack does, because
  the two frames may be handled in either order.
- Whether a lease has run out is the server's to say. While nothing can be heard from it a step goes on, and
  the fencing token decides about its result (``cancel_after_lease`` limits that, for those who want it).

Used by one thread, that of the session's loop.
"""

from __future__ import annotations

import enum
import logging
import math
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fencepost.failure import WORKER_SHUTDOWN, Failed, Outcome, Released
from fencepost.frames import fill_outcomes, fill_ref, seconds_of, take
from fencepost.lease import CancelReason, Lease
from fencepost.ledger import Counters, Effects, Ledger
from fencepost.models import FailureKind, failure_of, value_of
from fencepost.steps import Step
from fencepost.v1 import error_pb2
from fencepost.v1 import worker_service_pb2 as pb

logger = logging.getLogger("fencepost.worker")

PROTOCOL_VERSION = 1
MAX_PREVIOUS_SESSIONS = 16
WELCOME_TIMEOUT = 10.0
MISSED_PINGS = 3
MAX_UNANSWERED_HEARTBEATS = 64
_HEARTBEAT_RETRY = 1.0
_MIN_HEARTBEAT = 0.05
_FRAME_SLACK = 1024
_MAX_SENT_TIMES = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the worker is, as every Hello says it, and the steps that it can run, by name."""

    namespace: str
    worker_name: str
    process_nonce: str
    sdk_version: str
    steps: Mapping[str, Step[..., Any]]
    labels: Mapping[str, str]
    max_frame_bytes: int


@dataclass(slots=True)
class _Flight:
    """A frame whose Ack is awaited: its leases by index, None for what was answered."""

    is_heartbeat: bool
    leases: list[Lease | None]
    sent_at: float
    left: int


class _Phase(enum.Enum):
    CLOSED = enum.auto()
    NEW = enum.auto()
    GREETED = enum.auto()
    OPEN = enum.auto()


class Session:
    """The state of one session; see the module. ``capacity`` is how many tasks it wants to hold at a time."""

    def __init__(
        self,
        identity: Identity,
        counters: Counters,
        *,
        capacity: int,
        cancel_after_lease: float | None = None,
    ) -> None:
        self.identity = identity
        self.counters = counters
        self.capacity = capacity
        self.ledger = Ledger(counters, cancel_after_lease)
        self.session_id = ""
        self.leaving = False
        self._phase = _Phase.CLOSED
        # Sessions that may own leases: those whose Welcome did not come, newest first, and the last one whose did.
        self._unwelcomed: deque[str] = deque(maxlen=MAX_PREVIOUS_SESSIONS - 1)
        self._last_welcomed = ""
        self._turns: deque[type[Outcome]] = deque(self.ledger.outbox)
        self._max_payload_bytes = 1 << 20
        self._max_frame_bytes = 3 << 20
        self._max_frame_items = 1000
        self._heartbeat_interval = 20.0
        self._ping_interval = 5.0
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        """Forget everything that belongs to one stream."""
        self._frame_id = 0
        self._first_sent = 1
        self._sent_at: deque[float] = deque()
        self._flights: dict[int, _Flight] = {}
        self._unanswered_heartbeats: deque[int] = deque()
        self._pongs: deque[int] = deque(maxlen=16)
        self._heartbeats: deque[list[Lease]] = deque()
        self._heartbeat_tasks_number = 0
        self._heartbeat_due = math.inf
        self._tasks_number = 0
        self._capacity_sent = -1
        self._goodbye_frame = 0
        self._goodbye_answered = False
        self._silent_at = now + WELCOME_TIMEOUT

    # The life of a stream.

    @property
    def held_count(self) -> int:
        """How many leases it holds."""
        return len(self.ledger.held)

    @property
    def recorded(self) -> int:
        """How many outcomes of the worker the servers have recorded."""
        return self.counters.completed + self.counters.failed + self.counters.released

    @property
    def is_open(self) -> bool:
        """Whether Welcome was received on the current stream."""
        return self._phase is _Phase.OPEN

    def is_over(self) -> bool:
        """Whether it leaves and nothing is left to do: nothing held, and no server that awaits a Goodbye."""
        if not self.leaving or self.ledger.held:
            return False
        return self._phase is not _Phase.OPEN or self._goodbye_answered

    def begin(self, now: float) -> None:
        """A new stream is made: its first frame is a Hello that names what is still held."""
        for flight in self._flights.values():
            if flight.is_heartbeat:
                continue
            for lease in flight.leases:
                if lease is not None and self.ledger.holds(lease):
                    self.ledger.enqueue(lease)
        self._reset(now)
        self._phase = _Phase.NEW

    def end(self) -> None:
        """The stream is gone. Nothing is sent or received until `begin`."""
        self._phase = _Phase.CLOSED

    def leave(self) -> None:
        """Want no more tasks: finish what is here, then say Goodbye."""
        self.leaving = True
        self.capacity = 0

    # What to write.

    def next_frame(self, now: float) -> pb.SessionRequest | None:
        """The next frame to write, None if there is nothing to say.

        ``now`` counts as the time when it was sent.
        """
        if self._phase is _Phase.NEW:
            return self._hello(now)
        if self._phase is not _Phase.OPEN:
            return None
        if self._pongs:
            frame = self._numbered(now)
            frame.pong.number = self._pongs.popleft()
            return frame
        if self.capacity != self._capacity_sent:
            frame = self._numbered(now)
            frame.capacity.capacity = self._capacity_sent = self.capacity
            frame.capacity.SetInParent()
            return frame
        if self._heartbeats:
            return self._heartbeat_frame(now)
        for _ in range(len(self._turns)):
            waiting = self.ledger.outbox[self._turns[0]]
            # The turn goes round, so that no class of outcomes can starve another.
            self._turns.rotate(-1)
            if waiting and (outcomes := self._outcomes_frame(waiting, now)) is not None:
                return outcomes
        if self.leaving and not self.ledger.held and not self._goodbye_frame:
            frame = self._numbered(now)
            frame.goodbye.SetInParent()
            self._goodbye_frame = frame.frame_id
            return frame
        return None

    def _numbered(self, now: float) -> pb.SessionRequest:
        self._frame_id += 1
        self._sent_at.append(now)
        if len(self._sent_at) > _MAX_SENT_TIMES:
            # Pongs alone would gather for ever. The oldest that is kept takes the time of what was before it: too
            # early a time only makes a lease seem shorter than it is.
            oldest = self._sent_at.popleft()
            self._first_sent += 1
            self._sent_at[0] = oldest
        return pb.SessionRequest(frame_id=self._frame_id)

    def _hello(self, now: float) -> pb.SessionRequest:
        frame = self._numbered(now)
        hello = frame.hello
        hello.protocol_version = PROTOCOL_VERSION
        hello.namespace = self.identity.namespace
        hello.worker_name = self.identity.worker_name
        hello.process_nonce = self.identity.process_nonce
        hello.sdk_name = "fencepost-python"
        hello.sdk_version = self.identity.sdk_version
        hello.max_frame_bytes = self.identity.max_frame_bytes
        hello.capacity = self._capacity_sent = self.capacity
        for step in self.identity.steps.values():
            hello.handlers.add(name=step.name, queue=step.queue)
        hello.labels.update(self.identity.labels)
        hello.previous_session_ids.extend(self._unwelcomed)
        if self._last_welcomed:
            hello.previous_session_ids.append(self._last_welcomed)
        for lease in self.ledger.held.values():
            fill_ref(hello.held.add(), lease)
        # Chosen here, so that it can be named after a reconnect also if its Welcome never came.
        hello.session_id = str(uuid.uuid4())
        self._unwelcomed.appendleft(hello.session_id)
        self._phase = _Phase.GREETED
        return frame

    def _heartbeat_frame(self, now: float) -> pb.SessionRequest:
        leases = self._heartbeats.popleft()
        frame = self._numbered(now)
        for lease in leases:
            fill_ref(frame.heartbeat.tasks.add(), lease)
        frame.heartbeat.last_tasks_number = self._heartbeat_tasks_number
        frame.heartbeat.more = bool(self._heartbeats)
        self._flights[frame.frame_id] = _Flight(True, list(leases), now, len(leases))
        self._unanswered_heartbeats.append(frame.frame_id)
        if len(self._unanswered_heartbeats) > MAX_UNANSWERED_HEARTBEATS:
            # A server without its database answers none; what the oldest ones asked is asked again by the
            # newest.
            self._flights.pop(self._unanswered_heartbeats.popleft(), None)
        return frame

    def _outcomes_frame(self, waiting: deque[Lease], now: float) -> pb.SessionRequest | None:
        leases = take(waiting, self._max_frame_items, self._max_frame_bytes - _FRAME_SLACK)
        if not leases:
            return None
        frame = self._numbered(now)
        fill_outcomes(frame, leases)
        for lease in leases:
            lease.sent = True
        self._flights[frame.frame_id] = _Flight(False, list(leases), now, len(leases))
        return frame

    # What was read.

    def receive(self, frame: pb.SessionResponse, now: float) -> Effects:
        """Take a frame of the server's that was read at ``now``."""
        effects = Effects()
        kind = frame.WhichOneof("frame")
        if self._phase is not _Phase.OPEN:
            if kind != "welcome" or self._phase is not _Phase.GREETED:
                effects.rebuild = f"the server's first frame is {kind}, not welcome"
                return effects
            self._welcomed(frame.welcome, effects)
        elif kind == "tasks":
            self._take_tasks(frame.tasks, now, effects)
        elif kind == "ack":
            self._acknowledged(frame.ack, now, effects)
        elif kind == "ping":
            self._pongs.append(frame.ping.number)
        elif kind == "revoke":
            timed_out = frame.revoke.reason == error_pb2.ERROR_REASON_ATTEMPT_TIMEOUT
            reason = CancelReason.ATTEMPT_TIMEOUT if timed_out else CancelReason.LEASE_LOST
            for ref in frame.revoke.tasks:
                lease = self.ledger.find(ref)
                if lease is not None:
                    self.ledger.revoked(lease, reason, effects)
        elif kind == "drain":
            effects.drain = True
        # A kind that this SDK does not know is a newer server's; it is told our version and must do without.
        self._silent_at = now + MISSED_PINGS * self._ping_interval
        return effects

    def _welcomed(self, welcome: pb.Welcome, effects: Effects) -> None:
        hello_sent_at = self._sent_at[0]
        self._phase = _Phase.OPEN
        self.session_id = welcome.session_id
        self.counters.connects += 1
        # Hello has settled what the sessions before this one owned.
        self._unwelcomed.clear()
        self._last_welcomed = welcome.session_id
        self._heartbeat_interval = seconds_of(welcome.heartbeat_interval) or self._heartbeat_interval
        self._ping_interval = seconds_of(welcome.ping_interval) or self._ping_interval
        self._max_payload_bytes = welcome.max_payload_bytes or self._max_payload_bytes
        self._max_frame_bytes = welcome.max_frame_bytes or self._max_frame_bytes
        self._max_frame_items = welcome.max_frame_items or self._max_frame_items
        for result in welcome.held:
            lease = self.ledger.find(result.task)
            if lease is None:
                continue
            if result.kept:
                self._renewed(lease, hello_sent_at, seconds_of(result.lease_duration))
            else:
                # One with an outcome is sent again: the Ack tells whether it counted before the lease was
                # lost.
                self.ledger.lost(lease, effects)
        shortest = min((lease.lease_seconds for lease in self.ledger.held.values()), default=math.inf)
        self._plan_heartbeat(shortest, hello_sent_at)

    def _take_tasks(self, tasks: pb.Tasks, now: float, effects: Effects) -> None:
        self._tasks_number = tasks.tasks_number
        sent_at = self._time_of(tasks.last_frame_id)
        ledger = self.ledger
        shortest = math.inf
        for task in tasks.tasks:
            ref = task.task
            known = ledger.held.get((ref.run_id, ref.task_id))
            if known is not None:
                if known.token >= ref.fencing_token:
                    continue
                ledger.superseded(known, effects)
            lease = self._lease_of(task, sent_at, now)
            ledger.add(lease, now)
            shortest = min(shortest, lease.lease_seconds)
            if lease.step is not UNKNOWN_STEP:
                effects.start.append(lease)
            else:
                # Somebody else may know it; three times it costs no attempt.
                logger.error("a task came for handler %r, which this worker did not offer", task.handler)
                ledger.give(lease, Released())
        self._plan_heartbeat(shortest, sent_at)
        self.counters.started += len(effects.start)

    def _lease_of(self, task: pb.Task, sent_at: float, now: float) -> Lease:
        """Copy what is needed: holding on to a message would keep its whole frame in memory."""
        ref = task.task
        seconds = seconds_of(task.lease_duration)
        step = self.identity.steps.get(task.handler) if task.kind == pb.TASK_KIND_STEP else None
        return Lease(
            owner=self,
            step=step or UNKNOWN_STEP,
            run_id=ref.run_id,
            task_id=ref.task_id,
            token=ref.fencing_token,
            workflow_id=task.workflow_id,
            definition_hash=task.definition_hash,
            node_id=task.node_id,
            attempt=task.attempt,
            expires_at=sent_at + seconds,
            lease_seconds=seconds,
            # From now, unlike the lease: counted from a frame of long ago, it would end before it has begun.
            # That the server ends it a little earlier does no harm.
            deadline=now + seconds_of(task.attempt_timeout) if task.HasField("attempt_timeout") else 0.0,
            input=value_of(task.input),
            failure_before=failure_of(task.feedback) if task.HasField("feedback") else None,
            idempotency_key=task.idempotency_key,
            user_id=task.user_id,
            max_payload_bytes=self._max_payload_bytes,
        )

    def _time_of(self, frame_id: int) -> float:
        """When a frame of this stream was sent, or a time before it.

        Older ones are forgotten: the server only goes forward.
        """
        while self._first_sent < frame_id and len(self._sent_at) > 1:
            self._sent_at.popleft()
            self._first_sent += 1
        return self._sent_at[0]

    def _acknowledged(self, ack: pb.Ack, now: float, effects: Effects) -> None:
        if ack.frame_id == self._goodbye_frame:
            self._goodbye_answered = True
        flight = self._flights.get(ack.frame_id)
        if flight is None:
            if ack.HasField("error"):
                logger.error("frame %d was refused: %s", ack.frame_id, ack.error.message)
            return
        if ack.HasField("error"):
            del self._flights[ack.frame_id]
            self._frame_refused(flight, ack, now)
            return
        for result in ack.results:
            lease = flight.leases[result.index] if 0 <= result.index < len(flight.leases) else None
            if lease is None:
                continue
            flight.leases[result.index] = None
            flight.left -= 1
            if not flight.is_heartbeat:
                self.ledger.answered(lease, result, now)
            elif result.outcome == pb.ITEM_OUTCOME_OK:
                self._renewed(lease, flight.sent_at, seconds_of(result.lease_duration))
            elif result.outcome == pb.ITEM_OUTCOME_LEASE_LOST:
                self.ledger.lost(lease, effects)
        if flight.left <= 0:
            del self._flights[ack.frame_id]

    def _frame_refused(self, flight: _Flight, ack: pb.Ack, now: float) -> None:
        if flight.is_heartbeat:
            self._heartbeat_due = min(self._heartbeat_due, now + _HEARTBEAT_RETRY)
            return
        error = ack.error
        for lease in flight.leases:
            if lease is not None:
                self.ledger.refused(lease, error.reason, error.message, error.violations, now)

    @staticmethod
    def _renewed(lease: Lease, sent_at: float, seconds: float) -> None:
        if seconds > 0:
            lease.lease_seconds = seconds
            lease.expires_at = sent_at + seconds

    # What time brings, and what the executor reports.

    def next_due(self) -> float:
        """When `tick` has something to do, at the latest."""
        if self._phase is _Phase.CLOSED:
            return self.ledger.due
        return min(self.ledger.due, self._silent_at, self._heartbeat_due)

    def tick(self, now: float) -> Effects:
        """Do what is due at ``now``."""
        effects = Effects()
        self.ledger.tick(now, effects)
        if self._phase is _Phase.CLOSED:
            return effects
        if now >= self._silent_at:
            effects.rebuild = "nothing was heard from the server for too long"
            self._silent_at = math.inf
        if now >= self._heartbeat_due and self._phase is _Phase.OPEN:
            self._beat(now)
        return effects

    def _plan_heartbeat(self, shortest: float, sent_at: float) -> None:
        """Be in time for leases of which the shortest lasts so long from ``sent_at``; infinite if there are none."""
        if shortest < math.inf:
            due = sent_at + min(self._heartbeat_interval, shortest / 3)
            self._heartbeat_due = min(self._heartbeat_due, due)

    def _beat(self, now: float) -> None:
        """Plan a heartbeat of all leases that are held now, in as many frames as it takes."""
        leases = list(self.ledger.held.values())
        if not leases:
            self._heartbeat_due = math.inf
            return
        if not self._heartbeats:
            # One that still waits for its turn to be written says the same.
            for first in range(0, len(leases), self._max_frame_items):
                self._heartbeats.append(leases[first : first + self._max_frame_items])
            self._heartbeat_tasks_number = self._tasks_number
        shortest = min(lease.lease_seconds for lease in leases)
        self._heartbeat_due = now + max(min(self._heartbeat_interval, shortest / 3), _MIN_HEARTBEAT)

    def finish(self, lease: Lease, outcome: Outcome) -> None:
        """The executor is done with a lease."""
        self.ledger.finish(lease, outcome)

    def release(self, lease: Lease) -> None:
        """Give back a lease that the executor has not begun and will not begin."""
        if self.ledger.holds(lease) and lease.outcome is None:
            self.ledger.give(lease, Released())

    def cut_off(self) -> Effects:
        """The worker must end: every step that still runs is cancelled and reported as failed by that."""
        effects = Effects()
        failure = Failed(FailureKind.OPERATIONAL, WORKER_SHUTDOWN, "the worker was shut down amid the step")
        for lease in list(self.ledger.held.values()):
            if lease.outcome is None:
                self.ledger.cut_off(lease, failure, CancelReason.WORKER_SHUTDOWN, effects)
        return effects


def _unknown() -> None:
    """Never run: it stands for a handler that the worker lacks."""


UNKNOWN_STEP: Step[..., Any] = Step(_unknown, "(unknown)")
