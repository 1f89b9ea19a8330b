"""One worker's session with a server, without I/O: frames and the time come in, frames and effects come out.

A `Session` lives over reconnects: each stream begins with `begin`, then `next_frame` gives what to write and
`receive` takes what was read; `tick` does what time brings. What it holds is in its `Ledger`. Invariants:

- When a stream breaks, every outcome that was on its way waits again: it is sent until an Ack has answered
  it.
- A heartbeat that finds a lease gone does not decide about an outcome that exists: its own Ack does, because
  the two frames may be handled in either order.
- A step that should stop because its run ends keeps its lease: what it reports up to the end of its grace counts, and
  the server says when that is over.
- Whether a lease has run out is the server's to say. While nothing can be heard from it a step goes on, and
  the fencing token decides about its result (``cancel_after_lease`` limits that, for those who want it).

Used by one thread, that of the session's loop.
"""

from __future__ import annotations

import enum
import math
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial

from fencepost.advances import Asked, Behind, Given, Lost, Pushed
from fencepost.checkpoints import Saving
from fencepost.failure import WORKER_SHUTDOWN, Failed, Outcome, Released
from fencepost.flights import Cargo, Flight, Flights
from fencepost.frames import (
    ITEM_OVERHEAD,
    fill_advances,
    fill_answers,
    fill_checkpoints,
    fill_heartbeat,
    fill_outcomes,
    fill_ref,
    seconds_of,
    stop_reason,
    take,
)
from fencepost.heartbeats import Heartbeats
from fencepost.identity import UNKNOWN_STEP, Identity
from fencepost.lease import CancelReason, DecideLease, Lease
from fencepost.ledger import Counters, Effects, Ledger
from fencepost.models import FailureKind
from fencepost.sdk_log import SdkLog
from fencepost.v1 import error_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb

logger = SdkLog("fencepost.worker")

PROTOCOL_VERSION = 1
MAX_PREVIOUS_SESSIONS = 16
WELCOME_TIMEOUT = 10.0
MISSED_PINGS = 3
_FRAME_SLACK = 1024


class _Phase(enum.Enum):
    CLOSED = enum.auto()
    NEW = enum.auto()
    GREETED = enum.auto()
    OPEN = enum.auto()


class Session:
    """The state of one session; see the module. ``capacity`` is how many tasks it wants to hold at a time,
    ``workflow_capacity`` how many of DECIDE, which are counted by themselves.
    """

    def __init__(
        self,
        identity: Identity,
        counters: Counters,
        *,
        capacity: int,
        workflow_capacity: int = 0,
        cancel_after_lease: float | None = None,
    ) -> None:
        self.identity = identity
        self.counters = counters
        self.capacity = capacity
        self.workflow_capacity = workflow_capacity
        self.ledger = Ledger(counters, cancel_after_lease)
        self.session_id = ""
        self.leaving = False
        self._phase = _Phase.CLOSED
        # Sessions that may own leases: those whose Welcome did not come, newest first, and the last one whose did.
        self._unwelcomed: deque[str] = deque(maxlen=MAX_PREVIOUS_SESSIONS - 1)
        self._last_welcomed = ""
        # Whose turn it is to be written.
        self._turns: deque[Callable[[float], pb.SessionRequest | None]] = deque(
            [self._advances_frame, self._checkpoints_frame, self._answers_frame]
        )
        self._turns.extend(partial(self._outcomes_frame, kind) for kind in self.ledger.outbox)
        self._flights = Flights()
        self._answers: deque[pb.QueryResultItem] = deque()
        self._heartbeats = Heartbeats()
        self._max_payload_bytes = 1 << 20
        self._max_frame_bytes = 3 << 20
        self._max_frame_items = 1000
        self._ping_interval = 5.0
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        """Forget everything that belongs to one stream."""
        self._flights.reset()
        # Whoever asked over the stream before is told by its server that there is no answer.
        self._answers.clear()
        self._pongs: deque[int] = deque(maxlen=16)
        self._heartbeats.reset()
        self._tasks_number = 0
        self._capacity_sent = (-1, -1)
        self.may_have_unread = False
        """Whether the server may have sent tasks that were not read: it was to, and has not said that no more come."""
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
        counters = self.counters
        return counters.completed + counters.failed + counters.released + counters.advanced

    @property
    def is_open(self) -> bool:
        """Whether Welcome was received on the current stream."""
        return self._phase is _Phase.OPEN

    def is_over(self) -> bool:
        """Whether it leaves and has nothing to do: nothing held, no server that has its Hello and awaits a Goodbye."""
        if not self.leaving or self.ledger.held:
            return False
        return self._phase in (_Phase.CLOSED, _Phase.NEW) or self._goodbye_answered

    def begin(self, now: float) -> None:
        """A new stream is made: its first frame is a Hello that names what is still held."""
        for flight in self._flights:
            for lease in flight.leases:
                if lease is None or flight.cargo is Cargo.HEARTBEAT:
                    continue
                if flight.cargo is Cargo.CHECKPOINT:
                    self.ledger.checkpoints.unsent(lease)
                elif not self.ledger.holds(lease):
                    continue
                elif flight.cargo is Cargo.OUTCOME:
                    self.ledger.enqueue(lease)
                elif isinstance(lease, DecideLease):
                    self.ledger.advances.unsent(lease)
        self._reset(now)
        self._phase = _Phase.NEW

    def end(self) -> None:
        """The stream is gone. Nothing is sent or received until `begin`."""
        self._phase = _Phase.CLOSED

    def leave(self) -> None:
        """Want no more tasks: finish what is here, then say Goodbye."""
        self.leaving = True
        self.capacity = self.workflow_capacity = 0

    # What to write.

    def next_frame(self, now: float) -> pb.SessionRequest | None:
        """The next frame to write, None if there is nothing to say. ``now`` counts as the time when it was sent."""
        if self._phase is _Phase.NEW:
            return self._hello(now)
        if self._phase is not _Phase.OPEN:
            return None
        if self._pongs:
            frame = self._flights.numbered(now)
            frame.pong.number = self._pongs.popleft()
            return frame
        if (self.capacity, self.workflow_capacity) != self._capacity_sent:
            frame = self._flights.numbered(now)
            frame.capacity.capacity, frame.capacity.workflow_capacity = self._offer()
            frame.capacity.SetInParent()
            return frame
        if self._heartbeats.waiting:
            return self._heartbeat_frame(now)
        for _ in range(len(self._turns)):
            turn = self._turns[0]
            # The turn goes round, so that no class of outcomes can starve another.
            self._turns.rotate(-1)
            if (said := turn(now)) is not None:
                return said
        if self.leaving and not self.ledger.held and not self._goodbye_frame:
            frame = self._flights.numbered(now)
            frame.goodbye.SetInParent()
            self._goodbye_frame = frame.frame_id
            return frame
        return None

    def _hello(self, now: float) -> pb.SessionRequest:
        frame = self._flights.numbered(now)
        hello = frame.hello
        hello.protocol_version = PROTOCOL_VERSION
        hello.capacity, hello.workflow_capacity = self._offer()
        self.identity.fill(hello)
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

    def _offer(self) -> tuple[int, int]:
        self._capacity_sent = (self.capacity, self.workflow_capacity)
        self.may_have_unread = self.may_have_unread or any(self._capacity_sent)
        return self._capacity_sent

    def _heartbeat_frame(self, now: float) -> pb.SessionRequest:
        leases = self._heartbeats.next()
        frame = self._flights.numbered(now)
        fill_heartbeat(frame.heartbeat, leases, self._max_frame_bytes - _FRAME_SLACK)
        frame.heartbeat.last_tasks_number = self._heartbeats.tasks_number
        frame.heartbeat.more = self._heartbeats.waiting
        self._flights.fly(frame, Cargo.HEARTBEAT, leases, now)
        return frame

    def _advances_frame(self, now: float) -> pb.SessionRequest | None:
        leases = self.ledger.advances.take(self._max_frame_items, self._max_frame_bytes - _FRAME_SLACK)
        if not leases:
            return None
        frame = self._flights.numbered(now)
        fill_advances(frame, leases)
        self._flights.fly(frame, Cargo.ADVANCE, leases, now)
        return frame

    def _answers_frame(self, now: float) -> pb.SessionRequest | None:
        if not self._answers:
            return None
        frame = self._flights.numbered(now)
        fill_answers(frame, self._answers, self._max_frame_items, self._max_frame_bytes - _FRAME_SLACK)
        return frame

    def _outcomes_frame(self, kind: type[Outcome], now: float) -> pb.SessionRequest | None:
        waiting = self.ledger.outbox[kind]
        leases = take(waiting, self._max_frame_items, self._max_frame_bytes - _FRAME_SLACK) if waiting else None
        if not leases:
            return None
        frame = self._flights.numbered(now)
        fill_outcomes(frame, leases)
        for lease in leases:
            lease.sent = True
        self._flights.fly(frame, Cargo.OUTCOME, leases, now)
        return frame

    def _checkpoints_frame(self, now: float) -> pb.SessionRequest | None:
        room = self._max_frame_bytes - _FRAME_SLACK
        leases = self.ledger.checkpoints.take(self._max_frame_items, room, ITEM_OVERHEAD)
        if not leases:
            return None
        frame = self._flights.numbered(now)
        fill_checkpoints(frame, leases)
        self._flights.fly(frame, Cargo.CHECKPOINT, leases, now)
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
        elif kind == "events":
            for pushed in frame.events.runs:
                lease = self.ledger.find(pushed.task)
                if isinstance(lease, DecideLease):
                    effects.news.append(Pushed(lease, pushed))
        elif kind == "query":
            effects.news.append(Asked(self, frame.query, self._max_payload_bytes))
        elif kind == "ping":
            self._pongs.append(frame.ping.number)
        elif kind == "revoke":
            timed_out = frame.revoke.reason == error_pb2.ERROR_REASON_ATTEMPT_TIMEOUT
            reason = CancelReason.ATTEMPT_TIMEOUT if timed_out else CancelReason.LEASE_LOST
            for ref in frame.revoke.tasks:
                lease = self.ledger.find(ref)
                if lease is not None:
                    self.ledger.revoked(lease, reason, effects)
        elif kind == "cancel":
            until = now + seconds_of(frame.cancel.remaining)
            for ref in frame.cancel.tasks:
                lease = self.ledger.find(ref)
                if lease is not None:
                    self.ledger.wanted_to_stop(lease, stop_reason(frame.cancel.reason), until, effects)
        elif kind == "drain":
            effects.drain, self.may_have_unread = True, False
        # A kind that this SDK does not know is a newer server's; it is told our version and must do without.
        self._silent_at = now + MISSED_PINGS * self._ping_interval
        return effects

    def _welcomed(self, welcome: pb.Welcome, effects: Effects) -> None:
        hello_sent_at = self._flights.hello_sent_at
        self._phase = _Phase.OPEN
        self.session_id = welcome.session_id
        self.counters.connects += 1
        # Hello has settled what the sessions before this one owned.
        self._unwelcomed.clear()
        self._last_welcomed = welcome.session_id
        self._heartbeats.interval = seconds_of(welcome.heartbeat_interval) or self._heartbeats.interval
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
        self._heartbeats.plan(shortest, hello_sent_at)

    def _take_tasks(self, tasks: pb.Tasks, now: float, effects: Effects) -> None:
        self._tasks_number = tasks.tasks_number
        sent_at = self._flights.time_of(tasks.last_frame_id)
        ledger = self.ledger
        shortest = math.inf
        for task in tasks.tasks:
            ref = task.task
            known = ledger.held.get((ref.run_id, ref.task_id))
            if known is not None:
                if known.token >= ref.fencing_token:
                    continue
                ledger.superseded(known, effects)
            lease = self.identity.lease_of(task, self, sent_at, now, self._max_payload_bytes)
            ledger.add(lease, now)
            shortest = min(shortest, lease.lease_seconds)
            if isinstance(lease, DecideLease) and lease.step is not UNKNOWN_STEP:
                lease.max_advance_bytes = self._max_frame_bytes - _FRAME_SLACK
                effects.news.append(Given(lease))
            elif lease.step is not UNKNOWN_STEP:
                effects.start.append(lease)
            else:
                # Somebody else may know it; three times it costs no attempt.
                logger.error(
                    "a %s task came for handler %r, which this worker did not offer as such",
                    lease.kind.value,
                    task.handler,
                )
                ledger.give(lease, Released())
        self._heartbeats.plan(shortest, sent_at)
        self.counters.started += len(effects.start)

    def _acknowledged(self, ack: pb.Ack, now: float, effects: Effects) -> None:
        if ack.frame_id == self._goodbye_frame:
            self._goodbye_answered, self.may_have_unread = True, False
        flight = self._flights.of(ack.frame_id)
        if flight is None:
            if ack.HasField("error"):
                logger.error("frame %d was refused: %s", ack.frame_id, ack.error.message)
            return
        if ack.HasField("error"):
            self._flights.landed(ack.frame_id)
            self._frame_refused(flight, ack, now, effects)
            return
        leases, cargo = flight.leases, flight.cargo
        is_outcome, is_advance = cargo is Cargo.OUTCOME, cargo is Cargo.ADVANCE
        for result in ack.results:
            index = result.index  # once: reading a field of a message takes as long as a call
            lease = leases[index] if 0 <= index < len(leases) else None
            if lease is None:
                continue
            leases[index] = None
            flight.left -= 1
            if is_outcome:
                self.ledger.answered(lease, result, now)
            elif is_advance and isinstance(lease, DecideLease):
                self.ledger.advance_answered(lease, result, now, effects)
            elif result.outcome == pb.ITEM_OUTCOME_LEASE_LOST:
                self.ledger.lost(lease, effects)
            elif cargo is Cargo.HEARTBEAT:
                self._heartbeat_answered(lease, result, flight.sent_at, effects)
            elif result.outcome == pb.ITEM_OUTCOME_REFUSED:
                self._checkpoint_refused(lease, result, now)
            else:
                self.ledger.checkpoints.saved(lease)
        if flight.left <= 0:
            self._flights.landed(ack.frame_id)

    def _heartbeat_answered(self, lease: Lease, result: pb.ItemResult, sent_at: float, effects: Effects) -> None:
        if result.outcome != pb.ITEM_OUTCOME_OK:
            return
        seconds = seconds_of(result.lease_duration)
        self._renewed(lease, sent_at, seconds)
        if isinstance(lease, DecideLease) and result.last_seq:
            effects.news.append(Behind(lease, result.last_seq))
        if result.cancel_wanted:
            self.ledger.wanted_to_stop(lease, stop_reason(result.reason), sent_at + seconds, effects)

    def _checkpoint_refused(self, lease: Lease, why: pb.ItemResult | run_service_pb2.ItemError, now: float) -> None:
        self.ledger.checkpoints.refused(lease, why.reason, why.message, why.violations, now)

    def _frame_refused(self, flight: Flight, ack: pb.Ack, now: float, effects: Effects) -> None:
        if flight.cargo is Cargo.HEARTBEAT:
            self._heartbeats.again(now)
            return
        error = ack.error
        for lease in flight.leases:
            if lease is None:
                continue
            if flight.cargo is Cargo.CHECKPOINT:
                self._checkpoint_refused(lease, error, now)
            elif isinstance(lease, DecideLease) and flight.cargo is Cargo.ADVANCE:
                self.ledger.advance_refused(lease, error, now, effects)
            else:
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
        return min(self.ledger.due, self._silent_at, self._heartbeats.due)

    def tick(self, now: float) -> Effects:
        """Do what is due at ``now``."""
        effects = Effects()
        self.ledger.tick(now, effects)
        if self._phase is _Phase.CLOSED:
            return effects
        if now >= self._silent_at:
            effects.rebuild = "nothing was heard from the server for too long"
            self._silent_at = math.inf
        if now >= self._heartbeats.due and self._phase is _Phase.OPEN:
            self._heartbeats.beat(list(self.ledger.held.values()), self._tasks_number, self._max_frame_items, now)
        return effects

    def finish(self, lease: Lease, outcome: Outcome) -> None:
        """The executor is done with a lease."""
        self.ledger.finish(lease, outcome)

    def save(self, lease: Lease, saving: Saving) -> None:
        """A step has a new state to be saved."""
        self.ledger.save(lease, saving)

    def release(self, lease: Lease) -> None:
        """Give back a lease that was not begun and will not be."""
        if self.ledger.holds(lease) and not lease.unanswered:
            self.ledger.give(lease, Released())

    def decided(self, lease: DecideLease, said: pb.AdvanceItem | Failed | Released) -> None:
        """The decider has an Advance of a run, or gives its task back; it counts if the lease is still held."""
        if self.ledger.holds(lease) and not lease.unanswered:
            if isinstance(said, pb.AdvanceItem):
                self.ledger.advances.send(lease, said)
            else:
                self.ledger.give(lease, said)

    def answer(self, item: pb.QueryResultItem) -> None:
        """A query has its answer."""
        self._answers.append(item)

    def cut_off(self) -> Effects:
        """The worker must end: every step that still runs is cancelled and reported as failed by that."""
        effects = Effects()
        failure = Failed(FailureKind.OPERATIONAL, WORKER_SHUTDOWN, "the worker was shut down amid the step")
        for lease in list(self.ledger.held.values()):
            if isinstance(lease, DecideLease) and lease.outcome is None:
                lease.advance = None
                self.ledger.give(lease, Released())
                effects.news.append(Lost(lease))
            elif lease.outcome is None:
                self.ledger.cut_off(lease, failure, CancelReason.WORKER_SHUTDOWN, effects)
        return effects
